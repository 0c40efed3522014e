"""Runs a layout search and tells what it found."""

import csv
import dataclasses
from pathlib import Path

from experiments import layout_verify, planner_flags
from experiments.recipes import RECIPES
from sparse_dataflow.files import folders
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import chips
from sparse_dataflow.parallel.pipeline import schedules
from sparse_dataflow.planning import (
    cost,
    layout_memory,
    sampling,
    sampling_deephyper,
    search,
    sensitivity,
    step_time,
)
from sparse_dataflow.planning.memory import USABLE
from sparse_dataflow.planning.run_layout import RunLayout
from sparse_dataflow.reporting import planner_figures

TRIALS_KEPT = 1000
SAMPLERS = {
    "optuna": (sampling.sample, "trials.journal"),
    "deephyper": (sampling_deephyper.sample, "trials.deephyper.jsonl"),
}
"""Engine -> (what samples, the file that keeps its trials)."""


def run(asked) -> None:
    """Searches, prints and keeps.

    Args:
      asked: the flags of `layout_search`.

    Raises:
      UserError: no layout is legal, with the closest that is; or --out names a folder that holds
        anything but a search.
    """
    config = planner_flags.model(asked.scale, asked.density, asked.block)
    request = search.Request(
        config,
        asked.sequence or config.max_len,
        asked.batch or RECIPES[asked.scale].batch,
        chips.lookup(asked.hardware),
        asked.chips,
    )
    choices = search.space(request)
    with folders.claimed(Path(asked.out), "layout_search") as folder:
        _search(asked, request, choices, folder)


def _search(asked, request, choices, folder):
    sampled = asked.engine in SAMPLERS
    sampled = sampled or (asked.engine == "auto" and choices.size > planner_flags.LARGEST_GRID)
    if sampled:
        sample, journal = SAMPLERS.get(asked.engine, SAMPLERS["optuna"])
        found = sample(request, choices, asked.trials, folder / journal)
        if not found:
            raise UserError(
                f"None of {asked.trials} sampled layouts is legal; legal: more --trials, or "
                "--engine=exhaustive, which names what blocks the request."
            )
        print(f"{len(found):,} legal layouts of {asked.trials:,} sampled from {choices.size:,}")
    else:
        priced = search.price(request, choices)
        search.refuse(priced)
        flat = priced.throughput.reshape(-1)
        found = [(c, flat[i]) for i, c in priced.ranked(TRIALS_KEPT)]
        print(f"{int(priced.legal.sum()):,} legal layouts of {choices.size:,}, all priced")
    leading = [search.single(request.layout(choice)) for choice, _ in found[:10]]
    said = layout_verify.verified(asked.scale, request, leading, asked.verify)
    _print_best(request, found[:10], said)
    _keep_trials(folder / "trials.csv", request, found)
    for choice, _ in found[: asked.explain]:
        print(f"\n{search.single(request.layout(choice))}")
        print(search.explain(request, choice).explain())
        print(f"\nmemory of the fullest chip\n{_memory(request, choice)}")
    best = found[0][0]
    if not sampled:
        _sensitivity(priced, folder)
    _roofline(asked, request, best, folder)
    print(f"\nTo run it:\n  {command(asked, request, best)}")


def command(asked, request: search.Request, choice) -> str:
    """The command that trains with this layout."""
    layout = search.single(request.layout(choice))
    name = "gpt13b_dense" if asked.density == 1 else "gpt13b_sparse"
    flags = [f"--scale={asked.scale}", f"--sequence={request.sequence}"]
    if asked.density < 1:
        flags += [f"--density={asked.density:g}", f"--block={asked.block}"]
    flags += [
        f"--mesh=data:{layout.data},stage:{layout.stage},fsdp:{layout.fsdp},tensor:{layout.tensor}",
        f"--zero={layout.zero}",
        f"--batch={layout.batch}",
        f"--accumulation={layout.accumulation}",
        f"--remat={layout.remat}",
    ]
    if layout.stage > 1:
        schedule = schedules.format_schedule(layout.schedule, int(layout.chunks))
        flags += ["--executor=pipeline", f"--schedule={schedule}"]
    return f"python -m experiments.{name} {' '.join(flags)}"


