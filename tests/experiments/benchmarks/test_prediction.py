"""Rates measured on the spot go through the cost model and come out as the times measured."""

import contextlib
import csv
import dataclasses
import json

import pytest

from experiments import interplay
from experiments.benchmarks import interplay_report, interplay_step, prediction
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.training import cost
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.planner.efficiency import PRIOR
from sparse_dataflow.planner.step_time import step_time
from sparse_dataflow.runs.run_config import SIZES

PROJECTIONS = SIZES["nano"].projections

CHIP = Chip("cpu", {"float32": 2e11}, 2**34, 2e10)
SECONDS = {"qkv": 0.03, "attention": 0.02, "attn_out": 0.01, "mlp_in": 0.04, "mlp_out": 0.05}
SECONDS |= {"norms and GELU": 0.006, "head and loss": 0.07, "optimizer": 0.008}


@pytest.fixture
def sections(monkeypatch):
    monkeypatch.setattr(prediction, "initial_state", lambda *_: None)
    monkeypatch.setattr(prediction, "section_seconds", lambda *_: dict(SECONDS))


@pytest.mark.parametrize("density", [1.0, 0.25])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_step_is_predicted_as_its_sections_times_layers(sections, density, layers, remat):
    config = prediction.check_model("nano", density, 64)
    config = dataclasses.replace(config, num_layers=layers, remat=remat)
    training = TrainingConfig(steps=1, batch=4, sequence=64)
    rates = prediction.measured_rates(config, training, CHIP)
    plan = prediction.plan_of(config, training)
    time = step_time(config, 64, plan, CHIP, PRIOR, rates=rates)
    for name in (*PROJECTIONS, "attention"):
        assert time.terms[name] == pytest.approx(layers * SECONDS[name])
    # Norms and GELU run again with what is computed again.
    again = 4 / 3 if remat == "full" else 1
    assert time.terms["element-wise"] == pytest.approx(again * layers * SECONDS["norms and GELU"])
    assert time.terms["head"] == pytest.approx(SECONDS["head and loss"])
    one = dataclasses.replace(config, num_layers=1)
    grown = cost.parameter_count(config) / cost.parameter_count(one)
    assert time.terms["optimizer"] == pytest.approx(SECONDS["optimizer"] * grown)
    forward = sum(SECONDS[n] for n in ("qkv", "attention", "attn_out", "mlp_in")) / 3
    expected = layers * forward if remat == "full" else 0
    assert time.terms["recompute"] == pytest.approx(expected)


def test_a_row_has_both_times_and_what_they_are_made_of(sections, monkeypatch):
    monkeypatch.setattr(prediction, "measured_seconds", lambda *_: 0.5)
    row = prediction.check(prediction.check_model("nano", 0.125, 0), 1024, 0, 1, CHIP)
    assert (row["batch"], row["sequence"], row["measured_ms"]) == (8, 128, 500.0)
    assert row["predicted_ms"] == pytest.approx(sum(row["terms_ms"].values()))
    assert row["error"] == pytest.approx(row["predicted_ms"] / 500 - 1)


def test_long_sequences_are_cut_and_one_row_stays(sections, monkeypatch):
    monkeypatch.setattr(prediction, "measured_seconds", lambda *_: 0.5)
    row = prediction.check(prediction.check_model("125m", 1.0, 0), 100, 0, 1, CHIP)
    assert (row["batch"], row["sequence"]) == (1, prediction.LONGEST)


def test_layouts_without_balance_are_refused_before_anything_is_measured():
    prediction.check_model("125m", 1.0, 64)
    prediction.check_model("125m", 0.125, 0)
    with pytest.raises(UserError, match="no balanced layout"):
        prediction.check_model("125m", 0.125, 64)
    with pytest.raises(UserError, match="does not divide"):
        prediction.check_model("nano", 0.5, 100)
    assert SIZES["125m"].d_model == 768


def test_interplay_of_measured_steps_wins_back_what_fusion_gives(
    sections, monkeypatch, tmp_path, capsys
):
    """Both sides in this process with made-up times: what a child prints, and what it means."""
    monkeypatch.setattr(interplay_step.hardware, "detect", lambda _: CHIP)
    unfused, fused = (7.2, 5.6, 4.8, 4.4), (6.4, 4.0, 2.4, 1.6)
    pipelined = tuple(0.75 * seconds for seconds in fused)
    seconds = iter((*unfused, *pipelined, *fused, *pipelined))
    monkeypatch.setattr(prediction, "measured_seconds", lambda *_: next(seconds))
    monkeypatch.setattr(interplay_step, "executor_over", lambda *_: None)
    monkeypatch.setattr(interplay_step.mesh, "make", lambda _: None)
    monkeypatch.setattr(interplay_step.processes, "joined", lambda *_: contextlib.nullcontext())

    def child(work, fused, cores):
        return json.loads(json.dumps(interplay_step.main(work)))

    monkeypatch.setattr(interplay_report, "_measured", child)
    asked = interplay.Options(tokens=1024, rounds=1, out=str(tmp_path), keep=str(tmp_path))
    monkeypatch.setattr(interplay_report, "_cores", lambda stages: list(range(stages)))
    interplay_report.report_interplay(asked)
    said = capsys.readouterr().out
    assert "- measured, serial: 1/8 of the blocks gains 1.64x unfused, 4.00x fused" in said
    assert said.startswith(f"{CHIP.name}: ")
    assert said.splitlines()[0] in (tmp_path / "interplay.md").read_text()
    with (tmp_path / "interplay.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["serial_measured_ms"]) for row in rows[:2]] == pytest.approx([900, 800])
    # Two chips made the same micro-batches in three quarters of the time.
    assert float(rows[1]["pipelined_measured_ms"]) == pytest.approx(0.75 * 2 * 800)
    for row in rows:
        # A chip's own, with bubble.
        assert float(row["pipelined_predicted_ms"]) > float(row["serial_predicted_ms"])
    intensity = [float(row["intensity_mlp_in"]) for row in rows]
    assert all(unfused < fused for unfused, fused in zip(intensity[::2], intensity[1::2]))
    assert (tmp_path / "interplay.png").exists() and (tmp_path / "roofline.png").exists()
