"""Recovery of a trained dense model: stored blocks against a narrower dense model, both pruned.

The rival is Minitron (arXiv 2407.14679): channels, heads and hidden features of the trained model
with the largest mean square activations make a narrow dense model, which the trained one teaches.
Its projections may be fitted to the trained model's outputs, as those of stored blocks are
(`reconstruction`).
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.evaluation.significance import paired_difference
from sparse_dataflow.files import console, output
from sparse_dataflow.hardware.detect import cpu_name

from . import arms, inputs, reconstruction, runs, study, text, training
from .arms import Arm
from .runs import Cell

CHUNK = 2
"""Optimizer steps of one call: budgets are small, so their ends are fine."""

SERVED = {"1/2": (36, 3, 120), "1/4": (24, 2, 96)}
"""Part of the trained projections that is served -> d_model, heads and d_ff of the rival."""

TRAINED = (48, 4, 192)
"""d_model, heads and d_ff of the trained model."""

FIRST_RATE = 0.5
"""Peak of the first trial of a recovery, relative to the dense training's."""

RIVAL = "narrow_rebuilt_taught"
_BLOCKS = Arm(pruned=arms.ALL, start=0, end=0, stages=1, keep="activation", teacher=1.0)
_change = dataclasses.replace
_REBUILT = _change(_BLOCKS, keep="reconstruction")

METHODS: Mapping[str, Arm] = {
    "narrow_taught": Arm(teacher=1.0),
    RIVAL: Arm(teacher=1.0, keep="reconstruction"),
    "narrow_half_taught": Arm(teacher=0.5),
    "narrow": Arm(),
    "blocks_taught": _BLOCKS,
    "blocks_half_taught": _change(_BLOCKS, teacher=0.5),
    "blocks": _change(_BLOCKS, teacher=0.0),
    "blocks_norm_taught": _change(_BLOCKS, keep="norm"),
    "blocks_saliency_taught": _change(_BLOCKS, keep="saliency"),
    "blocks_across_taught": _change(_BLOCKS, across="model"),
    "blocks_stepwise_taught": _change(_BLOCKS, end=0.5, stages=5),
    "single_taught": _change(_BLOCKS, block=1),
    "blocks_rebuilt": _change(_REBUILT, teacher=0.0),
    "blocks_rebuilt_taught": _REBUILT,
    "blocks_rebuilt_stepwise_taught": _change(_REBUILT, end=0.5, stages=5),
    "blocks_2_rebuilt_taught": _change(_REBUILT, block=2),
    "single_rebuilt_taught": _change(_REBUILT, block=1),
}
"""Name -> how a trained model is made smaller; shapes are added by `arm_of`."""


def arm_of(method: str, narrow: ModelConfig) -> Arm:
    """Returns the arm of a method: its model has the trained shape if it is cut, else `narrow`."""
    arm = METHODS[method]
    if not arm.pruned:
        return arm
    width, heads, hidden = TRAINED
    return _change(
        arm,
        width=width / narrow.d_model,
        heads=heads / narrow.num_heads,
        hidden=hidden / narrow.d_ff,
    )


def narrowed(
    wide: ModelConfig, narrow: ModelConfig, params: Any, tokens: np.ndarray, rebuilt: bool = False
) -> Any:
    """Returns the params of the narrow model that has the largest features of the wide one.

    Args:
      wide: with fused queries, keys and values.
      narrow: of the same depth and head width.
      params: of the wide model.
      tokens: int32 [batch, length], the text on which features are large.
      rebuilt: whether projections are fitted, so that they make up for the features that go.
    """
    squares = jax.device_get(inputs.mean_squares(wide, params, jnp.asarray(tokens)))
    layers, head = range(wide.num_layers), wide.head_width

    def largest(scores, count):
        return np.sort(np.argsort(-scores, kind="stable")[:count])

    stream = (squares["qkv"] + squares["mlp_in"]).sum(0)
    channels = largest(stream, narrow.d_model)
    heads = [
        largest(squares["attn_out"][i].reshape(-1, head).sum(1), narrow.num_heads) for i in layers
    ]
    hidden = [largest(squares["mlp_out"][i], narrow.d_ff) for i in layers]

    def head_features(layer, width):
        return (heads[layer][:, None] * width + np.arange(width)).ravel()

    chosen = {
        "qkv": [(channels, head_features(i, 3 * head)) for i in layers],
        "attn_out": [(head_features(i, head), channels) for i in layers],
        "mlp_in": [(channels, hidden[i]) for i in layers],
        "mlp_out": [(hidden[i], channels) for i in layers],
    }
    blocks = params["blocks"]
    kernels = {
        name: {
            "kernel": np.stack(
                [np.asarray(blocks[name]["kernel"])[i][np.ix_(*chosen[name][i])] for i in layers]
            )
        }
        for name in chosen
    }
    # The mean square of the channels that stay is not that of all.
    scale = np.sqrt(stream[channels].mean() / stream.mean())

    def norm(leaf):
        return np.asarray(leaf)[..., channels] * scale

    small = {
        "embed": {name: np.asarray(leaf)[:, channels] for name, leaf in params["embed"].items()},
        "blocks": {
            **kernels,
            **{name: {"scale": norm(blocks[name]["scale"])} for name in ("norm1", "norm2")},
        },
        "head": {"norm": {"scale": norm(params["head"]["norm"]["scale"])}},
    }
    if not rebuilt:
        return small
    outputs = reconstruction.given(wide, params, tokens)
    wanted = {
        name: np.stack([outputs[name][i][..., chosen[name][i][1]] for i in layers])
        for name in chosen
    }
    fit = lambda name, layer, *sides: reconstruction.dense(*sides)  # noqa: E731
    return reconstruction.fitted(narrow, small, wanted, tokens, fit)


