"""The programs of a training, compiled for its shapes before any clock starts."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from sparse_dataflow.config.evolution import EvolutionConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.data.batches import EvalBatches, TrainBatches
from sparse_dataflow.models import gpt
from sparse_dataflow.optim.train_state import group_norms
from sparse_dataflow.parallel.block_gradients import probed_rows
from sparse_dataflow.parallel.executor import SINGLE_DEVICE, Executor, MultiProgramExecutor
from sparse_dataflow.sparsity.evolution import METHODS, PhaseSpec
from sparse_dataflow.training.step import (
    abstract_state,
    initial_state,
    jitted_train_step,
    make_eval_step,
)
from sparse_dataflow.training.transitions import change_model, update_layouts


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """What a model is trained and judged on.

    Attributes:
      train: shuffled batches, addressed by step.
      validation: held-out windows for the periodic evaluations.
      validation_bytes: UTF-8 bytes of their targets.
      final: all held-out windows, for the evaluation after the last step.
      final_bytes: UTF-8 bytes of their targets.
      tokenizer_hash: part of a checkpoint's identity.
    """

    train: TrainBatches
    validation: EvalBatches
    validation_bytes: int
    final: EvalBatches
    final_bytes: int
    tokenizer_hash: str


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The programs of one model.

    Attributes:
      train_step: (state, tokens, learning rate) -> (state, StepReport); donates the state. With
        training.skip_spikes it takes the highest loss that counts as well.
      eval_step: (params, tables, tokens, weights) -> sum of weighted losses.
      seconds: that compiling took.
      tables: canonical numpy tables -> what both are given as the state's tables; () where they are
        specialised to them.
      gradient_norms: (params, tables, tokens of a batch) -> norms of the dense gradient's blocks,
        where the evolution reads them.
      update_seconds: of one layout update, measured.
      parameter_norms: params -> norms by parameter group.
      begin: (variant's name, training, identity of its checkpoints, step of the newest one or None,
        function that gives its state or the initial one, `drawn`) -> the state to go on with, of an
        executor that keeps states of its own.
      timeline: () -> spans of the last step, of an executor that notes them.
    """

    train_step: Callable
    eval_step: Callable
    seconds: float
    tables: Callable = lambda tables: ()
    gradient_norms: Callable | None = None
    update_seconds: float = 0.0
    parameter_norms: Callable = group_norms
    begin: Callable | None = None
    timeline: Callable | None = None


def compile_programs(
    phase_specs: Sequence[PhaseSpec],
    training: TrainingConfig,
    data: TrainingData,
    evolution: EvolutionConfig | None = None,
    known: dict | None = None,
    executor: Executor = SINGLE_DEVICE,
) -> list[Compiled]:
    """Compiles each phase's train and eval step, and makes every transition once.

    Transitions and layout updates are rehearsed on throw-away states, so that none compiles
    anything while the clock runs.

    Args:
      phase_specs: of `sparsity.evolution.phase_specs`.
      training: gives the batch's shape and the optimizer.
      data: likewise.
      evolution: static where None.
      known: programs by what they depend on, kept between calls: equal ones are compiled once.
      executor: how they are laid out.
    """
    evolution, known = evolution or EvolutionConfig(), {} if known is None else known
    method = METHODS[evolution.method]
    programs = []
    for phase in phase_specs:
        shape = dataclasses.replace(training, steps=1, learning_rate=1.0, warmup=0.0, seed=0)
        key = phase.model, phase.runtime_layouts, shape, executor
        if key not in known:
            known[key] = _compiled(phase, training, data, executor)
        programs.append(known[key])
        if method.update is not None:
            programs[-1] = _with_updates(programs[-1], phase, training, data, evolution, executor)
    for before, after in itertools.pairwise(phase_specs):
        changed(
            initial_state(before.model, training, executor), before.model, after.model, executor
        )
    return programs


