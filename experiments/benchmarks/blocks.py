"""One transformer block, dense and sparse, forward and backward, for `block_bench`."""

import dataclasses
import functools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sparse_dataflow.commands import measurement
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.projection import layer_weights
from sparse_dataflow.core.ops.attention.attention_op import self_attention
from sparse_dataflow.core.training import cost
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.variants import variant

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


def measure_attention(request: Request, options: BenchOptions) -> None:
    """Measures attention to all tokens and to blocks, forward and backward, in turns.

    Raises:
      UserError: the command line names no blocks.
    """
    config, chip = benchmark.config_here(request, sparse=False)
    dense = variant(config, "dense")
    model, training = dense.model, dense.training
    if model.blocks is None:
        raise UserError("--attention needs --set model.attention_blocks=...; see `--help=all`.")
    models = {"dense": dataclasses.replace(model, attention_blocks=""), "sparse": model}
    batch, tokens = training.batch, training.sequence
    print(
        f"{chip.name}: attention, {batch} x {tokens} tokens, {model.attention_blocks}", flush=True
    )
    heads = model.num_heads, model.kv_heads, model.kv_heads
    keys = jax.random.split(jax.random.key(0), 3)
    operands = [
        jax.random.normal(key, (batch, tokens, count, model.head_width), model.compute_dtype)
        for key, count in zip(keys, heads)
    ]
    programs = {name: _attention(each, operands) for name, each in models.items()}
    rows: dict[str, dict] = {}
    seconds, medians = benchmark.timed(programs, options.rounds, ENOUGH_SECONDS)
    for name, each in models.items():
        flops = cost.flops_per_token(each, tokens).attention / each.num_layers
        rate = flops * batch * tokens / medians[name] / 1e12
        compiling = programs[name].compile_seconds
        rows[name] = {"block_ms": 1e3 * medians[name], "tflops": rate, "mfu": None}
        rows[name] |= {"flops_per_token": flops, "compile_seconds": compiling}
    ceiling = rows["dense"]["flops_per_token"] / rows["sparse"]["flops_per_token"]
    result = benchmark.compared(rows, _line, seconds, "ratio of FLOPs", ceiling)
    facts = {"scale": config.run.scale, "dtype": model.compute_dtype, "batch": batch}
    facts |= {"sequence": tokens, "heads": heads, "head_width": model.head_width}
    facts |= {"attention_blocks": model.attention_blocks, "flop_ratio": ceiling}
    name = f"attention_bench_{chip.name}_{tokens}"
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
    return _compiled(gradients, draw(keys[0]), layouts, x, dy)


def _attention(model: ModelConfig, operands: Sequence[jax.Array]) -> Program:
    """Forward and backward pass of the attention of a layer, compiled."""
    attend = functools.partial(self_attention, blocks=model.blocks, cap=model.attention_cap)

    @jax.jit
    def gradients(*operands):
        y, pullback = jax.vjp(attend, *operands)
        return y, pullback(y)

    return _compiled(gradients, *operands)


def _compiled(function, *arguments):
    start = time.perf_counter()
    program = function.lower(*arguments).compile()
    return Program(lambda: program(*arguments), time.perf_counter() - start)
