"""The study iso_flop: trains its list of runs, and is resumed."""

import functools
from pathlib import Path

from sparse_dataflow.commands.request import Request
from sparse_dataflow.core.messages import say
from sparse_dataflow.files import folders
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import RunConfig

from . import engine, iso_flop_report, memory_check, study
from .engine import Results
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
from .study import HELD_OUT, TUNING

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


def study_iso_flop(request: Request, options) -> int:
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
    lines = read_lines(folder / engine.LINES, step_tokens(base.config))

    def body(stop):
        known = functools.partial(_known_runs, base, plan, stop)
        note = functools.partial(progress, base.config, plan)
        results = engine.train_all(folder, known, lines, note)
        if results is not None:
            iso_flop_report.write(base, plan, results, folder)
        return results is not None

    return engine.resumable(folder, body)


def _known_runs(base, plan, stop, results):
    """Yields the runs of the list as the engine trains them."""
    for each in run_list(plan, results):
        train = functools.partial(_trained, base, each, stop)
        yield engine.Run(each.name, train, _record(base, each), (each.arm, each.seed))


def _trained(base, each, stop, where, compiled):
    chosen = variant_of(base, each)
    measured = each.role == MEASURE
    data = base.split_data(chosen, HELD_OUT if measured else TUNING, WINDOWS)
    evaluations = EVALUATIONS if measured else 1
    return engine.train_or_diverge(
        each.name, chosen, data, where, stop, evaluations=evaluations, compiled=compiled
    )


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


def _record(base, each):
    """Returns what runs.jsonl has of a run: its role and its changes of the config."""
    return {
        "role": each.role,
        "equal": each.arm.equal,
        "budget": each.arm.budget,
        "optimizer": each.arm.optimizer,
        "steps": each.arm.steps,
        "density": each.arm.density,
        "multiplier": each.multiplier,
        "seed": each.seed,
        "changes": each.arm.changes(base.config, each.multiplier, each.seed),
    }


def read_lines(path, tokens):
    """Returns the lines of runs.jsonl.

    Lines of before a study had several lengths do not name theirs: tokens / `tokens` of a step.
    """
    lines = engine.read_lines(path)
    for line in lines:
        if "steps" not in line:
            line["steps"] = line["result"]["tokens"] // tokens
            line["name"] = f"steps_{line['steps']}/{line['name']}"
    return lines
