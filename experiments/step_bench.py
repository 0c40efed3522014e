"""The whole training step, dense and sparse, paired in one run.

Both steps run in turn on the same random tokens: forward, backward, clipping and AdamW at the
scale's own batch; one after the other where the device has no room for both states. Prints step
time, tokens/s, MFU, memory, the ratio of each round (median and quartiles) and the FLOP ceiling of
the scale, and keeps them as JSON. With --peers the same dense step in torch (torch.compile, fused
attention), from the same parameters, takes its turn where torch is installed; on a GPU jax must
leave it memory.

    python -m experiments.step_bench
    python -m experiments.step_bench --scale=micro --density=0.25
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.98 python -m experiments.step_bench --scale=13b --block=128 \\
        --batch=1 --remat=full --state_dtype=bfloat16      # an H200, which the dense one fills
    XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_MEM_FRACTION=0.98 \\
        python -m experiments.step_bench --scale=13b --block=128 --batch=1 --remat=full \\
        --state_dtype=bfloat16 --peers                     # the same, torch's step first
"""

from collections.abc import Callable
from typing import Any

from experiments import flags
from experiments.command_line import AT_LEAST_ONE, Flag, Group

BENCHMARK = Group(
    "Benchmark",
    "how it is timed",
    (
        Flag("rounds", "integer", 11, "Timed rounds.", legal=AT_LEAST_ONE),
        Flag("keep", "text", "experiments/results", "Folder for the JSON; empty keeps none."),
    ),
)
PEERS = Group(
    "Peers",
    "what else is timed",
    (Flag("peers", "switch", "no", "The dense step in torch."),),
)
GROUPS = (
    *flags.without(
        "minutes", "steps", "twin", groups=(flags.MODEL, flags.SPARSITY, flags.TRAINING)
    ),
    BENCHMARK,
    PEERS,
)
LEARNING_RATE = 1e-4


def asked_models(values):
    """(scale, dense model, sparse model, how they are trained, chip) that the flags describe."""
    import types

    import jax

    from experiments import recipes
    from sparse_dataflow.config.presets import SIZES
    from sparse_dataflow.hardware import detect as hardware

    asked = {flag.name: values[flag.name].value for group in GROUPS for flag in group.flags}
    settings = types.SimpleNamespace(**asked, twin="yes", steps=1)
    chip = hardware.detect(["float32" if values.dtype == "auto" else values.dtype])
    recipes.settle(settings, jax.default_backend(), chip.memory_bytes, sparse=True)
    dense, sparse = recipes.variants(
        settings, ["dense", "sparse"], SIZES[settings.scale].vocab_size
    )
    return settings.scale, dense.model, sparse.model, dense.training, chip


