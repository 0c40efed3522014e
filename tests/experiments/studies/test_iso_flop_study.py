"""The list of runs of the iso-FLOP study, and its statistics."""

import dataclasses
import functools
import json
import math

import numpy as np
import pytest
from scipy import stats

from experiments import iso_flop as experiment
from experiments.studies import iso_flop, iso_flop_plan, iso_flop_report
from experiments.studies.iso_flop_plan import MEASURE, TUNE, Plan
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.phases import run_flops
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import preset
from sparse_dataflow.runs.variants import variant

CONFIG = preset("3m").change(sparsity__block=8, sparsity__pattern="random", training__steps=20)
OPTIONS = experiment.Options(
    budgets=(0.25, 1), densities=(1, 0.5, 0.125), optimizers=("adamw",), steps=(20, 80)
)


def one_curve(*densities, steps=20):
    return experiment.Options((1,), densities, ("muon",), ("flops",), (steps,))


@pytest.fixture(scope="module")
def plan():
    curves = iso_flop_plan.plan_curves(CONFIG, 1024, OPTIONS)
    return Plan(curves, longer=(), trials=3, seeds=3, headline_seeds=5)


def fake_result(run):
    """Returns a loss that is lowest at density 1/2 and at twice the recipe's rate."""
    bits = 2 + abs(math.log2(run.arm.stored_density / 0.5)) / 10
    bits += abs(math.log2(run.multiplier / 2)) / 10 + 0.01 * math.sin(run.seed * run.arm.density)
    return {
        "bits_per_byte": bits, "steps": run.arm.steps, "tokens": 10 * run.arm.steps,
        "flops": 1e5 * run.arm.steps, "seconds": 3.0, "step_seconds": 0.1,
        "curve": [[5 * run.arm.steps, bits + 1], [10 * run.arm.steps, bits]],
    }  # fmt: skip


def all_results(plan, result_of=fake_result, diverges=lambda arm: False):
    """Returns the results of a list that is run to its end; some arms diverge where measured."""
    results = {}
    while missing := [r for r in iso_flop_plan.run_list(plan, results) if r.name not in results]:
        run = missing[0]
        results[run.name] = result_of(run)
        if run.role == MEASURE and diverges(run.arm):
            results[run.name]["bits_per_byte"] = None
            del results[run.name]["curve"]
    return results


def test_progress_counts_the_runs_of_this_plan(plan):
    """Not those of other budgets, nor a trial more of an arm of its own."""
    first = plan.curves[0]
    part = dataclasses.replace(plan, curves=(first,))
    results = all_results(dataclasses.replace(plan, trials=plan.trials + 1))
    results.pop(iso_flop_plan.run_list(part, results)[-1].name)
    every = len(first.arms) * (part.trials + part.seeds) + 2 * (part.headline_seeds - part.seeds)
    assert iso_flop.progress(CONFIG, part, results).startswith(f"run {every} of {every}, ")


def test_default_options_are_legal_and_budgets_are_four_times_apart():
    options = experiment.Options()
    ratios = np.divide(sorted(options.budgets)[1:], sorted(options.budgets)[:-1])
    assert len(options.budgets) == 3 and min(ratios) >= 4


def test_arms_of_a_curve_have_the_dense_models_cost(plan):
    for curve in plan.curves:
        dense, *sparse = curve.arms
        assert dense.density == 1 and not dense.model.sparse_projections
        assert [arm.density for arm in sparse] == [0.5, 0.125]
        for arm in curve.arms:
            assert abs(arm.mismatch) <= 0.025
            each = variant(arm.config(CONFIG, 2.0, 7), arm.config(CONFIG, 2.0, 7).variants[0], 1024)
            assert each.model.d_model == arm.model.d_model and each.training.seed == 7
            assert each.training.learning_rate == 2 * CONFIG.training.learning_rate
            if curve.equal == "flops":
                flops = [cost.flops_per_token(m, 128).total for m in (each.model, dense.model)]
                assert flops[0] == pytest.approx(flops[1], rel=0.03)


@pytest.mark.parametrize("budget", [0.41, 1])
def test_arms_of_equal_shape_have_the_dense_models_width(budget):
    options = experiment.Options((budget,), (1, 0.5, 0.25), ("muon",), ("shape",), (20,))
    config = CONFIG.change(sparsity__block=4)
    (curve,) = iso_flop_plan.plan_curves(config, 1024, options)
    assert curve.arms[0].model.d_model % 4 == 0
    dense = curve.arms[0].model
    for arm in curve.arms[1:]:
        assert arm.mismatch == 0 and arm.stored_density == arm.density
        assert dataclasses.replace(arm.model, linears={}) == dense


