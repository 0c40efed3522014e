"""The programs of a training, compiled for its shapes before any clock starts."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from sparse_dataflow.data.batches import EvalBatches, TrainBatches
from sparse_dataflow.models import gpt
from sparse_dataflow.sparsity.evolution import METHODS, EvolutionConfig, Stage
from sparse_dataflow.training.block_gradients import block_gradient_norms
from sparse_dataflow.training.optimizer import TrainingConfig
from sparse_dataflow.training.phases import probed_rows
from sparse_dataflow.training.step import (
    group_norms,
    initial_state,
    make_eval_step,
    make_train_step,
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
      train_step: (state, tokens, learning rate) -> (state, StepReport); donates the state.
      eval_step: (params, tables, tokens, weights) -> sum of weighted losses.
      seconds: that compiling took.
      runtime_layouts: whether both are given the state's tables, () where they are not.
      gradient_norms: (params, tables, tokens of a batch) -> norms of the dense gradient's blocks,
        where the evolution reads them.
      update_seconds: of one layout update, measured.
      parameter_norms: params -> norms by parameter group.
    """

    train_step: Callable
    eval_step: Callable
    seconds: float
    runtime_layouts: bool = False
    gradient_norms: Callable | None = None
    update_seconds: float = 0.0
    parameter_norms: Callable = group_norms


def compile_programs(
    stages: Sequence[Stage],
    training: TrainingConfig,
    data: TrainingData,
    evolution: EvolutionConfig | None = None,
    known: dict | None = None,
) -> list[Compiled]:
    """Compiles each stage's train and eval step, and makes every transition once.

    Transitions and layout updates are rehearsed on throw-away states, so that none compiles
    anything while the clock runs.

    Args:
      stages: of `sparsity.evolution.stages`.
      training: gives the batch's shape and the optimizer.
      data: likewise.
      evolution: static where None.
      known: programs by what they depend on, kept between calls: equal ones are compiled once.
    """
    evolution, known = evolution or EvolutionConfig(), {} if known is None else known
    method = METHODS[evolution.method]
    programs = []
    for stage in stages:
        shape = dataclasses.replace(training, steps=1, learning_rate=1.0, warmup=0.0, seed=0)
        key = stage.model, stage.runtime_layouts, shape
        if key not in known:
            known[key] = _compiled(stage, training, data)
        programs.append(known[key])
        if method.update is not None:
            programs[-1] = _with_updates(programs[-1], stage, training, data, evolution)
    for before, after in itertools.pairwise(stages):
        change_model(initial_state(before.model, training), before.model, after.model)
    return programs


def _compiled(stage, training, data):
    start = time.perf_counter()
    model = stage.model
    tables = gpt.layout_tables(gpt.layouts(model))
    fixed = None if stage.runtime_layouts else tables
    shapes = jax.eval_shape(lambda: initial_state(model, training))
    shapes = shapes._replace(tables=tables if stage.runtime_layouts else ())
    train_step = jax.jit(make_train_step(model, training, fixed), donate_argnums=0)
    eval_step = jax.jit(make_eval_step(model, fixed))
    tokens, held_out = data.train[0]["tokens"], data.validation[0]
    weights = held_out["weights"]
    return Compiled(
        train_step.lower(shapes, tokens, np.float32(0)).compile(),
        eval_step.lower(shapes.params, shapes.tables, held_out["tokens"], weights).compile(),
        time.perf_counter() - start,
        stage.runtime_layouts,
        parameter_norms=jax.jit(group_norms).lower(shapes.params).compile(),
    )


def _with_updates(programs, stage, training, data, evolution):
    """`programs` with what updates read; an update was made twice, and timed the second time."""
    model, method = stage.model, METHODS[evolution.method]
    rows = probed_rows(training)
    norms = jax.jit(functools.partial(block_gradient_norms, model))
    if method.reads_gradients:
        programs = dataclasses.replace(
            programs,
            gradient_norms=lambda params, tables, tokens: jax.device_get(
                norms(params, tables, tokens[:rows])
            ),
        )
    state = initial_state(model, training)
    for _ in range(2):
        # Updates meet states that a step has made.
        state, _ = programs.train_step(state, data.train[0]["tokens"], np.float32(0))
        jax.block_until_ready(state.params)
        start = time.perf_counter()
        state = evolved(state, stage.model, programs, evolution, evolution.share, data.train[1])
        seconds = time.perf_counter() - start
    return dataclasses.replace(programs, update_seconds=seconds)


def evolved(state, model, programs: Compiled, evolution: EvolutionConfig, share: float, batch):
    """`state` after one layout update that exchanges `share`; `batch` is the next step's."""
    method = METHODS[evolution.method]
    norms = None
    if method.reads_gradients:
        norms = programs.gradient_norms(state.params, state.tables, batch["tokens"])
    return update_layouts(state, model, method.update, share, norms)