def main(values):
    """Runs the benchmark; see the module docstring."""
    from sparse_dataflow.hardware.host_memory import keep_freed_memory

    keep_freed_memory()
    import functools

    import numpy as np

    from experiments import measurement, step_peers
    from sparse_dataflow.planning import cost, memory

    scale, dense, sparse, training, chip = asked_models(values)
    models = {"dense": dense, "sparse": sparse}
    rng = np.random.default_rng(values.seed)
    shape = (training.batch, training.sequence + 1)
    tokens = rng.integers(dense.vocab_size, size=shape, dtype=np.int32)
    makers: dict[str, Callable[[], Any]] = {
        name: functools.partial(compiled_step, model, training, tokens)
        for name, model in models.items()
    }
    if values.peers == "yes":
        peer = step_peers.maker(dense, training, tokens, LEARNING_RATE)
        # First, as jax does not give memory back.
        makers = peer | makers
        models |= {name: dense for name in peer}
    planned = [models[name] for name in makers]
    paired = fit_together(planned, training, chip.memory_bytes)
    seconds: dict[str, np.ndarray] = {}
    steps: dict[str, tuple] = {}
    first_losses: dict[str, float] = {}
    for group in [list(makers)] if paired else [[name] for name in makers]:
        made = {name: step for name in group if (step := step_peers.made(name, makers[name]))}
        first_losses |= {name: float(run().loss) for name, (run, *_) in made.items()}
        runs = {name: run for name, (run, *_) in made.items()}
        seconds |= measurement.paired_seconds(runs, values.rounds)
        steps |= {name: step[1:] for name, step in made.items()}
        del runs, made
        step_peers.release()
    ceiling = cost.flop_ceiling(sparse, training.sequence)
    share = cost.flops_per_token(dense, training.sequence).projection_share
    rows = {}
    for name, (compile_seconds, step_bytes, *own) in steps.items():
        model = models[name]
        step = float(np.median(seconds[name]))
        speed = training.batch * training.sequence / step
        flops = cost.flops_per_token(model, training.sequence).total
        planned_state = memory.of_training(model, training).state
        parameters, state_bytes = own or (memory.parameter_count(model), planned_state)
        rows[name] = {
            "step_ms": 1e3 * step,
            "tokens_per_second": speed,
            "mfu": cost.mfu(flops, speed, chip, model.compute_dtype),
            "stored_parameters": parameters,
            "state_bytes": state_bytes,
            "step_bytes": step_bytes,
            "compile_seconds": compile_seconds,
            "first_loss": first_losses[name],
        }
    print(
        f"{chip.name}: scale {scale}, {training.batch} x {training.sequence} tokens, "
        f"{dense.compute_dtype}, {values.pattern} at density {values.density:g}, block "
        f"{values.block}; projections hold {share:.1%} of the dense FLOPs"
    )
    width = max(map(len, rows))
    for name, row in rows.items():
        used = "" if row["mfu"] is None else f"  MFU {row['mfu']:.1%}"
        held = f"  {row['step_bytes'] / memory.GIB:.2f} GiB" if row["step_bytes"] else ""
        print(
            f"{name:>{width}}: {row['step_ms']:8.1f} ms a step  {row['tokens_per_second']:9,.0f} "
            f"tokens/s{used}{held}  compile {row['compile_seconds']:.1f} s  first loss "
            f"{row['first_loss']:.4f}"
        )
    result = {
        "inputs": "uniform random tokens",
        "paired": paired,
        "state_dtype": training.state_dtype,
        "scale": scale,
        "batch": training.batch,
        "sequence": training.sequence,
        "density": values.density,
        "pattern": values.pattern,
        "block": values.block,
        "projection_share": share,
        "flop_ceiling": ceiling,
        **measurement.speedup(seconds, "FLOP ceiling", ceiling),
        "peers": step_peers.compared(seconds),
        "rows": rows,
    }
    measurement.keep(values.keep, f"step_bench_{chip.name}_{scale}", chip.name, result)


def fit_together(models, training, memory_bytes) -> bool:
    """Whether a device has room for the states of all models and one's step; True where its memory,
    in bytes, is not known."""
    import jax

    from sparse_dataflow.planning import memory

    flash = jax.default_backend() != "cpu"
    plans = [memory.of_training(model, training, flash) for model in models]
    return memory_bytes is None or memory.by_turns(plans) <= memory_bytes * memory.USABLE


def compiled_step(model, training, tokens, executor=None):
    """(function that makes one step on its own state and returns its report, seconds to compile,
    `measurement.program_bytes`).

    Args:
      model: a ModelConfig.
      training: a TrainingConfig.
      tokens: int32 [batch, sequence + 1]; all of it in each process of the executor's.
      executor: where it runs; None for one device.
    """
    import time

    import numpy as np

    from experiments import measurement
    from sparse_dataflow.parallel.executor import SINGLE_DEVICE
    from sparse_dataflow.training.step import initial_state, jitted_train_step

    executor = executor or SINGLE_DEVICE
    state = initial_state(model, training, executor)
    given = executor.tables(state.tables, changing=False)
    fixed = None if given else state.tables
    state = state._replace(tables=given)
    step = jitted_train_step(model, training, fixed, executor, state)
    tokens = executor.put({"tokens": tokens}, len(tokens))["tokens"]
    start = time.perf_counter()
    compiled = step.lower(state, tokens, np.float32(0)).compile()
    seconds = time.perf_counter() - start

    def run():
        nonlocal state
        state, report = compiled(state, tokens, np.float32(LEARNING_RATE))
        return report

    return run, seconds, measurement.program_bytes(compiled)


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
