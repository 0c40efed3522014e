"""Seconds of a generated token: the narrow dense model against stored blocks.

The study's models are so small that calls, not weights, take the time.  So widths and blocks are
`scale` times larger here, which leaves the ratios.  Weights are random.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.training import cost
from sparse_dataflow.evaluation import kv_cache
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.planner.decoding import decoding_bytes

from ...benchmarks import paired
from . import arms

TOKENS = 4
"""Tokens of a timed round."""


def measure(
    narrow: ModelConfig,
    names: Sequence[str],
    rounds: int,
    *,
    scale: int = 32,
    block: int = 64,
    batches: Sequence[int] = (1, 8),
) -> list[dict[str, object]]:
    """Returns a row for each arm and batch: seconds a token, and its costs by the planner.

    Args:
      narrow: the narrow dense model of the study.
      names: arms; "narrow" is always timed, as the ratios are to it.
      rounds: timed rounds, in turn.
      scale: factor of all widths.
      block: side of the stored blocks.
      batches: texts that are written at once.
    """
    models = {"narrow": _scaled(narrow, scale)}
    for name in names:
        arm = arms.ARMS[name]
        model = _scaled(arms.shape(narrow, arm), scale)
        density = arms.served_density(narrow, arm)
        models[name] = _legal(model, arm, density, block) if arm.pruned else model
    weights = {name: kv_cache.random_weights(model, 0) for name, model in models.items()}
    rows = []
    for batch in batches:
        programs = {
            name: _writer(model, weights[name], batch, narrow.max_len - TOKENS)
            for name, model in models.items()
        }
        seconds = paired.paired_seconds(programs, rounds, enough=0.1)
        for name, model in models.items():
            ratio = paired.paired_ratio(seconds[name], seconds["narrow"], "over_narrow")
            spec = dict(model.linears).get("mlp_in", LinearSpec())
            flops = cost.flops_per_token(model, model.max_len, training=False).total
            rows.append(
                {
                    "arm": name,
                    "batch": batch,
                    "d_model": model.d_model,
                    "density": spec.density,
                    "block": spec.block if spec.density < 1 else None,
                    "flops_a_token": flops,
                    "bytes_a_token": decoding_bytes(model, batch, model.max_len) / batch,
                    "token_ms": 1e3 * float(np.median(seconds[name])) / TOKENS / batch,
                    **ratio,
                }
            )
    return rows


def read(folder: Path) -> Sequence[Mapping]:
    """Returns the rows of `measure` that a folder has; none without a measurement.

    Raises:
      UserError: the file is damaged.
    """
    path = folder / "decoding.json"
    try:
        rows = json_files.load(path)["rows"]
        if all(row["arm"] in arms.ARMS and row["batch"] and row["over_narrow"] for row in rows):
            return rows
    except FileNotFoundError:
        return []
    except json_files.MALFORMED as error:
        raise UserError(f"{path} is damaged ({error}); remove it.") from None
    raise UserError(f"{path} has other rows; remove it.")


def _scaled(model, scale):
    return dataclasses.replace(
        model,
        d_model=scale * model.d_model,
        d_ff=scale * model.d_ff,
        head_dim=scale * model.head_dim,
        vocab_size=scale * model.vocab_size,
        max_len=scale * model.max_len,
    )


def _legal(model, arm, density, block):
    """Returns the model with stored blocks, at the nearest density that has a balanced layout."""
    sides = [side // block for name in arm.pruned for side in model.projection_shape(name)]
    ring = math.gcd(*sides)
    pattern = "shuffle" if model.experts else "random"  # Experts need equal groups.
    for count in sorted(range(1, ring), key=lambda n: abs(n / ring - density)):
        spec = LinearSpec("block_sparse", pattern, density=count / ring, block=block)
        try:
            chosen = model.with_linears(spec, arm.pruned)
            model_layouts.check_layouts(chosen)
        except UserError:
            continue
        return chosen
    raise UserError(f"Width {model.d_model} has no layout of blocks of {block}.")


def _writer(model, weights, batch, cached):
    """Returns a function that writes TOKENS tokens of each text after a cache of zeros."""
    shape = (batch, model.kv_heads, cached + 1, model.head_width)
    state = [
        tuple(
            kv_cache.LayerCache(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(model.num_layers)
        )
    ]
    last, positions = np.zeros(batch, np.int32), np.full(batch, cached, np.int32)
    decode = jax.jit(functools.partial(kv_cache.decode_token, model), donate_argnums=1)

    def run():
        for _ in range(TOKENS):
            logits, state[0] = decode(weights, state[0], last, positions)
        return logits

    return run