def test_a_shape_without_a_layout_of_a_density_is_refused_with_what_is_legal():
    options = experiment.Options((0.3,), (1, 0.125), ("muon",), ("shape",), (20,))
    with pytest.raises(UserError, match=r"legal"):
        iso_flop_plan.plan_curves(CONFIG.change(sparsity__block=64), 1024, options)


def test_sparse_arms_of_more_lengths_are_tuned_alike_and_show_what_reaches_the_dense_loss():
    """A loss that falls with length as if a sparse model needed eight times the steps."""
    options = experiment.Options((1,), (1, 0.125), ("muon",), ("shape",), (20, 40))
    curves = iso_flop_plan.plan_curves(CONFIG, 1024, options)
    longer = iso_flop_plan.longer_arms(curves, (40, 80, 320))
    assert [(arm.density, arm.steps) for arm in longer] == [(0.125, 80), (0.125, 320)]
    plan = Plan(curves, longer, trials=3, seeds=2, headline_seeds=2)

    def result_of(run):
        bits = 3 - math.log2(run.arm.steps * (1 if run.arm.density == 1 else 1 / 8)) / 10
        curve = [[run.arm.steps, 9.0], [10 * run.arm.steps, bits]]
        return {**fake_result(run), "bits_per_byte": bits, "curve": curve}

    results = all_results(plan, result_of)
    for arm in longer:
        roles = [run.role for run in iso_flop_plan.run_list(plan, results) if run.arm == arm]
        assert roles == [TUNE] * 3 + [MEASURE] * 2
    table = iso_flop_report.longer_table(
        [iso_flop_report.arm_summary(plan, arm, results) for arm in longer]
    )
    assert "| steps_320/budget_1/muon/shape_density_0.125 | 2.4678 | 2 | " in table
    summaries = [iso_flop_report.summary(plan, curve, results) for curve in curves]
    for summary in summaries:
        dense, sparse = [arm["time_to_quality"] for arm in summary["arms"]]
        assert dense["tokens"] == pytest.approx(10 * summary["steps"])
        assert sparse["tokens"] == pytest.approx(80 * summary["steps"])


def test_arms_keep_head_width_and_the_ratio_of_d_ff_that_a_user_sets():
    config = CONFIG.change(model__num_heads=16, model__d_ff=768, sparsity__block=4)
    (curve,) = iso_flop_plan.plan_curves(config, 300, one_curve(0.5, 0.125))
    for arm in curve.arms:
        assert arm.model.d_ff == 3 * arm.model.d_model
        assert 16 / 1.5 <= arm.model.head_width <= 16 * 1.5
    assert not {"model.num_heads", "model.d_ff"} & set(iso_flop.VARIED)


def test_arms_that_end_dense_have_the_dense_models_flops_on_average():
    config = CONFIG.change(
        evolution__method="sparse_to_dense", evolution__at=0.4, training__steps=50
    )
    (curve,) = iso_flop_plan.plan_curves(config, 1024, one_curve(0.5, 0.125, steps=50))
    flops = []
    for arm in curve.arms:
        arm_config = arm.config(config, 1.0, 0)
        chosen = variant(arm_config, arm_config.variants[0], 1024)
        tokens = 50 * chosen.training.batch * chosen.training.sequence
        flops.append(run_flops(chosen.model, chosen.evolution, chosen.training) / tokens)
        assert flops[-1] == pytest.approx(iso_flop_plan.flops_per_token(config, arm.model))
    assert flops == pytest.approx([flops[0]] * 3, rel=0.025)
    stays = iso_flop_plan.plan_curves(CONFIG, 1024, one_curve(0.125))
    assert curve.arms[2].model.d_model < stays[0].arms[1].model.d_model


def test_every_arm_has_equal_trials_and_seeds_and_headline_arms_have_more(plan):
    results = all_results(plan)
    runs = iso_flop_plan.run_list(plan, results)
    assert len({run.name for run in runs}) == len(runs) == len(results)
    for arm in plan.arms:
        arm_runs = [run for run in runs if run.arm == arm]
        assert sum(run.role == TUNE for run in arm_runs) == plan.trials
        measured = [run for run in arm_runs if run.role == MEASURE]
        headline = arm.density in (1, 0.5)
        assert [run.seed for run in measured] == list(range(5 if headline else 3))
        assert {run.multiplier for run in measured} == {2.0}
        assert iso_flop_plan.TUNING_SEED not in [run.seed for run in measured]


