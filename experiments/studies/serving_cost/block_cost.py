"""What blocks of weights cost in trained models of several widths; see `experiments.block_cost`."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.commands.measurement import provenance
from sparse_dataflow.core.checkpoint.named_arrays import flatten
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.stacks import ModelWeights, weights_of
from sparse_dataflow.files import console, output
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.detect import cpu_name
from sparse_dataflow.pruning import rebuild
from sparse_dataflow.pruning.groups import Groups
from sparse_dataflow.pruning.layer_by_layer import HeldLayers
from sparse_dataflow.pruning.projection import Target
from sparse_dataflow.pruning.stored import InMemory, smaller_layer

from ..panels import Curve, Panel, save_panels
from . import runs, study, text, training
from .arms import Arm

NARROW = "narrow"
TESTED = 4096
"""Held-out sequences of a loss."""
BATCHES = 8
LEAST = 1e-3
"""Least excess loss that a law is fitted to."""
SETTINGS = (
    "sequences", "length", "learning_rate", "vector_rate", "layers", "vocabulary", "sequence",
    "corpus",
)  # fmt: skip
"""Options that all runs of a folder share."""


def dense_model(options, width: int) -> ModelConfig:
    """Returns the dense model of a width; its heads are about 14 features wide."""
    return study.model_of(options, width, 2 ** round(math.log2(width / 14)), 4 * width)


def trained(options, width: int, corpus: text.Text) -> tuple[ModelConfig, dict]:
    """Returns the trained dense model of a width; trains it if the folder does not have it."""
    model, path = dense_model(options, width), Path(options.models) / f"width_{width}.npz"
    if not path.exists():
        batch = 32 * width // 48
        recipe = training.Recipe(
            "muon", options.learning_rate * math.sqrt(48 / width), options.vector_rate, "linear",
            study.WARMUP, batch,
        )  # fmt: skip
        steps = study.narrow_steps(model, options.length, batch)
        _, params = training.train(model, Arm(), recipe, steps, 0, corpus)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **flatten(jax.device_get(params)))
    shapes = jax.eval_shape(lambda: gpt.init(model, jax.random.key(0)))
    with np.load(path, allow_pickle=False) as arrays:
        leaves = [arrays[name] for name in flatten(shapes)]
    return model, jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def target_of(shape: tuple[int, int], block: str, density: float) -> Target:
    """Returns what is left of a projection [in, out], chosen in one round.

    Raises:
      UserError: it has no such blocks or density.
    """
    groups = Groups.parse(block)
    if not groups.is_square:
        return Target(groups, groups.count(shape, density), 1)
    degree = density * math.gcd(*groups.grid(shape))
    if degree != round(degree):
        raise UserError(f"Blocks of {groups} have no equal fan-in and fan-out at {density:g}.")
    return Target.balanced(shape, groups.rows, density, 1)


def pruned_loss(
    model: ModelConfig, params: Any, batches: Sequence, block: str, density: float, tested: Any
) -> float:
    """Returns the held-out loss of a pruned model in bits a symbol, before any recovery."""
    weights = ModelWeights(params)
    if block == NARROW:
        narrow, targets = rebuild.narrow_targets(model, density, 1)
        memory, layers = InMemory(narrow), HeldLayers(weights)
        for layer in rebuild.rebuilt_layers(model, layers, batches, targets):
            memory.put(layer, smaller_layer(model, layer))
        return loss(narrow, memory.params(layers.ends()), tested)
    chosen = {n: target_of(model.projection_shape(n), block, density) for n in model.projections}
    targets = {name: functools.partial(_same, target) for name, target in chosen.items()}
    return loss(model, rebuild.rebuilt(model, weights, batches, targets).params, tested)


def _same(target, layer):
    """Returns the target of every layer."""
    return target


def loss(model: ModelConfig, params: Any, windows: np.ndarray) -> float:
    """Returns the mean loss on int32 [windows, length + 1], in bits a symbol."""
    parts = np.array_split(windows, 8)
    even = jnp.full(parts[0][:, 1:].shape, 1 / parts[0][:, 1:].size)
    losses = [
        whole.loss(model, weights_of(params), whole.Batch(jnp.asarray(each), even))
        for each in parts
    ]
    return float(np.mean(losses)) / math.log(2)


@dataclasses.dataclass(frozen=True)
class Law:
    """Excess loss of a pruned model over the dense one, in bits a symbol.

    log2 excess = constants of TERMS, of log2 of the sides, the width and 1 / density.
    """

    constants: dict[str, float]

    def excess(self, sides: tuple[int, int], width: float, density: float) -> float:
        """Returns the excess loss of blocks of so many inputs and outputs."""
        terms = _terms(sides, width, density)
        return 2.0 ** sum(self.constants[name] * value for name, value in terms.items())


def _terms(sides, width, density):
    rows, columns, width, cut = (math.log2(v) for v in (*sides, width / 64, 1 / density))
    return {
        "1": 1.0,
        "rows": rows,
        "columns": columns,
        "columns squared": columns**2,
        "rows x columns": rows * columns,
        "width": width,
        "density": cut,
        "density x sides": cut * (rows + columns),
        "width x sides": width * (rows + columns),
    }


def fit(cells: Sequence[dict]) -> Law:
    """Returns the law of least squared error of log2 excess, of rows of `cells`."""
    terms = [_terms(_sides(c["shape"]), c["width"], c["density"]) for c in cells]
    matrix = np.array([list(each.values()) for each in terms])
    wanted = np.log2([max(cell["excess"], LEAST) for cell in cells])
    constants = np.linalg.lstsq(matrix, wanted, rcond=None)[0]
    return Law(dict(zip(terms[0], constants.tolist())))


def _sides(shape):
    groups = Groups.parse(shape)
    return groups.rows, groups.cols


def mean_cells(lines: runs.Lines) -> list[dict]:
    """Returns a row for each width, shape and density: its mean excess over the dense model."""
    cells: dict[tuple, list[dict]] = {}
    for line in lines:
        cells.setdefault((line["width"], line["shape"], line["density"]), []).append(line)
    rows = []
    for (width, shape, density), each in sorted(cells.items()):
        excess = [line["loss"] - line["dense"] for line in each]
        rows.append(
            {
                "width": width, "shape": shape, "density": density, "samples": len(each),
                "excess": float(np.mean(excess)), "spread": float(np.ptp(excess)),
                "dense": each[0]["dense"],
            }
        )  # fmt: skip
    for row in rows:
        rival = next(
            (r["excess"] for r in rows if (r["width"], r["shape"], r["density"]) == (
                row["width"], NARROW, row["density"])), None,
        )  # fmt: skip
        row["to_narrow"] = None if rival is None else row["excess"] / rival
    return rows


def run(options) -> int:
    """Trains and prunes what is left, then reports; see the experiment.

    Raises:
      UserError: the folder has runs of other settings.
    """
    folder, corpus = Path(options.out), text.read(options.corpus, options.vocabulary)
    lines = runs.read_lines(folder, {name: getattr(options, name) for name in SETTINGS})
    known = {tuple(line[n] for n in ("width", "shape", "density", "sample")) for line in lines}
    machine = cpu_name()
    tested = corpus.windows("held_out", options.sequence, TESTED)
    for width in options.widths:
        cells = itertools.product(
            range(options.samples), options.densities, (NARROW, *options.shapes)
        )
        left = [
            (sample, density, shape)
            for sample, density, shape in cells
            if (width, shape, density, sample) not in known
        ]
        if not left:
            continue
        model, params = trained(options, width, corpus)
        dense = loss(model, params, tested)
        for sample, density, shape in left:
            rng = np.random.default_rng(sample)
            tokens = corpus.batches(rng, 1, options.sequences, options.sequence)[0, :, :-1]
            batches = np.array_split(tokens, BATCHES)
            try:
                value = pruned_loss(model, params, batches, shape, density, tested)
            except UserError as error:
                print(f"{runs.now()} width {width}, {shape} at {density:g}: none: {error}")
                continue
            line = {
                "width": width, "shape": shape, "density": density, "sample": sample,
                "loss": value, "dense": dense, **provenance(machine),
            }  # fmt: skip
            with (folder / runs.LINES).open("a") as file:
                file.write(json.dumps(line) + "\n")
            lines.append(line)
            print(
                f"{runs.now()} width {width}, {shape} at {density:g}, sample {sample}: "
                f"{value:.4f}, dense {dense:.4f}", flush=True,
            )  # fmt: skip
    report(folder, lines, options.held_out)
    return 0


def report(folder: Path, lines: runs.Lines, held_out: str) -> dict:
    """Writes block_cost.json, block_cost.md and block_cost.png; returns the content of the first.

    Args:
      held_out: shape that one of the laws does not see.
    """
    cells = mean_cells(lines)
    blocks = [cell for cell in cells if cell["shape"] != NARROW]
    largest = max(cell["width"] for cell in cells)
    rules = {
        f"width {largest}": lambda cell: cell["width"] == largest,
        f"shape {held_out}": lambda cell: cell["shape"] == held_out,
    }
    predictions = {}
    for name, is_hidden in rules.items():
        law = fit([cell for cell in blocks if not is_hidden(cell)])
        predictions[name] = [
            {**cell, "predicted": law.excess(
                    _sides(cell["shape"]), cell["width"], cell["density"])}
            for cell in blocks if is_hidden(cell)
        ]  # fmt: skip
    result = {
        "commands": sorted({line["command"] for line in lines}),
        "law": fit(blocks).constants,
        "cells": cells,
        "held_out": predictions,
        "errors": {name: _errors(each) for name, each in predictions.items()},
    }
    (folder / "block_cost.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "block_cost.md").write_text(page(result))
    draw(cells, folder / "block_cost.png")
    print(page(result))
    return result


def _errors(predictions):
    """Returns the errors of predicted excess losses, over the narrow model's."""
    errors = [
        abs(cell["predicted"] - cell["excess"]) * cell["to_narrow"] / cell["excess"]
        for cell in predictions
        if cell["to_narrow"] is not None
    ]
    if not errors:
        return {}
    return {"median": float(np.median(errors)), "largest": float(np.max(errors))}