def _compiled(phase, training, data, executor):
    start = time.perf_counter()
    model = phase.model
    if isinstance(executor, MultiProgramExecutor):
        made = executor.programs(model, training, data)
        return Compiled(**made, seconds=time.perf_counter() - start)
    canonical = gpt.layout_tables(gpt.layouts(model))
    tables = functools.partial(executor.tables, changing=phase.runtime_layouts)
    given = tables(canonical)
    fixed = None if given else canonical
    shapes = executor.placed_shapes(abstract_state(model, training, executor))
    shapes = shapes._replace(tables=given)
    told = executor.replicated()
    train_step = jitted_train_step(model, training, fixed, executor, shapes)
    eval_step = jax.jit(make_eval_step(model, fixed, executor), out_shardings=told)
    batch = executor.put(data.train[0], data.train.batch_size)
    held_out = executor.put(data.validation[0], data.validation.batch_size)
    windows = held_out["tokens"], held_out["weights"]
    numbers = [np.float32(0)] * (2 if training.skip_spikes else 1)
    return Compiled(
        train_step.lower(shapes, batch["tokens"], *numbers).compile(),
        eval_step.lower(shapes.params, given, *windows).compile(),
        time.perf_counter() - start,
        tables,
        parameter_norms=jax.jit(group_norms, out_shardings=told).lower(shapes.params).compile(),
    )


def _with_updates(programs, phase, training, data, evolution, executor):
    """`programs` with what updates read; an update was made twice, and timed the second time."""
    model, method = phase.model, METHODS[evolution.method]
    rows = probed_rows(training)
    if method.reads_gradients and programs.gradient_norms is None:
        norms = jax.jit(
            functools.partial(executor.block_gradient_norms, model),
            out_shardings=executor.replicated(),
        )
        programs = dataclasses.replace(
            programs,
            gradient_norms=lambda params, tables, tokens: jax.device_get(
                norms(params, tables, tokens[:rows])
            ),
        )
    state = initial_state(model, training, executor)
    batches = [executor.put(data.train[step], data.train.batch_size) for step in range(2)]
    for _ in range(2):
        # Updates meet states that a step has made.
        tables = programs.tables(state.tables)
        state, *_ = stepped(programs, state, tables, batches[0], 0.0, any_loss(training))
        jax.block_until_ready(state.params)
        start = time.perf_counter()
        state = evolved(state, model, programs, evolution, evolution.share, batches[1], executor)
        seconds = time.perf_counter() - start
    return dataclasses.replace(programs, update_seconds=seconds)


def any_loss(training: TrainingConfig) -> np.float32 | None:
    """`limit` for a step that counts whatever its loss."""
    return np.float32(np.inf) if training.skip_spikes else None


def stepped(programs: Compiled, state, tables, batch, learning_rate: float, limit=None):
    """One step.

    Args:
      programs: of the state's model.
      state: as the executor places it; gone afterwards.
      tables: `programs.tables(state.tables)`; gone afterwards.
      batch: as the executor puts it.
      learning_rate: of this step.
      limit: the highest loss that counts, where programs were compiled for one; else None.

    Returns:
      (state, tables for the next step, StepReport); the state's own tables stay as they are.
    """
    given = state._replace(tables=tables)
    numbers = [np.float32(learning_rate)] if limit is None else [np.float32(learning_rate), limit]
    after, report = programs.train_step(given, batch["tokens"], *numbers)
    return after._replace(tables=state.tables), after.tables, report


def held_out_nats(programs: Compiled, params, tables, batches: Iterable) -> float:
    """Sum of the weighted next-token losses over `batches` of "tokens" and "weights", as put."""
    return sum(
        float(programs.eval_step(params, tables, batch["tokens"], batch["weights"]))
        for batch in batches
    )


def evolved(
    state,
    model,
    programs: Compiled,
    evolution: EvolutionConfig,
    share: float,
    batch,
    executor: Executor = SINGLE_DEVICE,
):
    """`state` after one layout update that exchanges `share`; `batch` is the next step's."""
    method = METHODS[evolution.method]
    assert method.update is not None
    norms = None
    if method.reads_gradients:
        assert programs.gradient_norms is not None
        tables = programs.tables(state.tables)
        norms = programs.gradient_norms(state.params, tables, batch["tokens"])
    state = update_layouts(executor.canonical(state, model), model, method.update, share, norms)
    return executor.place(state)


def changed(state, before, after, executor: Executor = SINGLE_DEVICE):
    """`state` of the model `before` as one of `after`."""
    return executor.place(change_model(executor.canonical(state, before), before, after))
