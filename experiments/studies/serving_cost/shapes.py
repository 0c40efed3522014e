"""The search of a shape for a budget, and trainings that check it."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparse_dataflow.files import folders, output
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import chips
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.hardware.detect import cpu_name, detect
from sparse_dataflow.runs.equal_cost import stored_parameters

from ..panels import Curve, Panel, save_panels
from . import arms, candidates, runs, shape_law, study, text, training
from .candidates import Budget, Candidate
from .runs import Cell
from .shape_law import Studies

NAME = "shape_search"

SHOWN = 10
"""Candidates of the table, and the best one of each kind after them."""

RESULTS = Path(__file__).parents[2] / "results"
STUDIES = tuple(f"serving_cost{end}" for end in ("", "_width_16", "_layers_1", "_layers_4"))
"""Folders of RESULTS that have the runs of this project; a wheel has them too."""

MOST_STORED = "most stored parameters"
"""The choice of the proxy without training."""

LAST_SETTINGS = ("served_flops", "served_ms", "hardware", "training_flops", "tokens", "optimizer")
"""Options that all runs of a folder share, with the settings of the studies."""


def search_shapes(options) -> int:
    """Searches and, if asked to, trains; see `experiments.shape_search`.

    Raises:
      UserError: an incomplete budget, no candidate, or a folder that is no study.
    """
    chip = _chip(options)
    budget = _budget(options, chip)
    if options.train or options.pareto:
        folders.refuse_foreign(Path(options.out), NAME)
    sources = [Path(name.strip()) for name in options.studies.split(",") if name.strip()]
    sources = sources or [RESULTS / name for name in STUDIES]
    studies = shape_law.read(sources, options.optimizer)
    ranked = candidates.search(studies, budget)
    print(page(studies, ranked, chip), flush=True)
    if options.pareto:
        _pareto(options, studies, budget, chip)
    if options.train:
        _train(options, studies, ranked)
    return 0


def _chip(options) -> Chip | None:
    """Returns the chip of --served_ms; None without that."""
    if not options.served_ms:
        return None
    return chips.lookup(options.hardware) if options.hardware else detect()


def _budget(options, chip):
    if not (options.served_flops or options.served_ms):
        raise UserError("The budget has no served cost; legal: --served_flops or --served_ms.")
    if not (options.training_flops or options.tokens):
        raise UserError("The budget has no training cost; legal: --training_flops or --tokens.")
    flops, bytes_ = options.served_flops or math.inf, math.inf
    if chip:
        rate, bandwidth = chip.rates("float32")
        flops = min(flops, rate * options.served_ms / 1e3)
        bytes_ = bandwidth * options.served_ms / 1e3
    return Budget(flops, bytes_, options.training_flops or math.inf, options.tokens or math.inf)


def page(studies: Studies, ranked: Sequence[Candidate], chip: Chip | None) -> str:
    """Returns what the law is fitted to, and the table of candidates, as Markdown."""
    best = ranked[0]
    chosen = list(ranked[:SHOWN])
    for kind in (False, True):
        same_kind = [c for c in ranked if bool(c.arm.pruned) == kind]
        chosen += [c for c in same_kind[:1] if c not in chosen]
    equal = sum(c.loss * (1 - c.error) <= best.loss * (1 + best.error) for c in ranked)
    parts = [
        *_law_text(studies),
        "",
        output.markdown(
            (
                "rank", "layers", "d_model", "heads' width", "d_ff", *arms.ALL, "served FLOPs",
                *(("ms",) if chip else ()), "stored weights", "tokens", "training FLOPs",
                "bits a symbol", "error",
            ),
            [_row(1 + ranked.index(c), c, chip) for c in chosen],
        ),
        "",
        f"{equal} of {len(ranked)} depths and widths are within the errors of the best one.",
    ]  # fmt: skip
    parts.append(_proxy_text(ranked))
    if any(c.extrapolated for c in chosen):
        parts.append("~: mean weights or tokens are outside of the dense runs.")
    if best.arm.pruned:
        parts.append(
            f"Rank 1 trains dense until {best.arm.start:.0%} of the training FLOPs, and is cut in "
            f"blocks of {best.arm.block} by {best.arm.keep} until {best.arm.end:.0%}."
        )
    return "\n".join(parts) + "\n"


def _law_text(studies):
    """Yields what the law is fitted to, and its errors."""
    options, errors = studies.options, 100 * np.abs(studies.errors)
    weights, tokens = studies.span("weights"), studies.span("tokens")
    depths = sorted({result.model.num_layers for result in studies.dense})
    ratios = sorted(result.model.d_ff / result.model.d_model for result in studies.dense)
    yield (
        f"Law of {len(studies.dense)} dense results on {options.corpus} in {options.vocabulary} "
        f"symbols, sequences of {options.sequence}: {weights[0]:.3g} to {weights[1]:.3g} mean "
        f"weights, {tokens[0]:.3g} to {tokens[1]:.3g} tokens, layers "
        f"{', '.join(map(str, depths))}, d_ff / d_model {ratios[0]:.2g} to {ratios[-1]:.2g}."
    )
    yield (
        "Each result predicted without it: errors of "
        f"{np.median(errors):.1f}% (median) to {errors.max():.1f}%."
    )
    for pruning in studies.prunings:
        words = ", ".join(f"{key} {value}" for key, value in shape_law.names(pruning).items())
        yield (
            f"Pruning of {words}: {100 * pruning.excesses.min():+.1f}% to "
            f"{100 * pruning.excesses.max():+.1f}% over the law in {len(pruning.results)} results, "
            f"each predicted from the others with an error of {pruning.error:.1%}."
        )


def _row(rank, candidate, chip):
    model, served = candidate.model, candidate.served
    seconds = [f"{1e3 * _seconds(candidate, chip):.3g}"] if chip else []
    return (
        rank,
        model.num_layers,
        model.d_model,
        model.num_heads * model.head_width,
        model.d_ff,
        *(f"{served.linear(name).density:.2f}" for name in arms.ALL),
        f"{candidate.served_flops:.0f}",
        *seconds,
        stored_parameters(served),
        f"{candidate.tokens:.3g}",
        f"{candidate.course.flops:.3g}",
        f"{candidate.loss:.3f}{'~' * candidate.extrapolated}",
        f"{candidate.error:.1%}",
    )


def by_proxy(candidate: Candidate) -> int:
    """Returns what the proxy without training ranks by: stored parameters, more is better."""
    return stored_parameters(candidate.served)


def _proxy_text(ranked):
    """Returns how the proxy ranks candidates, beside the law."""
    from scipy import stats  # Slow to import.

    first = max(ranked, key=by_proxy)
    behind = first.loss / ranked[0].loss - 1
    text = (
        f"By stored parameters alone, a proxy without training, {first.name} is first: rank "
        f"{1 + ranked.index(first)} by the law, {behind:.1%} behind its first."
    )
    if len(ranked) > 2:
        order = stats.spearmanr([-by_proxy(c) for c in ranked], [c.loss for c in ranked])
        text += f" The two orders correlate by {order.statistic:.2f} (Spearman)."
    return text


def _pareto(options, studies, budget, chip):
    """Writes the table and the picture of the best candidates of smaller served budgets."""
    names = "dense", "pruned", MOST_STORED
    kinds: dict[str, list[tuple[float, Candidate]]] = {name: [] for name in names}
    rows: list[tuple] = []
    for number in range(options.pareto):
        smaller = budget.served_by(2 ** (-number / 2))
        try:
            ranked = candidates.search(studies, smaller)
        except UserError as error:
            if not number:
                raise
            print(f"No candidate below: {error}", flush=True)
            break
        chosen = {
            "dense": next((c for c in ranked if not c.arm.pruned), None),
            "pruned": next((c for c in ranked if c.arm.pruned), None),
            MOST_STORED: max(ranked, key=by_proxy),
        }
        for kind, candidate in chosen.items():
            if candidate is None:
                continue
            cost = 1e3 * _seconds(candidate, chip) if chip else candidate.served_flops
            kinds[kind].append((cost, candidate))
            loss = f"{candidate.loss:.3f} ({candidate.error:.1%})"
            rows.append((f"{cost:.3g}", kind, candidate.name, by_proxy(candidate), loss))
    unit = f"ms of a token on {chip.name}" if chip else "forward FLOPs of a token"
    table = output.markdown((unit, "best", "shape", "stored weights", "bits a symbol"), rows)
    folder = Path(options.out)
    folders.claim(folder, NAME)
    (folder / "pareto.md").write_text(table + "\n")
    curves = {
        kind: Curve(
            [cost for cost, _ in points],
            [c.loss for _, c in points],
            [c.loss * (1 - c.error) for _, c in points],
            [c.loss * (1 + c.error) for _, c in points],
        )
        for kind, points in kinds.items()
        if points
    }
    panel = Panel("Best shapes of a budget", unit, "predicted bits a symbol", curves)
    save_panels(folder / "pareto.png", [panel])
    print(table, flush=True)


def _seconds(candidate, chip):
    """Returns the seconds of a token: the longer of its products and of its reads."""
    rate, bandwidth = chip.rates("float32")
    return max(candidate.served_flops / rate, candidate.served_bytes / bandwidth)


def _checked(ranked: Sequence[Candidate], count: int) -> list[Candidate]:
    """Returns the best candidates, one in the middle of the others, and the last one."""
    rest = ranked[count:]
    others = [rest[i] for i in dict.fromkeys((len(rest) // 2, len(rest) - 1)) if rest]
    return [*ranked[:count], *others]


def _train(options, studies, ranked):
    """Trains candidates, then writes and prints predicted and measured losses."""
    chosen, folder = _checked(ranked, options.train), Path(options.out)
    folders.claim(folder, NAME)
    shared = {name: getattr(options, name) for name in LAST_SETTINGS}
    study_settings = {name: getattr(studies.options, name) for name in shape_law.TEXT}
    rate = studies.options.learning_rate
    lines = runs.read_lines(folder, {**shared, **study_settings, "learning_rate": rate})
    corpus = text.read(studies.options.corpus, studies.options.vocabulary)
    by_cell = {
        Cell(c.name, options.optimizer, "linear", round(c.tokens / stored_parameters(c.served))): c
        for c in chosen
    }
    for each in runs.pending(lines, list(by_cell), options.trials, lambda _: options.seeds):
        candidate = by_cell[each.cell]
        recipe = training.Recipe(
            options.optimizer,
            rate * each.multiplier,
            studies.options.vector_rate,
            "linear",
            study.WARMUP,
            studies.options.batch,
        )
        result, _ = training.train(
            candidate.model, candidate.arm, recipe, candidate.narrow_steps, each.seed, corpus
        )
        lines.append(runs.append(folder, each, result, cpu_name()))
        print(
            f"{runs.now()} {each.cell.arm} x{each.multiplier:g} seed {each.seed}: held out "
            f"{result['held_out']:.4f} in {result['seconds']:.0f} s",
            flush=True,
        )
    rows = [
        _comparison(1 + ranked.index(c), c, runs.measured(lines, cell))
        for cell, c in by_cell.items()
    ]
    result = {
        "commands": sorted({line["command"] for line in lines}),
        "law": dataclasses.asdict(studies.law),
        "studies": options.studies or ",".join(STUDIES),
        "rows": rows,
        "versions": lines[-1]["versions"],
        "machines": sorted({line["machine"] for line in lines}),
    }
    (folder / f"{NAME}.json").write_text(json.dumps(result, indent=1) + "\n")
    comparison = compared(rows)
    (folder / f"{NAME}.md").write_text(comparison)
    print(comparison)


def _comparison(rank, candidate, measured):
    losses = {seed: line["held_out"] for seed, line in sorted(measured.items())}
    return {
        "rank": rank,
        "name": candidate.name,
        "stored": by_proxy(candidate),
        "predicted": candidate.loss,
        "error": candidate.error,
        "losses": losses,
        "measured": float(np.mean(list(losses.values()))),
    }


def compared(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of predicted and measured losses, and how well they are ranked."""
    by_loss = sorted(rows, key=lambda row: row["measured"])
    pairs = [(a, b) for i, a in enumerate(rows) for b in rows[i + 1 :]]
    agree = sum(
        (a["predicted"] < b["predicted"]) == (a["measured"] < b["measured"]) for a, b in pairs
    )
    first = min(rows, key=lambda row: row["rank"])
    behind = first["measured"] / by_loss[0]["measured"] - 1
    table = output.markdown(
        ("predicted rank", "shape", "predicted", "measured", "seeds", "predicted over measured",
         "measured rank"),
        [
            (
                row["rank"],
                row["name"],
                f"{row['predicted']:.3f} ({row['error']:.1%})",
                f"{row['measured']:.4f}",
                len(row["losses"]),
                f"{row['predicted'] / row['measured'] - 1:+.1%}",
                1 + by_loss.index(row),
            )
            for row in rows
        ],
    )  # fmt: skip
    return (
        f"{table}\n\n{agree} of {len(pairs)} pairs are ranked as measured{_by_proxy(pairs)}. The "
        f"first choice is {behind:.1%} behind the best of these.\n"
    )


def _by_proxy(pairs):
    """Returns in words how many pairs the proxy ranks as measured; "" for rows without it."""
    if not all("stored" in row for pair in pairs for row in pair):
        return ""
    agree = sum((a["stored"] > b["stored"]) == (a["measured"] < b["measured"]) for a, b in pairs)
    return f", and {agree} by stored parameters alone"