def page(result: dict) -> str:
    """Returns the tables, as Markdown."""
    cells = result["cells"]
    widths = sorted({cell["width"] for cell in cells})
    shapes = list(dict.fromkeys(cell["shape"] for cell in sorted(cells, key=_order)))
    parts = ["# What a block costs", "", "Commands:", ""]
    parts += [f"    {console.with_commands(each)}" for each in result["commands"]]
    by_place = {(c["width"], c["shape"], c["density"]): c for c in cells}
    for density in sorted({cell["density"] for cell in cells}, reverse=True):
        for title, number in (
            ("excess loss over the dense model, bits a symbol", lambda c: f"{c['excess']:.3f}"),
            ("the same over the narrow model's", lambda c: f"{c['to_narrow']:.2f}"),
        ):
            parts += ["", f"## Density {density:g}: {title}", ""]
            rows = [
                (shape, *(
                    number(by_place[w, shape, density])
                    if (w, shape, density) in by_place
                    and by_place[w, shape, density]["to_narrow"] is not None else "-"
                    for w in widths
                ))
                for shape in shapes
            ]  # fmt: skip
            parts.append(output.markdown(("what stays", *map(str, widths)), rows))
    parts += [
        "",
        "## Errors of the law in what it has not seen, over the narrow model's excess",
        "",
    ]
    rows = [
        (name, f"{each['median']:.0%}", f"{each['largest']:.0%}")
        for name, each in result["errors"].items()
        if each
    ]
    parts.append(output.markdown(("not seen", "median error", "largest error"), rows))
    return "\n".join(parts) + "\n"


def _order(cell):
    """Returns the key that sorts shapes: the narrow model, then rows, then squares."""
    if cell["shape"] == NARROW:
        return (0, 0)
    rows, columns = _sides(cell["shape"])
    return (1 + (rows == columns and rows > 1), columns)


def draw(cells: Sequence[dict], path: Path) -> None:
    """Draws the cost of shapes over that of the narrow model, against the width."""
    panels = []
    for density in sorted({cell["density"] for cell in cells}, reverse=True):
        curves: dict[str, Any] = {}
        for shape in dict.fromkeys(cell["shape"] for cell in sorted(cells, key=_order)):
            points = [
                (cell["width"], cell["to_narrow"])
                for cell in cells
                if (cell["shape"], cell["density"]) == (shape, density)
                and cell["to_narrow"] is not None
            ]
            if len(points) > 1:
                x, y = map(list, zip(*points))
                curves[shape] = Curve(x, y)
        panels.append((density, curves))
    save_panels(path, [
        Panel(f"density {density:g}", "width", "excess loss over the narrow model's", curves)
        for density, curves in panels
    ])  # fmt: skip
