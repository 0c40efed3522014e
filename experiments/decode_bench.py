"""Tokens a second while a model writes, dense and sparse, paired in one run.

At batch 1 a token is bound by the bytes that it reads: every weight once, the tied vocabulary
dense in both models. Both models have random weights, both write in turn from a cache of
--cached tokens, and the ratio of each round (median and quartiles) stands beside the byte ceiling,
the bytes that a dense token reads over those of a sparse one.

    python -m experiments.decode_bench
    python -m experiments.decode_bench --scale=350m --batch=4
"""

from experiments import flags
from experiments.command_line import AT_LEAST_ONE, AT_LEAST_ZERO, Flag, Group
from experiments.step_bench import BENCHMARK

DECODING = Group(
    "Decoding",
    "what is written",
    (
        Flag("batch", "integer", 1, "Texts written at once.", legal=AT_LEAST_ONE),
        Flag("cached", "integer", 128, "Tokens that each new one sees.", legal=AT_LEAST_ONE),
        Flag("tokens", "integer", 4, "Tokens written in a timed round.", legal=AT_LEAST_ONE),
        Flag(
            "layers",
            "integer",
            0,
            "Depth; 0 is the scale's own.",
            legal=AT_LEAST_ZERO,
        ),
        Flag(
            "seed",
            "integer",
            0,
            "Draws the weights and patterns.",
            legal=AT_LEAST_ZERO,
        ),
    ),
)
MODEL = flags.without("sequence", "parametrization", "remat", groups=(flags.MODEL,))
GROUPS = (*MODEL, flags.SPARSITY, DECODING, BENCHMARK)


def main(values):
    """Runs the benchmark; see the module docstring."""
    import dataclasses

    import jax
    import numpy as np
    from sparse_dataflow.config.presets import SIZES

    from experiments import measurement, recipes
    from sparse_dataflow.hardware import detect as hardware
    from sparse_dataflow.planning import cost

    scale = "1.3b" if values.scale == "auto" else values.scale
    chip = hardware.detect(["float32"])
    size = SIZES[scale]
    automatic = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    dense = dataclasses.replace(
        size,
        num_layers=values.layers or size.num_layers,
        positions=values.positions,
        norm=values.norm,
        compute_dtype=automatic if values.dtype == "auto" else values.dtype,
        seed=values.seed,
    )
    models = {"dense": dense, "sparse": recipes.sparse_config(values, dense)}
    read = {n: cost.decoding_bytes(m, values.batch, values.cached) for n, m in models.items()}
    runs, compile_seconds = {}, {}
    for name, model in models.items():
        runs[name], compile_seconds[name] = _writing(model, values)
    seconds = measurement.paired_seconds(runs, values.rounds)
    ceiling = read["dense"] / read["sparse"]
    rows = {}
    for name in models:
        token = float(np.median(seconds[name])) / values.tokens
        rows[name] = {
            "token_ms": 1e3 * token,
            "tokens_per_second": values.batch / token,
            "read_bytes": read[name],
            "gigabytes_per_second": read[name] / token / 1e9,
            "compile_seconds": compile_seconds[name],
        }
    print(
        f"{chip.name}: scale {scale}, {dense.num_layers} layers, batch {values.batch}, "
        f"{values.cached} tokens cached, {dense.compute_dtype}, {values.pattern} at density "
        f"{values.density:g}, block {values.block}"
    )
    for name, row in rows.items():
        print(
            f"{name:>6}: {row['token_ms']:8.2f} ms a token  {row['tokens_per_second']:8.1f} "
            f"tokens/s  {row['read_bytes'] / 1e6:8.0f} MB read, "
            f"{row['gigabytes_per_second']:.1f} GB/s  compile {row['compile_seconds']:.1f} s"
        )
    result = {
        "inputs": "random weights",
        "scale": scale,
        "layers": dense.num_layers,
        "batch": values.batch,
        "cached": values.cached,
        "dtype": dense.compute_dtype,
        "density": values.density,
        "pattern": values.pattern,
        "block": values.block,
        "byte_ceiling": ceiling,
        **measurement.speedup(seconds, "byte ceiling", ceiling),
        "rows": rows,
    }
    name = f"decode_bench_{chip.name}_{scale}_batch{values.batch}"
    measurement.keep(values.keep, name, chip.name, result)


def _writing(model, values):
    """(function that writes tokens from the same cache, seconds to compile)."""
    import functools
    import time

    import jax
    import jax.numpy as jnp
    import numpy as np

    from sparse_dataflow.evaluation import kv_cache

    weights = kv_cache.random_weights(model, values.seed)
    batch, cached = values.batch, values.cached
    shape = (batch, cached + 1, model.num_heads, model.d_model // model.num_heads)
    empty = jnp.zeros(shape, model.compute_dtype)
    caches = (kv_cache.LayerCache(empty, empty),) * model.num_layers
    caches = jax.tree.map(jnp.copy, caches)
    tokens, positions = np.zeros(batch, np.int32), np.full(batch, cached, np.int32)
    read_token = jax.jit(functools.partial(kv_cache.read_token, model), donate_argnames="caches")
    start = time.perf_counter()
    compiled = read_token.lower(weights, caches, tokens, positions).compile()
    seconds = time.perf_counter() - start

    def run():
        nonlocal caches
        for _ in range(values.tokens):
            logits, caches = compiled(weights, caches, tokens, positions)
        return logits

    return run, seconds


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
