"""The initial training state and the pure functions that train and evaluate it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.executors.executor import (
    SINGLE_DEVICE,
    Executor,
    MultiProgramExecutor,
    TracedExecutor,
    abstract,
)
from sparse_dataflow.core.executors.whole import Accumulation
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.partition import legal, trained_and_rest, without_left_out
from sparse_dataflow.core.optim.optimizers import (
    TrainState,
    at_step,
    group_squares,
    make_optimizer,
    with_steps_left,
)
from sparse_dataflow.core.step_metrics import Norm, StepReport

if TYPE_CHECKING:
    from sparse_dataflow.core.config.training import TrainingConfig


def initial_state(
    model: ModelConfig, training: "TrainingConfig", executor: Executor = SINGLE_DEVICE
) -> TrainState:
    """Returns parameters drawn from the training seed, zero moments and the model's layouts.

    The values are the same on every executor; the executor places them.
    """
    if isinstance(executor, MultiProgramExecutor):
        return executor.initial_state(model, training)
    # The number of steps does not change the draw; without it, `_draw` is cached across runs.
    state = _draw(model, dataclasses.replace(training, steps=1), executor)()
    moments = with_steps_left(training, state.moments)
    return executor.place(state._replace(moments=moments).with_layouts(model), model)


def abstract_state(
    model: ModelConfig, training: "TrainingConfig", executor: Executor = SINGLE_DEVICE
) -> TrainState:
    """Returns shapes, dtypes and shardings of `initial_state`, without layouts."""
    if isinstance(executor, MultiProgramExecutor):
        return executor.abstract_state(model, training)
    shapes = jax.eval_shape(_draw(model, dataclasses.replace(training, steps=1), executor))
    shardings = executor.shardings(shapes, model)
    if shardings is None:
        return shapes
    return jax.tree.map(abstract, shapes, shardings)


@functools.cache
def _draw(model, training, executor):
    optimizer = make_optimizer(model, training)

    def draw():
        init_key, key = jax.random.split(jax.random.key(training.seed))
        params = gpt.init(model, init_key)
        params, rest = trained_and_rest(model, params, training.frozen_scale)
        step, moments = jnp.zeros((), jnp.int32), optimizer.init(params)
        return TrainState(step, params, moments, key, rest)

    shardings = executor.shardings(jax.eval_shape(draw), model)
    # Array by array, models share the programs of equal shapes; the bits are the same.
    return draw if shardings is None else jax.jit(draw, out_shardings=shardings)


def make_train_step(
    model: ModelConfig, training: "TrainingConfig", executor: TracedExecutor = SINGLE_DEVICE
) -> Callable:
    """Returns (state, batch, learning rate) -> (state, StepReport).

    Weights of the targets multiply their losses and add up to 1. With `training.skip_spikes` the
    step takes a fourth argument, float32 [], the highest accepted loss: if the loss is higher, or a
    gradient is not finite, parameters and moments do not change.  With `training.teacher` the batch
    has what `training.teacher.Teacher` adds.

    The step is specialised to a state's fixed layouts; others may change between steps.

    Args:
      training: micro-batches and optimizer settings.
      executor: computes loss and gradients.
    """
    optimizer = make_optimizer(model, training, getattr(executor, "mesh", None))
    how = Accumulation(training.micro_batches, training.state_dtype)

    def train_step(
        state: TrainState,
        batch: Batch,
        learning_rate: jax.Array,
        *limit: jax.Array,
    ):
        if training.teacher and batch.teacher is None:
            raise TypeError("a step with `training.teacher` takes a batch with `teacher`")
        rest = without_left_out(state.rest)
        with jax.named_scope("loss_and_gradients"):
            metrics, gradients = executor.loss_and_gradients(model, state.params, rest, batch, how)
            # The optimizer computes in the masters' float32, whatever dtype gradients were summed
            # in.
            gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, state.params)
        with jax.named_scope("optimizer"):
            updates, moments = optimizer.update(
                gradients,
                state.moments,
                state.params,
                learning_rate=learning_rate,
                rest=stacks.with_groups(rest),
            )
            params = optax.apply_updates(state.params, updates)
            # An optimizer knows no masks: it may move a weight where the mask has none.
            params = legal(model, params, state.rest)
        # Before clipping, which is a part of the optimizer.
        squares = group_squares(gradients)
        report = StepReport({**metrics, "gradient_norm": Norm(squares)})
        if training.skip_spikes:
            # The decision is traced: a step that is not accepted returns the old state from the
            # same program, and the host need not wait for the loss.
            finite = [jnp.isfinite(value) for value in (report.loss, *squares.values())]
            accepted = jnp.stack([report.loss <= limit[0], *finite]).all()
            params, moments = jax.tree.map(
                lambda new, old: jnp.where(accepted, new, old),
                (params, moments),
                (state.params, state.moments),
            )
        after = state._replace(params=params, moments=moments)
        return at_step(after, state.step + 1), report

    return train_step


def jitted_train_step(
    model: ModelConfig, training: "TrainingConfig", executor: TracedExecutor, shapes: TrainState
) -> jax.stages.Wrapped:
    """Returns `make_train_step` jitted, with what is not trained apart: (state without its rest,
    the rest, batch, ...) -> (state without its rest, StepReport).

    It donates the state, whose sharding stays, and not the rest.

    Args:
      model: see `make_train_step`, also for `training` and `executor`.
      shapes: shapes of the state without layouts, as placed by the executor.
    """
    step = make_train_step(model, training, executor)
    shardings = executor.shardings(shapes, model)
    if shardings is not None:
        shardings = shardings._replace(rest=()), executor.replicated()

    def train_step(state, rest, *arguments):
        after, report = step(state._replace(rest=rest), *arguments)
        return after._replace(rest=()), report

    return jax.jit(train_step, donate_argnums=0, out_shardings=shardings)


def make_eval_step(model: ModelConfig, executor: TracedExecutor = SINGLE_DEVICE) -> Callable:
    """Returns (params, the rest, batch with weights) -> metrics of `whole.evaluation`.

    Args:
      executor: computes them.
    """
    return functools.partial(executor.evaluation, model.dropless())
