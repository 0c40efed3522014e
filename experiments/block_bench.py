"""One transformer block, dense and sparse, forward and backward, paired in one run.

The block of a scale, attention included, on normal inputs of unit variance at the scale's own batch
and sequence; gradients of inputs and parameters. Parameters are in the compute dtype, index tables
are data as in training. Prints time, TFLOP/s, MFU, the ratio of each round (median and quartiles)
and what the ratio of FLOPs would allow, and keeps them as JSON.

    python -m experiments.block_bench
    python -m experiments.block_bench --scale=13b --block=128 --dtype=bfloat16 --batch=8
"""

from experiments import flags, step_bench

GROUPS = step_bench.GROUPS


def main(values):
    """Runs the benchmark; see the module docstring."""
    from sparse_dataflow.hardware.host_memory import keep_freed_memory

    keep_freed_memory()
    import numpy as np

    from experiments import measurement
    from sparse_dataflow.planning import cost

    scale, *models, training, chip = step_bench.asked_models(values)
    models = dict(zip(("dense", "sparse"), models, strict=True))
    programs = {name: _program(model, training) for name, model in models.items()}
    seconds = measurement.paired_seconds(
        {name: program.run for name, program in programs.items()}, values.rounds, 0.01
    )
    tokens, rows = training.batch * training.sequence, {}
    for name, model in models.items():
        flops = cost.flops_per_token(model, training.sequence)
        flops = (flops.total - flops.head) / model.num_layers
        median = float(np.median(seconds[name]))
        rows[name] = {
            "block_ms": 1e3 * median,
            "tflops": flops * tokens / median / 1e12,
            "mfu": cost.mfu(flops, tokens / median, chip, model.compute_dtype),
            "flops_per_token": flops,
            "compile_seconds": programs[name].compile_seconds,
        }
    ceiling = rows["dense"]["flops_per_token"] / rows["sparse"]["flops_per_token"]
    print(
        f"{chip.name}: a block of {scale}, {training.batch} x {training.sequence} tokens, "
        f"{models['dense'].compute_dtype}, {values.pattern} at density {values.density:g}, block "
        f"{values.block}"
    )
    for name, row in rows.items():
        used = "" if row["mfu"] is None else f"  MFU {row['mfu']:.1%}"
        print(
            f"{name:>6}: {row['block_ms']:8.2f} ms  {row['tflops']:8.3f} TFLOP/s{used}  "
            f"compile {row['compile_seconds']:.1f} s"
        )
    result = {
        "inputs": "normal, unit variance",
        "scale": scale,
        "batch": training.batch,
        "sequence": training.sequence,
        "dtype": models["dense"].compute_dtype,
        "density": values.density,
        "pattern": values.pattern,
        "block": values.block,
        "flop_ratio": ceiling,
        **measurement.speedup(seconds, "ratio of FLOPs", ceiling),
        "rows": rows,
    }
    measurement.keep(values.keep, f"block_bench_{chip.name}_{scale}", chip.name, result)


def _program(model, training):
    """Forward and backward pass of the first block, compiled."""
    import dataclasses
    import time

    import jax
    import jax.numpy as jnp

    from experiments.kernel_programs import Program
    from sparse_dataflow.models import gpt

    shallow = dataclasses.replace(model, num_layers=1)
    dtype = jnp.dtype(model.compute_dtype)
    tables = jax.tree.map(lambda t: jnp.asarray(t[0]), gpt.layout_tables(gpt.layouts(shallow)))

    @jax.jit
    def draw(key):
        params = gpt.init(shallow, key)["blocks"]
        return jax.tree.map(lambda leaf: leaf[0].astype(dtype), params)

    @jax.jit
    def gradients(params, tables, x, dy):
        y, pullback = jax.vjp(lambda params, x: gpt.block(shallow, params, tables, x), params, x)
        return y, pullback(dy)

    shape = (training.batch, training.sequence, model.d_model)
    keys = jax.random.split(jax.random.key(training.seed), 3)
    x, dy = (jax.random.normal(key, shape, dtype) for key in keys[1:])
    arguments = draw(keys[0]), tables, x, dy
    start = time.perf_counter()
    program = gradients.lower(*arguments).compile()
    seconds = time.perf_counter() - start
    return Program(lambda: program(*arguments), seconds)


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
