"""The trainings of sparse_quality: planned to one budget, resumed, and put into tables."""

import dataclasses
import functools
import itertools
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparse_dataflow.commands import measurement
from sparse_dataflow.commands.preflight import settling
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core import sums
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training.phases import Variant, refuse_unfit, run_flops
from sparse_dataflow.core.training.step import initial_state
from sparse_dataflow.core.training.teacher import Teacher
from sparse_dataflow.files import folders
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.output import markdown
from sparse_dataflow.runs.variants import at_flops_of

from . import engine, memory_check, study
from .panels import save_strips
from .study import Study

OWNER = "sparse_quality"
BASELINE = "dense"
FLOOR = "static_random"
TEACHER = "training.teacher"
VARIED = (
    *("sparsity.pattern", "sparsity.rank", "sparsity.hadamard", "evolution."),
    *("model.experts", "model.top_k"),
)
"""What arms set, as `study.prepare` takes it."""

METHOD, AT = "evolution.method", "evolution.at"
RANK, HADAMARD, TRAINING_FLOPS = "sparsity.rank", "sparsity.hadamard", "training_flops"
D_FF, PROJECTIONS, FLOPS_A_TOKEN = "model.d_ff", "sparsity.projections", "flops_a_token"

Changes = Mapping[str, Any] | None
"""Path -> value in a sparse arm; None in the dense one.

`sparsity.rank` is a fraction of the model's width, `sparsity.hadamard` a fraction of the largest
power of 2 that divides the width.  "training_flops" is the share of the dense training's FLOPs that
the arm spends in all, by the step at which it turns dense.  `model.d_ff` is a fraction of the
model's.  Without `sparsity.projections` the arm's weights are dense.  With "flops_a_token" the arm
has the width at which a token costs what it costs in that arm without experts.
`training.teacher` is the arm whose training of the same budget and seed the arm learns from."""


def study_quality(request: Request, all_arms: Mapping[str, Changes], options) -> int:
    """Trains every arm, seed and budget that is named; returns the exit status.

    Args:
      request: the config that arms change.
      all_arms: name of an arm -> its changes.
      options: of `experiments.sparse_quality`.

    Raises:
      UserError: before the first step where it can be known then.
    """
    # Teachers are trained first.
    arms = tuple(sorted(options.arms, key=lambda arm: _teacher(all_arms[arm]) is not None))
    if missing := {_teacher(all_arms[arm]) for arm in arms} - {None, *arms}:
        raise UserError(
            f"--arms has an arm that learns from {', '.join(missing)}; name that one as well."
        )
    if not arms or not options.equal:
        raise UserError("--arms or --equal names nothing, so there is nothing to train; name some.")
    folder = Path(options.out)
    folders.refuse_foreign(folder, OWNER)
    base = study.prepare(request, VARIED, {"training.steps": options.steps})
    study.keep_settings(folder, base.config, OWNER)
    for arm in arms:
        variant = _variant(base, all_arms[arm])
        refuse_unfit(variant.model, variant.evolution, options.steps)
        memory_check.refuse_too_large(base.config, [variant], base.chip.memory_bytes)

    def body(stop):
        runs = _known_runs(base, all_arms, arms, options, stop)
        results = engine.train_all(folder, lambda _: runs)
        if results is not None:
            _write(base, all_arms, folder, [{**r.record, **results[r.name]} for r in runs])
        return results is not None

    return engine.resumable(folder, body)


def _write(base, all_arms, folder, results):
    """Writes and prints the tables and the picture."""
    result = {"settings": base.config.to_json(), "results": results}
    measurement.keep(str(folder), "quality", base.chip.name, [result])
    ends_dense = [arm for arm, changes in all_arms.items() if _ends_dense(changes)]
    text = tables(results, ends_dense)
    (folder / "quality.md").write_text(text)
    groups: dict[str, dict[str, list[float]]] = {}
    for r in results:
        group = groups.setdefault(_title(r["equal"]), {})
        group.setdefault(r["arm"], []).append(r["bits_per_byte"])
    save_strips(folder / "quality.png", groups, "held-out bits per byte", BASELINE)
    say(text)