def _print_best(request, found, verified):
    print(
        f"{'tokens/s/chip':>13} {'MFU':>6} {'GiB':>6}  {'data':>4} {'stage':>5} {'fsdp':>5} "
        f"{'tensor':>6} {'micro':>5} {'accum':>5}  schedule, ZeRO, remat, limited by; compiled"
    )
    alike = len(set(verified)) == 1
    for (choice, speed), said in zip(found, verified):
        line = row(request, choice, speed)
        print(
            f"{line['tokens_per_second_per_chip']:>13,.1f} {line['mfu']:>6.1%} {line['gib']:>6.1f}"
            f"  {line['data']:>4} {line['stage']:>5} {line['fsdp']:>5} {line['tensor']:>6} "
            f"{line['micro_batch']:>5} {line['accumulation']:>5}  {line['schedule']}"
            f"{'/' + str(line['chunks']) if line['chunks'] > 1 else ''}, {line['zero']}, "
            f"{line['remat']}, {line['limit']}; {'' if alike else said}".rstrip("; ")
        )
    if alike:
        print(f"by the compiler, all of them: {verified[0]}")


def row(request, choice, speed) -> dict:
    """One layout as a row of a table: speed, MFU, memory, counts, what limits it."""
    layout: RunLayout = search.single(request.layout(choice))
    flops = cost.flops_per_token(request.config, request.sequence).total
    dtype = request.config.compute_dtype
    held = layout_memory.layout_bytes(request.config, request.sequence, layout).total
    return {
        "tokens_per_second_per_chip": float(speed),
        "mfu": cost.mfu(flops, float(speed), request.chip, dtype),
        "gib": float(held) / chips.GIB,
        **{name: getattr(layout, name) for name in ("data", "stage", "fsdp", "tensor")},
        **{name: getattr(layout, name) for name in ("micro_batch", "accumulation", "chunks")},
        **{name: getattr(layout, name) for name in search.NAMES},
        "limit": search.explain(request, choice).limit,
    }


def _keep_trials(path, request, found):
    rows = [row(request, choice, speed) for choice, speed in found]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _memory(request, choice):
    layout = search.single(request.layout(choice))
    plan = layout_memory.layout_bytes(request.config, request.sequence, layout)
    usable = USABLE * request.chip.memory_bytes / chips.GIB
    return f"{plan.table()}\n{'to use':<14}{usable:>12.3f} GiB"


def _sensitivity(priced, folder):
    values, levels = sensitivity.decisions(priced)
    effects = sensitivity.shapley_effects(values, list(levels))
    best = sensitivity.best_by_level(values, levels)
    top = values.max()
    print("\nwhat decides: Shapley effects on throughput; best throughput by level, of the best")
    for name, effect in effects.items():
        shares = ", ".join(f"{lv} {v / top:.2f}" for lv, v in best[name].items() if v > 0)
        print(f"  {name.replace('_', '-'):<12} {effect:>6.1%}   {shares}")
    r = priced.request
    title = f"What decides the throughput on {r.chips:,} {r.chip.name}"
    figure = planner_figures.sensitivity(effects, best, title)
    print(f"  {planner_figures.save(figure, folder / 'sensitivity.png')}")


def _roofline(asked, request, choice, folder):
    models = {}
    layout = search.single(request.layout(choice))
    sparse = asked.density if asked.density < 1 else 1 / 8
    for density in (1.0, sparse):
        for fused in (True, False):
            time = step_time.step_time(
                planner_flags.model(asked.scale, density, asked.block),
                request.sequence,
                dataclasses.replace(layout, fused=fused, fused_attention=fused),
                request.chip,
                request.efficiency,
            )
            kind = "dense" if density == 1 else f"density {density:g}"
            label = f"{kind}, {'fused' if fused else 'unfused'}"
            models[label] = step_time.with_passes(time.sections)
    title = f"{asked.scale} on {request.chip.name}: sections of a block, forward, with their passes"
    figure = planner_figures.roofline(request.chip, request.config.compute_dtype, models, title)
    print(f"  {planner_figures.save(figure, folder / 'roofline.png')}")
