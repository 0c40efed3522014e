"""The study of growth: slopes, points that are measured once, and quantities of every sweep."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from marks import some

from experiments.benchmarks import growth_report, growth_sweeps
from sparse_dataflow.files.errors import UserError


@pytest.mark.parametrize("power", [0, 1, 1.5, 2])
def test_the_slope_is_the_power_of_the_last_points(power):
    sizes = np.array([1, 2, 4, 8, 16])
    values = 3.0 * sizes**power
    values[0] += 100  # A fixed cost hides the growth of small sizes.
    assert growth_report.slope(sizes, values) == pytest.approx(power)


def test_values_that_are_noise_have_no_slope():
    points = [{"size": n, "long seconds": 0.1 * n, "short seconds": 1e-5} for n in (1, 2, 4)]
    assert list(growth_report.curves(points)) == ["long seconds"]


def test_a_point_is_measured_once(tmp_path, monkeypatch, capsys):
    measured = []

    def measure(name, size):
        measured.append(size)
        return {"size": size, "saving seconds": 0.01 * size}

    monkeypatch.setattr(growth_report, "_in_new_process", measure)
    options = SimpleNamespace(sweeps=("leaves",), out=str(tmp_path))
    growth_report.report_growth(options)
    lines = (tmp_path / growth_report.POINTS).read_text().splitlines()
    (tmp_path / growth_report.POINTS).write_text("\n".join(lines[:-1]) + "\n")
    growth_report.report_growth(options)
    sizes = growth_sweeps.SWEEPS["leaves"].sizes
    assert measured == [*sizes, sizes[-1]]
    assert {"date", "machine", "versions"} <= json.loads(lines[0]).keys()
    assert "| arrays of a checkpoint | 32 to 2,048 | saving | 0.32 s | 20.5 s | 1.00 |" in (
        capsys.readouterr().out
    )
    assert (tmp_path / growth_report.FIGURE).stat().st_size > 0


@pytest.mark.parametrize("line", ['{"sweep": "chips", "of": 64, "si', "[1]", '{"sweep": "chips"}'])
def test_a_damaged_point_is_refused(tmp_path, line):
    (tmp_path / growth_report.POINTS).write_text(line)
    with pytest.raises(UserError, match=r"points\.jsonl, line 1, is damaged .*; remove it"):
        growth_report.report_growth(SimpleNamespace(sweeps=(), out=str(tmp_path)))


def test_a_folder_with_files_of_others_stays_as_it_is(tmp_path):
    (tmp_path / "text.txt").write_text("a corpus")
    with pytest.raises(UserError, match=r"growth may not replace \(text\.txt\); legal: --out"):
        growth_report.report_growth(SimpleNamespace(sweeps=(), out=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize(
    ("name", "size"),
    some(
        [("metrics", 50), ("layouts", 4800), ("chips", 8), ("pruning", 1024), ("leaves", 4),
         ("feature order", 64), ("documents", 40), ("files", 40), ("text", 20_000)],
        "metrics", "layouts",
    ),
)  # fmt: skip
def test_a_sweep_measures_positive_quantities(name, size, tmp_path):
    quantities = growth_sweeps.SWEEPS[name].measure(size, tmp_path)
    seconds = [value for quantity, value in quantities.items() if quantity.endswith("seconds")]
    assert seconds and min(seconds) >= 0 and max(seconds) > 0


@pytest.mark.slow
def test_the_program_of_a_device_shrinks_with_their_number():
    one, two = (growth_report._in_new_process("devices", number) for number in (1, 2))
    assert two["step seconds"] > 0 and two["compile seconds"] > 0
    assert two["program bytes"] < 0.6 * one["program bytes"]