def test_a_list_that_lost_its_end_goes_on_as_the_same_list(plan):
    results = all_results(plan)
    names = [run.name for run in iso_flop_plan.run_list(plan, results)]
    for count in (0, 1, 7, len(names) // 2, len(names) - 1):
        saved = {name: results[name] for name in names[:count]}
        known = [run.name for run in iso_flop_plan.run_list(plan, saved)]
        assert next(name for name in known if name not in saved) == names[count]
        assert [name for name in known if name in saved] == names[:count]


def test_differences_are_paired_by_seed_with_students_t(plan):
    results = all_results(plan)
    summary = iso_flop_report.summary(plan, plan.curves[0], results)
    dense, half, eighth = summary["arms"]
    assert summary["minimum"] == half["name"] and dense["to_dense"] is None
    assert summary["target"] == pytest.approx(np.mean([dense["by_seed"][seed] for seed in "012"]))
    for arm in summary["arms"]:
        common = np.mean([arm["by_seed"][seed] for seed in "012"])
        assert arm["bits_per_byte"] == pytest.approx(common)
    for arm, seeds in ((half, 5), (eighth, 3)):
        pairs = np.array([[arm["by_seed"][str(s)], dense["by_seed"][str(s)]] for s in range(seeds)])
        expected = stats.ttest_rel(pairs[:, 0], pairs[:, 1])
        interval = expected.confidence_interval(0.95)
        difference = arm["to_dense"]
        assert difference["difference"] == pytest.approx(np.mean(pairs[:, 0] - pairs[:, 1]))
        assert difference["low"] == pytest.approx(interval.low)
        assert difference["high"] == pytest.approx(interval.high)
        assert difference["p"] == pytest.approx(expected.pvalue)
    assert summary["significant"] == (half["to_dense"]["high"] < 0)
    assert half["time_to_quality"]["tokens"] < dense["time_to_quality"]["tokens"] == 200


def test_a_run_that_diverged_is_never_the_best(plan):
    half = next(arm for arm in plan.curves[0].arms if arm.density == 0.5)
    results = all_results(plan, diverges=lambda arm: arm == half)
    summary = iso_flop_report.summary(plan, plan.curves[0], results)
    assert summary["minimum"] != half.name
    json.dumps(summary, allow_nan=False)
    assert "diverged" in iso_flop_report.curve_table(summary)


def test_a_dense_model_that_diverged_leaves_the_tables_of_the_others(plan, tmp_path):
    results = all_results(plan, diverges=lambda arm: (arm.steps, arm.density) == (80, 1))
    curves = [iso_flop_report.summary(plan, curve, results) for curve in plan.curves]
    for curve in curves:
        differences = [arm["to_dense"] for arm in curve["arms"][1:]]
        assert all(differences) if curve["steps"] == 20 else not any(differences)
    iso_flop_report.draw_lengths(curves, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").exists()


def test_tables_and_figure_show_every_arm(plan, tmp_path):
    results = all_results(plan)
    curves = [iso_flop_report.summary(plan, curve, results) for curve in plan.curves]
    table = iso_flop_report.curve_table(curves[0])
    assert table.startswith("## Equal FLOPs, budget 0.25, 20 steps, adamw")
    assert "| 0.125 | " in table and "not reached" in table and "Minimum: density 0.5" in table
    assert iso_flop_report.arms_table(plan, CONFIG).count("\n") == 2 + len(plan.arms) / 2
    for draw in (iso_flop_report.draw, iso_flop_report.draw_lengths):
        draw(curves, tmp_path / f"{draw.__name__}.png")
        assert (tmp_path / f"{draw.__name__}.png").read_bytes().startswith(b"\x89PNG")


def test_figures_of_lengths_have_the_relative_numbers(plan):
    results = all_results(plan)
    chosen = [
        summary
        for curve in plan.curves
        if (curve.equal, curve.budget) == ("flops", 1)
        for summary in [iso_flop_report.summary(plan, curve, results)]
    ]
    assert [(curve["steps"], curve["tokens"]) for curve in chosen] == [(20, 200), (80, 800)]
    for curve in chosen:
        dense, half, eighth = curve["arms"]
        value, low, high = iso_flop_report.relative_difference(chosen, curve, half)
        assert value == pytest.approx(
            100 * (half["to_dense"]["difference"] / dense["bits_per_byte"])
        )
        assert low < value < high < 0
        for cost_of in ("flops", "seconds"):
            ratio = functools.partial(iso_flop_report.relative_effort, cost_of, chosen, curve)
            assert ratio(dense)[0] == pytest.approx(1)
            assert 0.5 < ratio(half)[0] < 1
            assert ratio(eighth) is None


def test_lines_of_a_study_of_one_length_are_read(plan, tmp_path):
    results = all_results(plan)
    tokens = iso_flop_plan.step_tokens(CONFIG)
    lines, expected = [], {}
    for run in iso_flop_plan.run_list(plan, results):
        result = {**results[run.name], "tokens": run.arm.steps * tokens}
        expected[run.name] = result
        lines.append({"name": run.name.partition("/")[2], "result": result})
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = iso_flop.read_lines(path, tokens)
    assert {line["name"]: line["result"] for line in read} == expected