def run(options) -> int:
    """Trains the dense model, makes it smaller in each way, and reports; see the experiment.

    Raises:
      UserError: the folder has runs of other settings.
    """
    folder, corpus, machine = (
        Path(options.out), text.read(options.corpus, options.vocabulary), cpu_name(),
    )  # fmt: skip
    lines = runs.read_lines(folder, {name: getattr(options, name) for name in SETTINGS})
    wide = _model(options, TRAINED)
    steps = study.narrow_steps(wide, options.length, options.batch)

    def recipe(multiplier):
        return training.Recipe(
            options.optimizer, options.learning_rate * multiplier, options.vector_rate, "linear",
            study.WARMUP, options.batch,
        )  # fmt: skip

    @functools.cache
    def trained(seed):
        result, params = training.train(wide, Arm(), recipe(1.0), steps, seed, corpus)
        print(f"{runs.now()} trained, seed {seed}: {result['held_out']:.4f}", flush=True)
        rng = np.random.default_rng(seed)
        tokens = corpus.batches(rng, 1, training.COMPARED, wide.max_len)
        return result, params, tokens[0, :, :-1]

    cells = {
        Cell(f"{method} {served}", options.optimizer, "linear", percent): (method, served)
        for percent in options.recoveries
        for served in options.served
        for method in options.methods
    }
    for each in runs.pending(lines, list(cells), options.trials, lambda _: options.seeds):
        method, served = cells[each.cell]
        narrow = _model(options, SERVED[served])
        arm = arm_of(method, narrow)
        dense, params, tokens = trained(each.seed)
        rebuilt = arm.keep == "reconstruction"
        start = params if arm.pruned else narrowed(wide, narrow, params, tokens, rebuilt)
        begin = training.Trained(start, (wide, params) if arm.teacher else None)
        result, _ = training.train(
            narrow,
            arm,
            recipe(FIRST_RATE * each.multiplier),
            max(1, round(steps * each.cell.length / 100)),
            each.seed,
            corpus,
            begin,
            CHUNK,
        )
        result |= {"trained": dense["held_out"]}
        lines.append(runs.append(folder, each, result, machine))
        print(
            f"{runs.now()} {each.cell.arm} {each.cell.length}% x{each.multiplier:g} seed "
            f"{each.seed}: {result['held_out']:.4f} in {result['seconds']:.0f} s",
            flush=True,
        )
    report = page(lines)
    (folder / "recovery.md").write_text(report)
    print(report)
    return 0


SETTINGS = (
    "optimizer", "learning_rate", "vector_rate", "length", "layers", "vocabulary", "sequence",
    "batch", "corpus",
)  # fmt: skip
"""Options that all runs of a folder share."""


def _model(options, shape):
    """Returns a model of the study of a shape (d_model, heads, d_ff)."""
    width, heads, hidden = shape
    return study.model_of(options, width, heads, hidden)


def page(lines: runs.Lines) -> str:
    """Returns the tables of all runs of a folder, as Markdown."""
    cells = dict.fromkeys(
        Cell(*(line[field.name] for field in dataclasses.fields(Cell))) for line in lines
    )
    parts = ["# Recovery of a trained model", "", "Commands:", ""]
    parts += [
        f"    {console.with_commands(command)}"
        for command in sorted({line["command"] for line in lines})
    ]
    trained = {line["seed"]: line["trained"] for line in lines}
    parts += ["", f"The trained model: {np.mean(list(trained.values())):.4f} bits a symbol."]
    for percent in sorted({cell.length for cell in cells}):
        rows = []
        for cell in sorted(cells, key=lambda c: c.arm.split()[::-1]):
            if cell.length != percent:
                continue
            method, served = cell.arm.split()
            measured = runs.measured(lines, cell)
            rival = runs.measured(lines, dataclasses.replace(cell, arm=f"{RIVAL} {served}"))
            losses = {seed: line["held_out"] for seed, line in measured.items()}
            one = next(iter(measured.values()))
            rows.append(
                (
                    served, method, f"{np.mean(list(losses.values())):.4f}", len(losses),
                    _to_rival(losses, {s: line["held_out"] for s, line in rival.items()}),
                    f"{one['multiplier']:g}x", one["steps"], f"{one['stored_weights']:.0f}",
                )
            )  # fmt: skip
        headers = (
            "served", "method", "bits a symbol", "seeds", f"to {RIVAL}, 95% interval", "rate",
            "steps", "stored weights",
        )  # fmt: skip
        parts += ["", f"## {percent}% of the training", "", output.markdown(headers, rows)]
    return "\n".join(parts) + "\n"


def _to_rival(losses, rival):
    seeds = sorted(set(losses) & set(rival))
    if not seeds or losses == rival:
        return "-"
    ours, theirs = ([each[seed] for seed in seeds] for each in (losses, rival))
    difference, mean = paired_difference(ours, theirs, seeds), float(np.mean(theirs))
    text = f"{100 * difference.difference / mean:+.2f}%"
    if difference.low is None or difference.high is None:
        return text
    return f"{text} ({100 * difference.low / mean:+.2f}% to {100 * difference.high / mean:+.2f}%)"
