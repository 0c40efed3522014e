"""The table of the best plans of a search, with what decides between them; loads no jax."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from sparse_dataflow.commands.planning import plan_rows
from sparse_dataflow.commands.planning.options import ModelOptions
from sparse_dataflow.hardware import chips
from sparse_dataflow.planner import bands, search
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.planner.search import ROOMY, Priced

SHOWN = 10
"""Plans in the printed table."""
_DAY = 86400


@dataclasses.dataclass(frozen=True)
class Table:
    """The best plans of a search.

    Attributes:
      rows: plans as rows, fastest first.
      band: error band of the step times, as a sentence.
      recommended: index of the plan to run.
      headline: the answer in one sentence.
      frontier: the plan that ran on Frontier, with both predictions; "" for other models and chips.
    """

    rows: Sequence[Mapping]
    band: str
    recommended: int
    headline: str
    frontier: str


def table(options, priced: Priced, ranked: Sequence[tuple[ParallelPlan, float]]) -> Table:
    """Returns the table of a search.

    Args:
      options: of `experiments.layout_search`.
      priced: prices of all plans.
      ranked: the fastest legal plans and their tokens per second and chip, fastest first.
    """
    request = priced.request
    width = bands.tie_width(request.first, request.sequence, request.chip)
    dense = _dense_best(options, request)
    rows = []
    for plan, speed in ranked:
        row = plan_rows.row(request, plan, speed)
        row["days"] = options.tokens / (speed * request.chips) / _DAY
        row["over_dense"] = speed / dense if dense else None
        row["tie"] = abs(np.log(speed / ranked[0][1])) <= width
        row["tight"] = row["memory_share"] > ROOMY
        rows.append(row)
    chosen = priced.recommended(ranked)
    for number, row in enumerate(rows):
        row["recommended"] = number == chosen
    band = bands.words(request.first, request.sequence, request.chip)
    headline = _headline(options, request, rows[chosen])
    return Table(rows, band, chosen, headline, _frontier(options, request, ranked[chosen]))


def text(best: Table, verdicts: Sequence[str]) -> str:
    """Returns the best plans as a text table, with the compiler's verdict on each."""
    rows = best.rows[:SHOWN]
    sparse = rows[0]["over_dense"] is not None
    gain = f" {'x dense':>8}" if sparse else ""
    lines = [
        f"  {'tokens/s':>11} {'days':>8}{gain} {'MFU':>6} {'GiB':>6} {'room':>5}  "
        f"{'data':>4} {'stage':>5} {'fsdp':>5} {'tensor':>6} {'micro':>5} {'accum':>5}  "
        "schedule, ZeRO, remat, limited by; compiled"
    ]
    alike = len(set(verdicts)) == 1
    for number, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
        mark = ("*" if number == best.recommended else " ") + ("=" if row["tie"] else " ")
        gain = f" {row['over_dense']:>7.2f}x" if sparse else ""
        exchange = ", exchange" if row["experts"] == "exchange" else ""
        rare = "".join(f", {a}:{row[a]}" for a in ("context", "feature") if row[a] > 1)
        choices = f"{row['zero']}, {row['remat']}{exchange}{rare}"
        schedule = row["schedule"] + (f"/{row['chunks']}" if row["chunks"] > 1 else "")
        lines.append(
            f"{mark}{row['tokens_per_second']:>11,.0f} {row['days']:>8,.1f}{gain} "
            f"{row['mfu']:>6.1%} {row['gib']:>6.1f} {1 - row['memory_share']:>4.0%}"
            f"{'!' if row['tight'] else ' '}  {row['data']:>4} {row['stage']:>5} {row['fsdp']:>5} "
            f"{row['tensor']:>6} {row['micro_batch']:>5} {row['accumulation']:>5}  {schedule}, "
            f"{choices}, {row['limit']}; {'' if alike else verdict}".rstrip("; ")
        )
    ties = sum(row["tie"] for row in best.rows)
    more = f" ({ties:,} plans do)" if ties > SHOWN else ""
    lines.append(f"* recommended; = ties with the fastest within the error band{more}; "
                 "! less than 5% of the usable memory is free")  # fmt: skip
    if alike:
        lines.append(f"by the compiler, all of them: {verdicts[0]}")
    return "\n".join(lines)


def _headline(options, request, row) -> str:
    gain = f", {row['over_dense']:.2f} times the dense model's" if row["over_dense"] else ""
    return (
        f"{row['tokens_per_second']:,.0f} tokens/s{gain}: {row['days']:,.1f} days for "
        f"{options.tokens / 1e9:g} billion tokens on {request.chips:,} {request.chip.name}"
    )


def _dense_best(options: ModelOptions, request: search.Request) -> float | None:
    """Returns tokens per second and chip of the dense model's best plan; None for a dense search.

    Without a legal plan of the dense model it is None too.
    """
    if options.density == 1:
        return None
    dense = dataclasses.replace(request, config=options.with_density(1.0))
    best = search.price(dense).ranked(1)
    return best[0][1] if best else None


def _as_in_frontier(stage, tensor, accumulation):
    return ParallelPlan(
        stage=stage, tensor=tensor, accumulation=accumulation, zero=1, remat="block",
        gradient_bytes=2, cast_bytes=0, weight_casts=accumulation,
    )  # fmt: skip


FRONTIER = {
    "22b": (_as_in_frontier(4, 2, 160), "assumed", 73.5),
    "175b": (_as_in_frontier(16, 4, 640), "recalled", 69.2),
    "1t": (_as_in_frontier(64, 8, 1600), "recalled", 61.2),
}
"""Plans of arXiv 2312.12705 by scale: the plan, how it is known, and TFLOP/s a chip."""


def _frontier(options, request, chosen) -> str:
    """Returns lines on the plan of FRONTIER for this model, beside the chosen one."""
    if (
        options.scale not in FRONTIER
        or options.changes
        or request.chip.name != "mi250x-gcd"
        or options.density < 1
    ):
        return ""
    plan, status, speed = FRONTIER[options.scale]
    stage, tensor = int(plan.stage), int(plan.tensor)
    fsdp = request.chips // (stage * tensor)
    head = f"Frontier's own plan ({status}), published at {speed:g} TFLOP/s a chip:"
    if not fsdp or request.chips % (stage * tensor) or request.batch % fsdp:
        return f"{head} tensor {tensor}, stage {stage} does not divide this request"
    plan = dataclasses.replace(plan, fsdp=fsdp, accumulation=request.batch // fsdp)
    own = request.batch * request.sequence / float(request.time(plan).total)
    size = float(request.chip_bytes(plan)) / chips.GIB
    ours = chosen[1] * request.chips
    return (
        f"{head}\n  {plan}\n  predicted {own:,.0f} tokens/s and {size:.1f} GiB in this project's "
        f"executors; the recommended plan {ours:,.0f} tokens/s, {ours / own - 1:+.0%}"
    )
