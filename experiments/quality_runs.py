"""The trainings of sparse_quality: planned to one budget, gone on with, and put into tables."""

from collections.abc import Container
from pathlib import Path

import numpy as np

from experiments import gpt_run, measurement, memory_check, step_plan, study
from experiments.recipes import Variant
from sparse_dataflow.config.evolution import EvolutionConfig
from sparse_dataflow.config.presets import SIZES
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.reporting.panels import save_strips
from sparse_dataflow.training.metrics import say
from sparse_dataflow.training.phases import refuse_unfit, run_flops

BASELINE = "dense"
FLOOR = "static_random"


def run(values, groups, arms: dict[str, dict | None]) -> int:
    """Trains every arm, seed and budget that the flags name; see `sparse_quality`.

    Returns:
      The exit status.

    Raises:
      UserError: in words, before the first step where it can be known then.
    """
    folder = Path(values.out)
    study.refuse_foreign(folder, "sparse_quality")
    begun = study.begin(values, groups)
    asked = begun.asked
    varied = ("arms", "equal", "seeds", "out")
    settings = {name: value for name, value in asked.items() if name not in varied}
    study.keep_settings(folder, settings, "sparse_quality")
    for arm in asked["arms"]:
        variant = _variant(begun, arms, arm)
        refuse_unfit(variant.model, variant.evolution, values.steps)
        memory_check.refuse_too_large(begun.settings(), [variant], begun.chip.memory_bytes)
    results = []
    with gpt_run.stop_on_signals() as stop:
        for seed in range(values.seeds):
            steps: dict[str, dict[str, int]] = {}
            for equal in asked["equal"]:
                for arm in asked["arms"]:
                    where = folder / f"equal_{equal}" / arm / f"seed_{seed}"
                    result = study.kept(where)
                    if result is None:
                        steps = steps or _steps(begun, arms, seed)
                        variant = _variant(begun, arms, arm, seed).with_steps(steps[equal][arm])
                        data = begun.data(variant, seed)
                        result = study.train(f"{arm}, seed {seed}", variant, data, where, stop)
                    if result is None:
                        say("stopped; the same command goes on")
                        return gpt_run.stopped_status(stop())
                    results.append({"equal": equal, "arm": arm, "seed": seed, **result})
    found = {"settings": settings, "results": results}
    measurement.write(str(folder), "quality", begun.chip.name, found)
    ends_dense = [arm for arm, changes in arms.items() if _ends_dense(changes)]
    text = tables(results, ends_dense)
    (folder / "quality.md").write_text(text)
    draw(results, folder / "quality.png")
    say(text)
    return 0


def _variant(begun, arms, arm, seed=0):
    changes = arms[arm]
    width = SIZES[begun.asked["scale"]].d_model
    if changes and "rank" in changes:
        changes = {**changes, "rank": max(1, round(changes["rank"] * width))}
    if changes and "hadamard" in changes:
        changes = {**changes, "hadamard": changes["hadamard"] * (width & -width)}
    if changes and "training_flops" in changes:
        changes = dict(changes)
        share = changes.pop("training_flops")
        changes["evolve_at"] = switch_at(
            begun.variant(BASELINE), begun.variant("sparse", **changes), share
        )
    return begun.variant(BASELINE if changes is None else "sparse", seed=seed, **(changes or {}))


def switch_at(dense: Variant, sparse: Variant, share: float) -> float:
    """The fraction of the steps after which a sparse training has to begin to turn dense so that it
    spends `share` of the FLOPs of one that is dense from the start.

    Raises:
      UserError: none does; names the shares that can be had.
    """
    training = dense.training
    of_dense = run_flops(dense.model, dense.evolution, training)
    first, *later = (
        run_flops(phase.model, EvolutionConfig(), training) for phase in sparse.phase_specs
    )
    # Phases after the first are equally long.
    after = sum(later) / len(later)
    if not first < share * of_dense < after:
        raise UserError(
            f"No switch to dense spends {share:.0%} of the dense training's FLOPs here; legal: "
            f"above {first / of_dense:.0%} and below {after / of_dense:.0%}. Give a lower "
            "--density, or name other --arms."
        )
    return (after - share * of_dense) / (after - first)


