"""The whole training step, dense, sparse and a peer's, for `step_bench`."""

import functools
import time
from collections.abc import Callable, Iterable

import jax
import numpy as np

from sparse_dataflow.commands import measurement
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE, TracedExecutor
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.step import initial_state, jitted_train_step
from sparse_dataflow.planner import memory, plan_memory
from sparse_dataflow.runs.variants import variant

from . import benchmark, joules, paired, step_peers
from .step_peers import Step

LEARNING_RATE = 1e-4


def measure_steps(request: Request, options) -> None:
    """Measures, prints and writes; see `experiments.step_bench`."""
    models = benchmark.models_of(request)
    training, chip, by_name = models.training, models.chip, dict(models.by_name)
    if options.narrow:
        by_name["narrow"] = variant(models.config, "narrow").with_steps(1).model
    share = cost.flops_per_token(by_name["dense"], training.sequence).projection_share
    models.announce(
        f"scale {models.scale}, {training.batch} x {training.sequence} tokens (projections hold "
        f"{share:.1%} of the dense FLOPs)"
    )
    tokens = random_tokens(by_name["dense"], training)
    makers: dict[str, Callable[[], Step]] = {
        name: functools.partial(compiled_step, model, training, tokens)
        for name, model in by_name.items()
    }
    if options.peers:
        peer = step_peers.maker(by_name["dense"], training, tokens, LEARNING_RATE)
        makers = peer | makers  # Peers first, as jax does not give memory back.
        by_name |= {name: by_name["dense"] for name in peer}
    in_turns = fit_together([by_name[name] for name in makers], training, chip.memory_bytes)
    seconds: dict[str, np.ndarray] = {}
    rows: dict[str, dict] = {}
    for names in [list(makers)] if in_turns else [[name] for name in makers]:
        turn = {name: makers[name] for name in names}
        times, about = _timed(turn, options.rounds, models.tokens)
        seconds |= times
        rows |= about
        step_peers.release()
    for name, row in rows.items():
        median, model = float(np.median(seconds[name])), by_name[name]
        flops = cost.flops_per_token(model, training.sequence).total
        row |= {
            "remat": model.remat,
            "step_ms": 1e3 * median,
            "tokens_per_second": models.tokens / median,
            "mfu": cost.mfu(flops, models.tokens / median, chip, model.compute_dtype, devices=1),
        }
    ceiling = cost.flop_ceiling(by_name["sparse"], training.sequence)
    result = benchmark.compared(rows, _line, seconds, "FLOP ceiling", ceiling)
    if options.narrow:
        ratio = paired.paired_ratio(seconds["sparse"], seconds["narrow"])
        print(f"sparse / narrow: {paired.ratio_text(ratio)}")
        result["sparse_over_narrow"] = ratio
    facts = models.facts(
        inputs="uniform random tokens",
        layers=by_name["dense"].num_layers,
        state_dtype=training.state_dtype,
        projection_share=share,
        paired=in_turns,
        flop_ceiling=ceiling,
        peers=step_peers.compared(seconds),
    )
    name = f"step_bench_{chip.name}_{models.scale}"
    measurement.keep(options.keep, name, chip.name, [facts | result])


def _timed(makers, rounds, tokens):
    """({name: seconds of each round}, {name: facts of its step}); the states of all steps live as
    long as this call."""
    steps = {name: step_peers.attempt(name, make) for name, make in makers.items()}
    steps = {name: step for name, step in steps.items() if step}
    rows = {}
    for name, step in steps.items():
        facts = {field: value for field, value in vars(step).items() if field != "run"}
        rows[name] = {**facts, "first_loss": float(step.run().loss)}
    runs = {name: step.run for name, step in steps.items()}
    seconds = paired.paired_seconds(runs, rounds)
    for name, run in runs.items():
        rows[name] |= joules.measured(run, step=1, token=tokens)
    return seconds, rows


def _line(row):
    memory_text = f"  {row['step_bytes'] / memory.GIB:.2f} GiB" if row["step_bytes"] else ""
    return (
        f"{row['step_ms']:8.1f} ms a step  {row['tokens_per_second']:9,.0f} tokens/s  "
        f"remat {row['remat']}"
        f"{benchmark.mfu_text(row['mfu'])}{memory_text}  first loss {row['first_loss']:.4f}"
    )


def random_tokens(model: ModelConfig, training: TrainingConfig) -> np.ndarray:
    """Uniform tokens, int32 [batch, sequence + 1], drawn by `training.seed`."""
    shape = (training.batch, training.sequence + 1)
    rng = np.random.default_rng(training.seed)
    return rng.integers(model.vocab_size, size=shape, dtype=np.int32)


def fit_together(
    models: Iterable[ModelConfig], training: TrainingConfig, memory_bytes: int | None
) -> bool:
    """Whether a device of `memory_bytes` has room for the states of all models and the activations
    of one step; True where its memory is not known."""
    flash = jax.default_backend() != "cpu"
    plans = [[plan_memory.training_bytes(model, training, flash)] for model in models]
    need = plan_memory.alternating_bytes(plans)
    return memory_bytes is None or bool(need <= memory_bytes * memory.USABLE)


def compiled_step(
    model: ModelConfig,
    training: TrainingConfig,
    tokens: np.ndarray | Batch,
    executor: TracedExecutor = SINGLE_DEVICE,
) -> Step:
    """A training step on its own state.

    Args:
      model: dense or block-sparse.
      training: batch, micro-batches, clipping, decay and dtype of the state.
      tokens: int32 [batch, sequence + 1], or a batch; whole in each process of the executor.
      executor: where it runs.
    """
    state = initial_state(model, training, executor)
    rest = executor.place_layouts(state.rest, model, changing=False)
    step = jitted_train_step(model, training, executor, state.without_layouts())
    state = state._replace(rest=())
    batch = tokens if isinstance(tokens, Batch) else Batch.from_windows(tokens)
    batch = executor.put(batch, len(batch.tokens))
    start = time.perf_counter()
    compiled = step.lower(state, rest, batch, np.float32(0)).compile()
    seconds = time.perf_counter() - start

    def run():
        nonlocal state
        state, report = compiled(state, rest, batch, np.float32(LEARNING_RATE))
        return report

    parameters = cost.parameter_count(model)
    state_bytes = plan_memory.training_bytes(model, training).state
    return Step(run, seconds, paired.program_bytes(compiled), parameters, state_bytes)
