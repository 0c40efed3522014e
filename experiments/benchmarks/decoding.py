"""Tokens that a model writes from a cache, for `decode_bench`."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.commands import measurement
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.model.projection import with_threshold
from sparse_dataflow.core.ops import dispatch, platforms
from sparse_dataflow.evaluation import activation_sparsity, kv_cache
from sparse_dataflow.evaluation.sampling import Sampler, Sampling
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.planner.decoding import decoding_bytes
from sparse_dataflow.runs.variants import variant

from . import benchmark, joules, paired, torch_decoding
from .benchmark import Program

TORCH = "torch"
"""Name of the row of a dense model in torch."""


def measure_decoding(request: Request, options) -> None:
    """Measures, prints and writes; see `experiments.decode_bench`."""
    models = benchmark.models_of(request)
    batch, seed, chip = models.training.batch, models.training.seed, models.chip
    layers, cached = models.config.model.num_layers, options.cached
    share = options.activation_sparsity
    peers = {}
    if options.torch:
        peers[TORCH] = _torch(options.torch, models.by_name["dense"], batch, cached, options)
    models.announce(f"scale {models.scale}, {layers} layers, batch {batch}, {cached} tokens cached")
    cases: dict[str, tuple[ModelConfig, kv_cache.Weights, float]] = {}
    by_name = dict(models.by_name)
    if options.narrow:
        by_name["narrow"] = variant(models.config, "narrow").with_steps(1).model
    for name, model in by_name.items():
        weights = kv_cache.random_weights(model, seed)
        cases[name] = model, weights, 0.0
        if share:
            with_zeros = _with_zeros(model, weights, batch, cached, share)
            cases[_zeros(name, share)] = model, with_zeros, share
    programs = {
        name: _program(model, weights, batch, cached, options.tokens)
        for name, (model, weights, _) in cases.items()
    }
    programs |= peers
    counted = {name: _Counted(program) for name, program in programs.items()}
    timed = {n: dataclasses.replace(programs[n], run=each.run) for n, each in counted.items()}
    seconds, medians = benchmark.timed(timed, options.rounds)
    rows: dict[str, dict] = {}
    for name, (model, _, zeros) in cases.items():
        token = medians[name] / options.tokens
        on_cpu = dispatch.on(platforms.HOST)
        skipped = zeros if on_cpu else 0
        read = decoding_bytes(model, batch, cached, skipped, rows=on_cpu)
        rows[name] = {
            "token_ms": 1e3 * token,
            "cpu_ms": 1e3 * float(np.median(counted[name].seconds)) / options.tokens,
            "tokens_per_second": batch / token,
            "read_bytes": read,
            "gigabytes_per_second": read / token / 1e9,
            "compile_seconds": programs[name].compile_seconds,
        }
    if options.torch:
        token = medians[TORCH] / options.tokens
        rows[TORCH] = rows["dense"] | {
            "token_ms": 1e3 * token,
            "cpu_ms": 1e3 * float(np.median(counted[TORCH].seconds)) / options.tokens,
            "tokens_per_second": batch / token,
            "gigabytes_per_second": rows["dense"]["read_bytes"] / token / 1e9,
            "compile_seconds": 0.0,
        }
    for name, row in rows.items():
        row |= joules.measured(programs[name].run, token=options.tokens * batch)
    ceiling = rows["dense"]["read_bytes"] / rows["sparse"]["read_bytes"]
    result = benchmark.compared(rows, _line, seconds, "byte ceiling", ceiling)
    if options.narrow:
        result["sparse_over_narrow"] = paired.paired_ratio(seconds["sparse"], seconds["narrow"])
        print(f"sparse / narrow: {paired.ratio_text(result['sparse_over_narrow'])}")
    facts = models.facts(
        inputs="random weights", layers=layers, cached=cached, byte_ceiling=ceiling
    )
    name = f"decode_bench_{chip.name}_{models.scale}_batch{batch}"
    sparsity = models.config.sparsity
    if isinstance(sparsity.block, str):
        facts["block"] = sparsity.block
        name += f"_{facts['block']}_{facts['dtype']}"
    if options.torch:
        result[TORCH] = paired.paired_ratio(seconds[TORCH], seconds["sparse"])
        print(f"{TORCH} / sparse: {paired.ratio_text(result[TORCH])}")
    if share:
        facts["activation_sparsity"] = share
        result["over_dense"] = _over_dense(rows, seconds, share)
        name += f"_zeros{100 * share:g}"
    measurement.keep(options.keep, name, chip.name, [facts | result])


def _torch(python, model, batch, cached, options):
    """Returns the program of a dense model in torch.

    Raises:
      UserError: torch has no such model here.
    """
    if model.family_fields() or model.positions != "learned" or model.sparse_projections:
        raise UserError("--torch has a dense GPT-3 alone; leave it or the family's settings out.")
    shape = {
        "layers": model.num_layers,
        "width": model.d_model,
        "heads": model.num_heads,
        "hidden": model.d_ff,
        "vocabulary": model.vocab_size,
        "activation": model.activation,
        "dtype": model.compute_dtype,
        "batch": batch,
        "cached": cached,
        "tokens": options.tokens,
    }
    try:
        return Program(torch_decoding.start(python, shape), 0.0)
    except ValueError as error:
        raise UserError(f"--torch={error}; legal: a Python with torch.") from None


class _Counted:
    """A program whose seconds of a core are counted, of all threads together.

    On a busy machine they change less than the time that passes.
    """

    def __init__(self, program: Program):
        self.program, self.seconds = program, list[float]()

    def run(self) -> Any:
        start = time.process_time()
        result = jax.block_until_ready(self.program.run())
        elsewhere = result if isinstance(result, float) else 0.0
        self.seconds.append(elsewhere or time.process_time() - start)
        return result


def _zeros(name, share):
    return f"{name}, {share:.0%} zeros"


def _over_dense(rows, seconds, share):
    """Prints and returns the ratio of dense time to that of each model with zeros."""
    ratios = {}
    for model in ("dense", "sparse"):
        name = _zeros(model, share)
        ratio = paired.paired_ratio(seconds["dense"], seconds[name])
        ceiling = rows["dense"]["read_bytes"] / rows[name]["read_bytes"]
        print(f"dense / {name}: {paired.ratio_text(ratio)}; byte ceiling {ceiling:.2f}x")
        ratios[model] = {**ratio, "byte_ceiling": ceiling}
    return ratios


def _line(row):
    return (
        f"{row['token_ms']:8.2f} ms a token ({row['cpu_ms']:.2f} of a core)  "
        f"{row['tokens_per_second']:8.1f} tokens/s  "
        f"{row['read_bytes'] / 1e6:8.0f} MB read, {row['gigabytes_per_second']:.1f} GB/s"
    )


def _with_zeros(
    model: ModelConfig, weights: kv_cache.Weights, batch: int, cached: int, share: float
) -> kv_cache.Weights:
    """Returns weights with the thresholds of the token that `_program` writes."""
    before = min(cached, model.window - 1) if model.window else cached

    def attend(q, k, v, window, cap):
        keys, values = (jnp.pad(a, [(0, 0), (before, 0), (0, 0), (0, 0)]) for a in (k, v))
        return jax.nn.dot_product_attention(q, keys, values, implementation="xla")

    levels = activation_sparsity.input_levels(
        model,
        weights.embed,
        weights.layers,
        np.zeros((batch, 1), np.int32),
        share,
        attend=attend,
        positions=np.full((batch, 1), cached, np.int32),
    )
    layers = (
        {
            **layer,
            **{name: with_threshold(layer[name], level) for name, level in layer_levels.items()},
        }
        for layer, layer_levels in zip(weights.layers, levels, strict=True)
    )
    return weights._replace(layers=tuple(layers))


def _program(
    model: ModelConfig, weights: kv_cache.Weights, batch: int, cached: int, tokens: int
) -> Program:
    start = time.perf_counter()
    compiled = lowered(model, batch, cached, tokens, weights).compile()
    seconds = time.perf_counter() - start
    return Program(running(compiled, model, weights, batch, cached, tokens), seconds)


def lowered(
    model: ModelConfig, batch: int, cached: int, tokens: int, weights: Any = None
) -> jax.stages.Lowered:
    """Returns the program of `running`.

    Args:
      weights: arrays; None for the shapes of random ones.
    """
    if weights is None:
        draw = functools.partial(kv_cache.random_weights, model, 0)
        # A CPU reads rows, and only arrays become rows.
        weights = draw() if dispatch.on(platforms.ROW_KERNEL) else jax.eval_shape(draw)
    caches = jax.eval_shape(lambda: _caches(model, batch, cached + tokens))
    arguments = caches, *_start(batch, cached), np.int32(0), np.int32(1)
    return kv_cache.decode_tokens.lower(model, weights, *arguments, most=kv_cache.most_tokens())


def running(
    compiled: jax.stages.Compiled,
    model: ModelConfig,
    weights: kv_cache.Weights,
    batch: int,
    cached: int,
    tokens: int,
) -> Callable[[], Any]:
    """Returns a function that writes `tokens` tokens of each text as generation does, always after
    `cached` zeros."""
    caches = jax.tree.map(jnp.copy, _caches(model, batch, cached + tokens))
    last, positions, sampler = _start(batch, cached)
    most = kv_cache.most_tokens()

    def run():
        nonlocal caches
        for step in range(0, tokens, most):
            count = min(most, tokens - step)
            written, caches = compiled(
                weights,
                caches,
                last,
                positions + np.int32(step),
                sampler,
                np.int32(step),
                np.int32(count),
            )
        return written

    return run


def _start(batch, cached):
    """Returns (last tokens, positions, sampler) of the first written token."""
    last, positions = np.zeros(batch, np.int32), np.full(batch, cached, np.int32)
    return last, positions, Sampler.of(Sampling(), batch)


def _caches(model, batch, length):
    empty = jnp.zeros((batch, model.kv_heads, length, model.head_width), model.compute_dtype)
    return (kv_cache.LayerCache(empty, empty),) * model.num_layers