def _known_runs(base, all_arms, arms, options, stop):
    """Returns a run for each seed, budget and arm; the steps of a seed are planned once."""
    planned = functools.cache(lambda seed: _steps(base, all_arms, arms, options.equal, seed))
    runs = []
    for seed, equal, arm in itertools.product(range(options.seeds), options.equal, arms):
        train = functools.partial(_trained, base, all_arms, arm, seed, equal, planned, stop)
        record = {"equal": equal, "arm": arm, "seed": seed}
        runs.append(engine.Run(f"equal_{equal}/{arm}/seed_{seed}", train, record))
    return runs


def _trained(base, all_arms, arm, seed, equal, planned, stop, where, compiled):
    """Trains one arm, after its teacher; returns its result, or None if `stop()` ended it."""
    variant = _variant(base, all_arms[arm], seed).with_steps(planned(seed)[equal][arm])
    data = base.data(variant)
    if name := _teacher(all_arms[arm]):
        other = _variant(base, all_arms[name], seed)
        folder = where.parents[1] / name / where.name
        teacher = study.trained(other, data.tokenizer_hash, folder)
        data = dataclasses.replace(data, teacher=teacher)
    return study.train(f"{arm}, seed {seed}", variant, data, where, stop, compiled=compiled)


def _variant(base: Study, changes: Changes, seed: int = 0) -> Variant:
    """The model of an arm."""
    if changes is None:
        return base.variant("dense", training__seed=seed)
    changes = {**changes, "training.seed": seed}
    width = base.config.model.d_model
    if RANK in changes:
        changes[RANK] = max(1, round(changes[RANK] * width))
    if HADAMARD in changes:
        changes[HADAMARD] = int(changes[HADAMARD] * (width & -width))
    if TRAINING_FLOPS in changes:
        share = changes.pop(TRAINING_FLOPS)
        dense = base.variant("dense")
        changes[AT] = switch_at(dense, base.variant("sparse", **changes), share)
    if D_FF in changes:
        changes[D_FF] = max(1, round(changes[D_FF] * base.config.model.d_ff))
    rival = changes.pop(FLOPS_A_TOKEN, None)
    variant = base.variant("sparse" if changes.get(PROJECTIONS, True) else "dense", **changes)
    return variant if rival is None else at_flops_of(variant, base.variant("sparse", **rival))


def switch_at(dense: Variant, sparse: Variant, share: float) -> float:
    """When a sparse training turns dense to spend `share` of the dense training's FLOPs.

    Returns:
      The fraction of the steps after which it begins to turn dense.

    Raises:
      UserError: no fraction spends that share; names the shares that can be spent.
    """
    training = dense.training
    dense_flops = run_flops(dense.model, dense.evolution, training)
    models = (spec.model for spec in sparse.phase_specs)
    first, *later = (run_flops(model, EvolutionConfig(), training) for model in models)
    # Phases after the first are equally long.
    after = sum(later) / len(later)
    if not first < share * dense_flops < after:
        raise UserError(
            f"No switch to dense spends {share:.0%} of the dense training's FLOPs here; legal: "
            f"above {first / dense_flops:.0%} and below {after / dense_flops:.0%}. Give a lower "
            "--density, or name other --arms."
        )
    return (after - share * dense_flops) / (after - first)


def _teacher(changes):
    """The arm that an arm learns from; None for none."""
    return (changes or {}).get(TEACHER)


