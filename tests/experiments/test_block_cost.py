"""The study of what a block costs: its law, its cells, its files."""

import itertools
import json

import numpy as np
import pytest
from exit_status import exit_status

from experiments import block_cost
from experiments.studies.serving_cost import block_cost as study
from sparse_dataflow.files.errors import UserError

SHAPES = ("1", "2", "4", "1x4", "1x16", "1x64", "8")


def lines(law, widths=(32, 64, 128), shapes=SHAPES):
    """Returns runs whose losses follow a law; the narrow model's excess is 0.5."""
    cells = itertools.product(widths, (0.5, 0.25), (study.NARROW, *shapes), range(2))
    rows = []
    for width, density, shape, sample in cells:
        sides = None if shape == study.NARROW else study._sides(shape)
        excess = law.excess(sides, width, density) if sides else 0.5
        rows.append(
            {"width": width, "density": density, "shape": shape, "sample": sample, "dense": 2.0,
             "loss": 2 + excess, "command": "python -m experiments.block_cost"}
        )  # fmt: skip
    return rows


def law(seed):
    names = study._terms((1, 1), 64, 0.5)
    numbers = np.random.default_rng(seed).uniform(-0.15, 0.15, len(names))
    return study.Law(dict(zip(names, numbers.tolist())))


@pytest.mark.parametrize("seed", range(3))
def test_a_law_is_found_again_and_predicts_what_it_has_not_seen(seed, tmp_path):
    truth = law(seed)
    result = study.report(tmp_path, lines(truth), "1x16")
    assert result["law"] == pytest.approx(truth.constants, abs=1e-9)
    assert set(result["errors"]) == {"width 128", "shape 1x16"}
    assert all(each["largest"] < 1e-6 for each in result["errors"].values())
    saved = json.loads((tmp_path / "block_cost.json").read_text())
    assert saved["cells"] == result["cells"]
    assert (tmp_path / "block_cost.png").stat().st_size > 10_000


def test_a_cell_is_its_mean_excess_over_that_of_the_narrow_model():
    runs = [
        {"width": 32, "density": 0.5, "shape": shape, "sample": n, "dense": 1.0, "loss": loss}
        for shape, losses in {"narrow": (1.3, 1.5), "4": (1.1, 1.3), "1": (1.05, 1.05)}.items()
        for n, loss in enumerate(losses)
    ]
    cells = {cell["shape"]: cell for cell in study.mean_cells(runs)}
    assert cells["4"]["excess"] == pytest.approx(0.2)
    assert cells["4"]["spread"] == pytest.approx(0.2)
    assert cells["4"]["to_narrow"] == pytest.approx(0.5)
    assert cells["1"]["to_narrow"] == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("shape", "block", "density", "stay"),
    [((48, 96), "4", 0.5, 6), ((48, 96), "1x16", 0.25, 12), ((64, 32), "1", 0.5, 32)],
)
def test_equal_shares_of_all_outputs_stay(shape, block, density, stay):
    assert study.target_of(shape, block, density).stay == stay


@pytest.mark.parametrize(
    ("shape", "block", "density"), [((48, 96), "16", 0.5), ((48, 96), "1x64", 0.5)]
)
def test_shapes_without_such_blocks_are_refused(shape, block, density):
    with pytest.raises(UserError):
        study.target_of(shape, block, density)


@pytest.mark.slow
def test_a_small_study_goes_on(tmp_path, capsys):
    small = (
        "--widths=32", "--densities=0.5", "--length=1", "--sequences=32", "--layers=1",
        "--held_out=1x8", f"--models={tmp_path / 'models'}", f"--out={tmp_path / 'out'}",
    )  # fmt: skip
    assert exit_status(block_cost, *small, "--shapes=4", "--samples=1") == 0
    assert exit_status(block_cost, *small, "--shapes=4,1x8,1x64", "--samples=1") == 0
    runs = [json.loads(line) for line in (tmp_path / "out/runs.jsonl").read_text().splitlines()]
    assert [run["shape"] for run in runs] == ["narrow", "4", "1x8"]  # No 1x64 divides 32 outputs.
    assert all(run["loss"] > 0 for run in runs)
    assert "| 1x8 |" in capsys.readouterr().out
