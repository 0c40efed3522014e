"""Searches the parallel plans of a model on given chips, and prints and writes the result."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_dataflow.config import settings
from sparse_dataflow.files import folders, tables
from sparse_dataflow.hardware import chips
from sparse_dataflow.parallel.pipeline import schedules
from sparse_dataflow.planning import plan_memory, search, sensitivity, step_time
from sparse_dataflow.planning.memory import USABLE
from sparse_dataflow.planning.nearest import MESH
from sparse_dataflow.planning.parallel_plan import ParallelPlan
from sparse_dataflow.reporting import planner_figures
from sparse_dataflow.runs.planning import plan_rows, verify
from sparse_dataflow.runs.planning.options import ModelOptions, named_model
from sparse_dataflow.runs.request import spelling

ROWS = 1000
"""Largest number of plans in trials.csv."""


def run(options) -> None:
    """Prices every plan, prints the fastest, and writes tables and figures to options.out.

    Args:
      options: of `experiments.layout_search`.

    Raises:
      UserError: no plan is legal, with the closest legal one; or --out names a folder that holds
        other files.
    """
    request = search.Request(
        options.model,
        options.tokens,
        options.batch or options.scale_batch,
        chips.lookup(options.hardware),
        options.chips,
    )
    with folders.claimed(Path(options.out), "layout_search") as folder:
        _search(options, request, folder)


def _search(options, request, folder):
    priced = search.price(request)
    search.check_legal(priced)
    ranked = priced.ranked(ROWS)
    rows = [plan_rows.row(request, plan, speed) for plan, speed in ranked]
    print(f"{int(priced.legal.sum()):,} legal plans of {priced.legal.size:,}, all priced")
    if words := plan_rows.slow_products(request.config, request.chip):
        print(words)
    plans = [plan for plan, _ in ranked]
    verdicts = verify.verdicts(options.scale, request, plans[:10], options.verify)
    _print_best(rows[:10], verdicts)
    tables.write_csv(folder / "trials.csv", rows)
    for plan in plans[: options.explain]:
        print(f"\n{plan}\n{request.time(plan).explain()}")
        print(f"\nmemory of the fullest chip\n{_memory(request, plan)}")
    _sensitivity(priced, folder)
    _roofline(options, request, plans[0], folder)
    print(f"\nTo run it:\n  {command(options, plans[0])}")


def command(options: ModelOptions, plan: ParallelPlan) -> str:
    """Returns the command that trains the model of `options` under a plan.

    Args:
      options: with the scale, density, block and sequence.
      plan: with numbers as its counts.
    """
    values: dict[str, Any] = {
        "training.sequence": options.tokens,
        "training.batch": plan.batch,
        "training.micro_batches": plan.accumulation,
        "model.remat": plan.remat,
        "parallel.mesh": ",".join(f"{axis}:{getattr(plan, axis)}" for axis in MESH),
        "parallel.zero": plan.zero,
    }
    if plan.stage > 1:
        values["parallel.schedule"] = schedules.format_schedule(plan.schedule, int(plan.chunks))
    if options.density < 1:
        values |= {"sparsity.density": options.density, "sparsity.block": options.block}
    experiment = "gpt13b_dense" if options.density == 1 else "gpt13b_sparse"
    flags = [f"{spelling(path)}={settings.text(value)}" for path, value in values.items()]
    return f"python -m experiments.{experiment} --scale={options.scale} {' '.join(flags)}"


def _print_best(rows: Sequence[Mapping], verdicts: Sequence[str]) -> None:
    print(
        f"{'tokens/s/chip':>13} {'MFU':>6} {'GiB':>6}  {'data':>4} {'stage':>5} {'fsdp':>5} "
        f"{'tensor':>6} {'micro':>5} {'accum':>5}  schedule, ZeRO, remat, limited by; compiled"
    )
    alike = len(set(verdicts)) == 1
    for row, verdict in zip(rows, verdicts, strict=True):
        print(
            f"{row['tokens_per_second_per_chip']:>13,.1f} {row['mfu']:>6.1%} {row['gib']:>6.1f}"
            f"  {row['data']:>4} {row['stage']:>5} {row['fsdp']:>5} {row['tensor']:>6} "
            f"{row['micro_batch']:>5} {row['accumulation']:>5}  {row['schedule']}"
            f"{'/' + str(row['chunks']) if row['chunks'] > 1 else ''}, {row['zero']}, "
            f"{row['remat']}, {row['limit']}; {'' if alike else verdict}".rstrip("; ")
        )
    if alike:
        print(f"by the compiler, all of them: {verdicts[0]}")


def _memory(request, plan):
    table = plan_memory.plan_bytes(request.config, request.sequence, plan).table()
    usable = USABLE * request.chip.memory_bytes / chips.GIB
    return f"{table}\n{'to use':<14}{usable:>12.3f} GiB"


def _sensitivity(priced, folder):
    values, levels = sensitivity.decisions(priced)
    effects = sensitivity.shapley_effects(values, list(levels))
    best = sensitivity.best_by_level(values, levels)
    top = values.max()
    print("\nwhat decides: Shapley effects on throughput; best throughput by level, of the best")
    for name, effect in effects.items():
        shares = ", ".join(f"{lv} {v / top:.2f}" for lv, v in best[name].items() if v > 0)
        print(f"  {name.replace('_', '-'):<12} {effect:>6.1%}   {shares}")
    request = priced.request
    title = f"What decides the throughput on {request.chips:,} {request.chip.name}"
    planner_figures.sensitivity(folder / "sensitivity.png", effects, best, title)
    print(f"  {folder / 'sensitivity.png'}")


def _roofline(options, request, plan, folder):
    models = {}
    sparse = options.density if options.density < 1 else 1 / 8
    for density in (1.0, sparse):
        for fused in (True, False):
            time = step_time.step_time(
                named_model(options.scale, density, options.block),
                request.sequence,
                dataclasses.replace(plan, fused=fused, fused_attention=fused),
                request.chip,
                request.efficiency,
            )
            kind = "dense" if density == 1 else f"density {density:g}"
            label = f"{kind}, {'fused' if fused else 'unfused'}"
            models[label] = step_time.with_passes(time.sections)
    title = (
        f"{options.scale} on {request.chip.name}: sections of a block, forward, with their passes"
    )
    path, dtype = folder / "roofline.png", request.config.compute_dtype
    planner_figures.roofline(path, request.chip, dtype, models, title)
    print(f"  {path}")