def _steps(base, all_arms, arms, equal, seed):
    """{budget: {arm: steps}}; the budgets are those of the dense model's steps."""
    steps = base.config.training.steps
    names = list(dict.fromkeys((BASELINE, *arms)))
    variants = {arm: _variant(base, all_arms[arm], seed) for arm in names}
    planned = {"tokens": dict.fromkeys(names, steps)}
    teachers = {arm: variants[name] for arm in names if (name := _teacher(all_arms[arm]))}
    flops = {
        arm: _flops_a_step(v.with_steps(steps), teachers.get(arm)) for arm, v in variants.items()
    }
    planned["flops"] = _as_many(steps, flops)
    if "seconds" in equal:
        data = base.data(variants[BASELINE])
        for teacher_variant in teachers.values():  # Any weights take the time of trained ones.
            state = initial_state(teacher_variant.model, teacher_variant.training)
            teacher = Teacher(teacher_variant.model, state.merged)
            data = dataclasses.replace(data, teacher=teacher)
        planned["seconds"] = _as_many(steps, settling.step_seconds(variants, data, steps))
    return planned


def _as_many(steps, cost_of_step):
    """Steps of each arm that cost what the baseline's `steps` cost."""
    budget = steps * cost_of_step[BASELINE]
    return {arm: max(1, round(budget / cost)) for arm, cost in cost_of_step.items()}


def _flops_a_step(variant, teacher):
    untrained_teacher = Teacher(teacher.model, {}) if teacher else None
    total = run_flops(variant.model, variant.evolution, variant.training, untrained_teacher)
    return total / variant.training.steps


def _ends_dense(changes):
    if changes is None or not changes.get(PROJECTIONS, True):
        return True
    return changes.get(METHOD) == "sparse_to_dense"


def tables(results: list[dict], ends_dense: Container[str]) -> str:
    """A Markdown table for each budget, and below it the arm that wins.

    The columns are held-out bits per byte (mean, and half the range over seeds), the difference to
    dense (with its standard error, paired by seed), and the part of the gap from static random to
    dense that is closed.

    Args:
      results: one dict for each training.
      ends_dense: arms that end with a dense model.
    """
    sections = []
    for equal in dict.fromkeys(r["equal"] for r in results):
        arms: dict[str, list[dict]] = {}
        for r in (r for r in results if r["equal"] == equal):
            arms.setdefault(r["arm"], []).append(r)
        mean = {a: float(np.mean([r["bits_per_byte"] for r in rs])) for a, rs in arms.items()}
        order = sorted(arms, key=mean.__getitem__)
        table = markdown(
            "arm, bits per byte, spread, to dense, gap closed, steps, FLOPs, seconds".split(", "),
            [_row(arm, arms, mean) for arm in order],
        )
        sparse = next((arm for arm in order if arm not in ends_dense), "none was trained")
        lowest = f"Lowest: {order[0]}; of those that end sparse: {sparse}."
        sections.append(f"## {_title(equal)}\n\n{table}\n\n{lowest}\n")
    return "\n".join(sections)


def _title(equal):
    return f"Equal {'FLOPs' if equal == 'flops' else equal}"


def _row(arm, arms, mean):
    arm_results = arms[arm]
    bits = [r["bits_per_byte"] for r in arm_results]
    closed = "-"
    if BASELINE in mean:
        gap = mean.get(FLOOR, 0.0) - mean[BASELINE]
        if gap > 0:  # Else there is nothing to close, as early in a training.
            closed = f"{(mean[FLOOR] - mean[arm]) / gap:.0%}"
    average = {
        name: np.mean([r[name] for r in arm_results]) for name in ("steps", "flops", "seconds")
    }
    return (
        arm,
        f"{mean[arm]:.4f}",
        sums.half_range_text(bits),
        _to_dense(arm, arms, mean),
        closed,
        f"{average['steps']:.0f}",
        f"{average['flops']:.3g}",
        f"{average['seconds']:.1f}",
    )


def _to_dense(arm, arms, mean):
    if BASELINE not in arms or arm == BASELINE:
        return "-"
    difference = f"{mean[arm] / mean[BASELINE] - 1:+.2%}"
    # Paired by seed, as a seed draws the same order of the data in every arm.
    dense_bits = {r["seed"]: r["bits_per_byte"] for r in arms[BASELINE]}
    paired = [
        (r["bits_per_byte"] - dense_bits[r["seed"]]) / mean[BASELINE]
        for r in arms[arm]
        if r["seed"] in dense_bits
    ]
    return f"{difference}{sums.error_text(paired, '.2%')}"
