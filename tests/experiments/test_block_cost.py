"""The study of what a block costs: its law, its cells, its files."""

import itertools
import json

import numpy as np
import pytest
from exit_status import exit_status

from experiments import block_cost
from experiments.studies.serving_cost import block_cost as study
from experiments.studies.serving_cost import block_report
from sparse_dataflow.files.errors import UserError

SHAPES = ("1", "2", "4", "1x4", "1x16", "1x64", "8", "4x1", "16x1")


def lines(law, widths=(32, 64, 128), shapes=SHAPES):
    """Returns runs whose costs follow a law; the narrow model's excess loss is 0.5."""
    cells = itertools.product(widths, (0.5, 0.25), (block_report.NARROW, *shapes), range(2))
    rows = []
    for width, density, shape, sample in cells:
        sides = None if shape == block_report.NARROW else block_report._sides(shape)
        excess = 0.5 * (law.cost(sides, width, density) if sides else 1)
        rows.append(
            {"width": width, "density": density, "shape": shape, "sample": sample, "dense": 2.0,
             "loss": 2 + excess, "command": "python -m experiments.block_cost"}
        )  # fmt: skip
    return rows


def law(seed):
    names = block_report._terms((1, 1), 64, 0.5)
    numbers = np.random.default_rng(seed).uniform(-0.15, 0.15, len(names))
    return block_report.Law(dict(zip(names, numbers.tolist())))


@pytest.mark.parametrize(("sides", "density"), [((1, 16), 0.5), ((16, 16), 0.25), ((4, 2), 0.5)])
def test_blocks_win_from_the_width_at_which_they_cost_as_much_as_the_narrow_model(sides, density):
    wide = {"1": -3.0, "narrowness": 4.0, "narrowness x size": 0.1}
    truth = block_report.Law({**law(0).constants, **wide})
    width = truth.width(sides, density)
    assert truth.cost(sides, width, density) == pytest.approx(1)
    assert truth.cost(sides, 2 * width, density) < 1
    assert truth.cost(sides, 1e9, density) == pytest.approx(truth.floor(sides, density))
    for never in ({"1": 9.0}, {"narrowness": -4.0}):
        assert block_report.Law({**truth.constants, **never}).width(sides, density) is None


@pytest.mark.parametrize("seed", range(3))
def test_a_law_is_found_again_and_predicts_what_it_has_not_seen(seed, tmp_path):
    truth = law(seed)
    result = block_report.report(tmp_path, lines(truth), "1x16")
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
    cells = {cell["shape"]: cell for cell in block_report.mean_cells(runs)}
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


@pytest.mark.parametrize("widths", [(48,), (48, 96)])
def test_cells_that_decide_no_law_are_reported_without_one(widths, tmp_path):
    result = block_report.report(tmp_path, lines(law(0), widths, ("1", "1x16")), "1x16")
    assert result["law"] is None
    assert result["errors"] == {}
    assert "| 1x16 |" in (tmp_path / "block_cost.md").read_text()


def test_recovered_models_have_tables_of_their_own_and_no_part_in_the_law(tmp_path):
    truth = law(1)
    runs = lines(truth)
    recovered = [{**run, "recovery": 0.05, "loss": 2 + (run["loss"] - 2) / 4} for run in runs]
    result = block_report.report(tmp_path, [*runs, *recovered], "1x16")
    assert result["law"] == pytest.approx(truth.constants, abs=1e-9)
    by_place = {(c["width"], c["shape"], c["density"], c["recovery"]): c for c in result["cells"]}
    before, after = (by_place[64, "1x16", 0.5, recovery] for recovery in (0.0, 0.05))
    assert after["excess"] == pytest.approx(before["excess"] / 4)
    assert after["to_narrow"] == pytest.approx(before["to_narrow"])
    assert "## density 0.5, recovery 5%:" in (tmp_path / "block_cost.md").read_text()


@pytest.mark.parametrize("text", ["3by4", "1x0", "narrow"])
def test_a_shape_that_is_no_block_is_refused_before_any_training(text, tmp_path, capsys):
    flags = f"--models={tmp_path / 'models'}", f"--out={tmp_path / 'out'}"
    assert exit_status(block_cost, f"--shapes=4,{text}", *flags) == 2
    assert "not legal; legal: 16 or 16x16" in capsys.readouterr().err
    assert not (tmp_path / "models").exists()


@pytest.mark.slow
def test_a_small_study_goes_on(tmp_path, capsys):
    small = (
        "--widths=32", "--densities=0.5", "--length=10", "--sequences=32", "--layers=1",
        "--held_out=1x8", f"--models={tmp_path / 'models'}", f"--out={tmp_path / 'out'}",
    )  # fmt: skip
    assert exit_status(block_cost, *small, "--shapes=4", "--samples=1") == 0
    more = "--shapes=4,1x8,1x64", "--samples=1", "--recover=0,0.5"
    assert exit_status(block_cost, *small, *more) == 0
    runs = [json.loads(line) for line in (tmp_path / "out/runs.jsonl").read_text().splitlines()]
    places = [(run["shape"], run["recovery"]) for run in runs]
    # No 1x64 divides 32 outputs.
    assert places == [
        ("narrow", 0.0), ("4", 0.0), ("narrow", 0.5), ("4", 0.5), ("1x8", 0.0), ("1x8", 0.5)
    ]  # fmt: skip
    losses = {place: run["loss"] for place, run in zip(places, runs)}
    assert all(losses[shape, 0.5] < losses[shape, 0.0] for shape in ("narrow", "4", "1x8"))
    assert "| 1x8 |" in capsys.readouterr().out
