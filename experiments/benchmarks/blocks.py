"""One transformer block, dense and sparse, forward and backward, for `block_bench`."""

import dataclasses
import time

import jax
import jax.numpy as jnp

from sparse_dataflow.commands import measurement
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.projection import layer_weights
from sparse_dataflow.core.training import cost

from . import benchmark
from .benchmark import ENOUGH_SECONDS, Program
from .options import BenchOptions


def measure_blocks(request: Request, options: BenchOptions) -> None:
    """Measures, prints and writes; see `experiments.block_bench`."""
    models = benchmark.models_of(request)
    training, chip = models.training, models.chip
    models.announce(f"a block of {models.scale}, {training.batch} x {training.sequence} tokens")
    programs = {name: _program(model, training) for name, model in models.by_name.items()}
    seconds, medians = benchmark.timed(programs, options.rounds, ENOUGH_SECONDS)
    rows: dict[str, dict] = {}
    for name, model in models.by_name.items():
        flops = cost.flops_per_token(model, training.sequence)
        block_flops = (flops.total - flops.head) / model.num_layers
        speed = models.tokens / medians[name]
        rows[name] = {
            "block_ms": 1e3 * medians[name],
            "tflops": block_flops * speed / 1e12,
            "mfu": cost.mfu(block_flops, speed, chip, model.compute_dtype, devices=1),
            "flops_per_token": block_flops,
            "compile_seconds": programs[name].compile_seconds,
        }
    ceiling = rows["dense"]["flops_per_token"] / rows["sparse"]["flops_per_token"]
    result = benchmark.compared(rows, _line, seconds, "ratio of FLOPs", ceiling)
    facts = models.facts(inputs="normal, unit variance", flop_ratio=ceiling)
    name = f"block_bench_{chip.name}_{models.scale}"
    measurement.keep(options.keep, name, chip.name, [facts | result])


def _line(row):
    return (
        f"{row['block_ms']:8.2f} ms  {row['tflops']:8.3f} TFLOP/s{benchmark.mfu_text(row['mfu'])}"
    )


def _program(model: ModelConfig, training: TrainingConfig) -> Program:
    """Forward and backward pass of the first block, compiled."""
    shallow = dataclasses.replace(model, num_layers=1)
    dtype = jnp.dtype(model.compute_dtype)
    # As in training: index tables are data, the groups of a layout are structure.
    stacked = stacks.with_groups(stacks.stored_layouts(shallow))
    layouts = jax.tree.map(lambda t: jnp.asarray(t[0]), stacked["blocks"] if stacked else {})

    @jax.jit
    def draw(key):
        params = gpt.init(shallow, key)["blocks"]
        return jax.tree.map(lambda leaf: leaf[0].astype(dtype), params)

    @jax.jit
    def gradients(params, layouts, x, dy):
        def block(params, x):
            return gpt.block(shallow, layer_weights(shallow, merged(params, layouts)), x)[0]

        y, pullback = jax.vjp(block, params, x)
        return y, pullback(dy)

    shape = (training.batch, training.sequence, model.d_model)
    keys = jax.random.split(jax.random.key(training.seed), 3)
    x, dy = (jax.random.normal(key, shape, dtype) for key in keys[1:])
    arguments = draw(keys[0]), layouts, x, dy
    start = time.perf_counter()
    program = gradients.lower(*arguments).compile()
    return Program(lambda: program(*arguments), time.perf_counter() - start)
