"""The study iso_flop: trains its list of runs, and is resumed."""

import json
from pathlib import Path

import jax

from sparse_dataflow.cluster.processes import stopped_status
from sparse_dataflow.cluster.signals import stop_on_signals
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training.loop import DivergedError
from sparse_dataflow.files import folders, json_files, storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.folders import FolderLock
from sparse_dataflow.runs.run_config import RunConfig

from . import iso_flop_report, memory_check, study
from .iso_flop_plan import (
    MEASURE,
    TUNE,
    TUNING_SEED,
    Plan,
    Run,
    flops_per_token,
    longer_arms,
    plan_curves,
    run_list,
    step_tokens,
    variant_of,
)
from .study import HELD_OUT, TUNING, Study
from .time_to_quality import bits_per_byte

OWNER = "iso_flop"
VARIED = (
    *("model.d_model", "sparsity.density", "sparsity.budget"),
    *("training.steps", "training.optimizer"),
)
"""What the arms set, as `study.prepare` takes it.  Heads and d_ff only give the ratios that every
arm keeps: the width of a head, query heads to a key/value head, and d_ff / d_model."""

EVALUATIONS = 16
"""Periodic evaluations of a measured run, between which time to quality is interpolated."""

WINDOWS = 128
"""Windows of a periodic evaluation."""

Results = dict[str, dict]
"""Name of a run -> its result."""


def run(request: Request, options) -> int:
    """Trains every run of the list, then writes tables and figure; see `experiments.iso_flop`.

    Args:
      request: the config that arms change.
      options: of the experiment.

    Returns:
      The exit status.

    Raises:
      UserError: before the first step where it can be known then.
    """
    for name in ("optimizers", "equal", "budgets", "steps"):
        if not getattr(options, name):
            raise UserError(f"--{name} names nothing, so there is nothing to train.")
    longest = max((*options.steps, *options.sparse_steps))
    folder = Path(options.out)
    folders.refuse_foreign(folder, OWNER)
    base = study.prepare(request, VARIED, {"training.steps": longest}, tuned=True)
    study.keep_settings(folder, base.config, OWNER, varied=["training.steps"])
    curves = plan_curves(base.config, base.tokenizer.vocab_size, options)
    most = max(options.seeds, options.headline_seeds)
    longer = longer_arms(curves, options.sparse_steps)
    plan = Plan(curves, longer, options.trials, options.seeds, most)
    for arm in plan.arms:
        models = [variant_of(base, Run(arm, TUNE, 1.0, TUNING_SEED))]
        memory_check.refuse_too_large(base.config, models, base.chip.memory_bytes)
    say(iso_flop_report.arms_table(plan, base.config))
    with FolderLock(folder), stop_on_signals(say) as stop:
        results = _train_all(base, plan, folder, stop)
    if results is None:
        say("stopped; the same command goes on")
        return stopped_status(stop())
    iso_flop_report.write(base, plan, results, folder)
    return 0


def _train_all(base: Study, plan: Plan, folder: Path, stop) -> Results | None:
    """Trains every run without a result; returns all results, or None if `stop()` ended it."""
    path = folder / "runs.jsonl"
    lines = read_lines(path, step_tokens(base.config))
    compiled: dict = {}
    previous: Run | None = None
    while True:
        results = {line["name"]: line["result"] for line in lines}
        each = next((r for r in run_list(plan, results) if r.name not in results), None)
        if each is None:
            return results
        result = study.read_result(folder / each.name)
        if result is None:
            if previous and (previous.arm, previous.seed) != (each.arm, each.seed):
                # The programs of another model, which no later run has.  Each maps memory, and
                # XLA's compiler crashes after the 65,530 mappings that Linux gives a process.
                compiled.clear()
                jax.clear_caches()
            previous = each
            say(progress(base.config, plan, results))
            result = _trained(base, each, folder / each.name, stop, compiled)
        if result is None:
            return None
        lines.append(_line(base, each, result))
        storage.replace_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def _trained(base, each, where, stop, compiled):
    """Trains one run; a training that diverges has a result too."""
    chosen = variant_of(base, each)
    measured = each.role == MEASURE
    data = base.split_data(chosen, HELD_OUT if measured else TUNING, WINDOWS)
    try:
        return study.train(
            each.name, chosen, data, where, stop,
            evaluations=EVALUATIONS if measured else 1,
            compiled=compiled, keep_weights=False,
        )  # fmt: skip
    except DivergedError as error:
        say(f"{each.name}: {error}")
        tokens = each.arm.steps * step_tokens(base.config)
        result = {"bits_per_byte": None, "tokens": tokens, "seconds": 0.0, "flops": 0.0}
        study.keep_result(where, result)
        return result


def progress(config: RunConfig, plan: Plan, results: Results) -> str:
    """Returns the number of the next run, and the time left by the speed of the runs so far.

    Args:
      config: of the study.
      plan: what is trained.
      results: name of a run -> its result; runs that are not in the plan's list do not count.
    """
    done = [results[each.name] for each in run_list(plan, results) if each.name in results]
    dense = {curve.arms[0].name for curve in plan.curves}
    more = (len(dense) + len(plan.curves)) * (plan.headline_seeds - plan.seeds)
    total = len(plan.arms) * (plan.trials + plan.seeds) + more
    text = f"run {len(done) + 1} of {total}"
    flops = sum(result["flops"] for result in done)
    if flops:
        seconds = sum(result["seconds"] for result in done)
        arm_flops = [
            arm.steps * step_tokens(config) * flops_per_token(config, arm.model)
            for arm in plan.arms
        ]
        left = max(0.0, total * sum(arm_flops) / len(arm_flops) - flops)
        text += f", about {left * seconds / flops / 3600:.1f} h of training left"
    return text


def _line(base, each, result):
    """Returns what runs.jsonl has of a run: its role, its changes of the config, its result."""
    return {
        "name": each.name,
        "role": each.role,
        "equal": each.arm.equal,
        "budget": each.arm.budget,
        "optimizer": each.arm.optimizer,
        "steps": each.arm.steps,
        "density": each.arm.density,
        "multiplier": each.multiplier,
        "seed": each.seed,
        "result": result,
        "changes": each.arm.changes(base.config, each.multiplier, each.seed),
    }


def read_lines(path, tokens):
    """Returns the lines of runs.jsonl; the folders of those runs are not needed any more.

    Lines of before a study had several lengths do not name theirs: tokens / `tokens` of a step.
    """
    if not path.exists():
        return []
    try:
        lines = [json_files.parse(line) for line in path.read_text().splitlines()]
        for line in lines:
            bits_per_byte(line["result"])
            if "steps" not in line:
                line["steps"] = line["result"]["tokens"] // tokens
                line["name"] = f"steps_{line['steps']}/{line['name']}"
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({error!r}); remove it to make it anew from the runs' folders, of "
            "which those without steps_N are not read."
        ) from None
    return lines