def _steps(begun, arms, seed):
    """{budget: {arm: steps}}; the budgets are those of the dense model's --steps."""
    steps = begun.asked["steps"]
    names = list(dict.fromkeys((BASELINE, *begun.asked["arms"])))
    variants = {arm: _variant(begun, arms, arm, seed) for arm in names}
    found = {"tokens": dict.fromkeys(names, steps)}
    flops = {arm: _flops_a_step(v.with_steps(steps)) for arm, v in variants.items()}
    found["flops"] = _as_many(steps, flops, names)
    if "seconds" in begun.asked["equal"]:
        data = begun.data(variants[BASELINE], seed)
        found["seconds"] = _as_many(steps, step_plan.step_seconds(variants, data, steps), names)
    return found


def _as_many(steps, cost_of_step, names):
    """Steps of each arm that cost together what the baseline's `steps` do."""
    budget = steps * cost_of_step[BASELINE]
    return {arm: max(1, round(budget / cost_of_step[arm])) for arm in names}


def _flops_a_step(variant):
    total = run_flops(variant.model, variant.evolution, variant.training)
    return total / variant.training.steps


def _ends_dense(changes):
    return changes is None or changes.get("evolution") == "sparse_to_dense"


def tables(results: list[dict], ends_dense: Container[str]) -> str:
    """A Markdown table a budget: held-out bits per byte, mean and spread over seeds (half the
    range), against dense (with the standard error of the difference, seed by seed), and the part of
    the gap from static random to dense that is closed; below it which arm wins.

    Args:
      results: of each training.
      ends_dense: arms whose last model is dense.
    """
    parts = []
    for equal in dict.fromkeys(r["equal"] for r in results):
        arms: dict[str, list[dict]] = {}
        for r in (r for r in results if r["equal"] == equal):
            arms.setdefault(r["arm"], []).append(r)
        mean = {a: float(np.mean([r["bits_per_byte"] for r in rs])) for a, rs in arms.items()}
        lines = [
            f"## {_title(equal)}\n",
            "| arm | bits per byte | spread | to dense | gap closed | steps | FLOPs | seconds |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for arm in sorted(arms, key=mean.__getitem__):
            lines.append(_line(arm, arms, mean))
        best = min(mean, key=mean.__getitem__)
        ending = [arm for arm in mean if arm not in ends_dense]
        sparse = min(ending, key=mean.__getitem__, default=None)
        lines.append(f"\nLowest: {best}; of those that end sparse: {sparse or 'none was trained'}.")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _title(equal):
    return f"Equal {'FLOPs' if equal == 'flops' else equal}"


def draw(results: list[dict], path: Path) -> None:
    """Held-out bits per byte, a panel a budget, every seed a dot."""
    groups: dict[str, dict[str, list[float]]] = {}
    for r in results:
        group = groups.setdefault(_title(r["equal"]), {})
        group.setdefault(r["arm"], []).append(r["bits_per_byte"])
    save_strips(path, groups, "held-out bits per byte", BASELINE)


def _line(arm, arms, mean):
    of_arm = arms[arm]
    bits = [r["bits_per_byte"] for r in of_arm]
    closed = "-"
    if BASELINE in mean:
        gap = mean.get(FLOOR, 0.0) - mean[BASELINE]
        if gap > 0:  # Else there is nothing to close, as early in a training.
            closed = f"{(mean[FLOOR] - mean[arm]) / gap:.0%}"
    average = {name: np.mean([r[name] for r in of_arm]) for name in ("steps", "flops", "seconds")}
    to_dense = _to_dense(arm, arms, mean)
    return (
        f"| {arm} | {mean[arm]:.4f} | {(max(bits) - min(bits)) / 2:.4f} | {to_dense} | "
        f"{closed} | {average['steps']:.0f} | {average['flops']:.3g} | "
        f"{average['seconds']:.1f} |"
    )


def _to_dense(arm, arms, mean):
    if BASELINE not in arms or arm == BASELINE:
        return "-"
    found = f"{mean[arm] / mean[BASELINE] - 1:+.2%}"
    # By seed, as a seed is one order of the data in every arm.
    of_dense = {r["seed"]: r["bits_per_byte"] for r in arms[BASELINE]}
    paired = [r["bits_per_byte"] - of_dense[r["seed"]] for r in arms[arm] if r["seed"] in of_dense]
    if len(paired) < 2:
        return found
    return f"{found} ± {np.std(paired, ddof=1) / len(paired) ** 0.5 / mean[BASELINE]:.2%}"
