"""Searches the parallel plans of a model on given chips, and prints and writes the result."""

import dataclasses
from pathlib import Path

from sparse_dataflow.commands.planning import launching, plan_rows, search_table
from sparse_dataflow.files import folders, output
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import chips, machines
from sparse_dataflow.planner import bands, plan_memory, search, step_time
from sparse_dataflow.planner.memory import USABLE

from . import search_page, verify

SCALING = (1 / 4, 1 / 2, 1, 2, 4)
"""Numbers of chips of the scaling curve, relative to those of the request."""

ROWS = 1000
"""Largest number of plans in trials.csv."""


def request_of(options) -> search.Request:
    """Returns what the flags ask for.

    Raises:
      UserError: --chips names no chips, or a price.
    """
    machine = machines.parse(options.chips)
    if machine.price is not None:
        raise UserError(f"--chips={options.chips} has a price; legal: KIND:NUMBER.")
    return search.Request(
        options.model,
        options.sequence_length,
        options.batch or options.scale_batch,
        machine.chip,
        machine.count,
        largest_feature=options.feature,
    )


def report_search(options) -> None:
    """Prices every plan, prints the fastest, and writes tables and figures to options.out.

    Args:
      options: of `experiments.layout_search`.

    Raises:
      UserError: --chips is not legal; no plan is, with the closest legal one; or --out names a
        folder that holds other files.
    """
    request = request_of(options)
    with folders.claimed(Path(options.out), "layout_search") as folder:
        _search(options, request, folder)


def _search(options, request, folder):
    priced = search.price(request)
    search.check_legal(priced)
    ranked = priced.ranked(ROWS)
    best = search_table.table(options, priced, ranked)
    print(f"{int(priced.legal.sum()):,} legal plans of {priced.legal.size:,}, all priced")
    print(f"step times: {best.band}")
    if words := plan_rows.slow_products(request.config, request.chip):
        print(words)
    plans = [plan for plan, _ in ranked]
    # Only the best plans are compiled: that takes seconds each, and pricing all takes microseconds.
    verdicts = verify.verdicts(options.scale, request, plans[: search_table.SHOWN], options.verify)
    print(search_table.text(best, verdicts))
    if best.frontier:
        print(f"\n{best.frontier}")
    output.write_csv(folder / "trials.csv", best.rows)
    for plan in plans[: options.explain]:
        print(f"\n{plan}\n{request.time(plan).explain()}")
        print(f"\nmemory of the fullest chip\n{_memory(request, plan)}")
    effects, levels = _sensitivity(priced)
    chosen = plans[best.recommended]
    models = _roofline_models(options, request, chosen)
    command = launching.command(options, chosen, options.tokens)
    launcher = launching.launcher(options, chosen, options.tokens, request.chip)
    page = search_page.Page(
        title=f"{options.label} on {request.chips:,} {request.chip.name}",
        headline=best.headline,
        band=best.band,
        rows=best.rows[: search_table.SHOWN],
        verdicts=verdicts,
        recommended=best.recommended,
        times=[request.time(plan).groups for plan in plans[: search_table.SHOWN]],
        frontier=best.frontier,
        chip=request.chip,
        chips=request.chips,
        dtype=request.config.compute_dtype,
        models=models,
        effects=effects,
        levels=levels,
        scaling=_scaling(request),
        command=command,
        launcher=launcher,
    )
    path = folder / "search.html"
    path.write_text(search_page.render(page), encoding="utf-8")
    print(f"  {path}")
    if launcher:
        print(f"\nTo start it on {request.chips:,} chips:\n  {launcher}")
    print(f"\nTo run it{' in one process' if launcher else ''}:\n  {command}")


def _scaling(request):
    """Returns (chips, tokens per second) of the best plan of the same batch on fewer and more."""
    points = []
    for factor in SCALING:
        chips_there = int(request.chips * factor)
        if chips_there != request.chips * factor or chips_there < 1:
            continue
        other = dataclasses.replace(request, chips=chips_there)
        if best := search.price(other).ranked(1):
            points.append((chips_there, best[0][1] * chips_there))
    return points


def _memory(request, plan):
    table = plan_memory.plan_bytes(request.config, request.sequence, plan).table()
    usable = USABLE * request.chip.memory_bytes / chips.GIB
    return f"{table}\n{'to use':<14}{usable:>12.3f} GiB"


def _sensitivity(priced):
    values, levels = bands.decisions(priced)
    effects = bands.shapley_effects(values, list(levels))
    best = bands.best_by_level(values, levels)
    top = values.max()
    print("\nwhat decides: Shapley effects on throughput; best throughput by level, of the best")
    for name, effect in effects.items():
        shares = ", ".join(f"{lv} {v / top:.2f}" for lv, v in best[name].items() if v > 0)
        print(f"  {name.replace('_', '-'):<12} {effect:>6.1%}   {shares}")
    return effects, bands.mean_by_level(values, levels)


def _roofline_models(options, request, plan):
    models = {}
    sparse = options.density if options.density < 1 else 1 / 8
    for density in (1.0, sparse):
        for fused in (True, False):
            time = step_time.step_time(
                options.with_density(density),
                request.sequence,
                dataclasses.replace(plan, fused=fused, fused_attention=fused),
                request.chip,
                request.efficiency,
            )
            kind = "dense" if density == 1 else f"density {density:g}"
            label = f"{kind}, {'fused' if fused else 'unfused'}"
            models[label] = step_time.with_passes(time.sections)
    return models
