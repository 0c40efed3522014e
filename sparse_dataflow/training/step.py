"""The training state and the pure functions that advance and evaluate it."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.models import gpt
from sparse_dataflow.optim.optimizers import make_optimizer
from sparse_dataflow.optim.train_state import StepReport, TrainState, group_norms
from sparse_dataflow.parallel.executor import SINGLE_DEVICE, Executor, MultiProgramExecutor


def initial_state(
    model: ModelConfig, training: TrainingConfig, executor: Executor = SINGLE_DEVICE
) -> TrainState:
    """Parameters, zero moments and the model's own layouts, drawn from the training seed.

    The same on every executor, and as it places them.
    """
    if isinstance(executor, MultiProgramExecutor):
        return executor.initial_state(model, training)
    tables = gpt.layout_tables(gpt.layouts(model))
    # The length of the training draws nothing, and is known only after the first states are.
    state = _draw(model, dataclasses.replace(training, steps=1), executor)()
    return executor.place(state._replace(tables=tables))


def abstract_state(
    model: ModelConfig, training: TrainingConfig, executor: Executor = SINGLE_DEVICE
) -> TrainState:
    """Shapes, dtypes and shardings of `initial_state`, without tables."""
    if isinstance(executor, MultiProgramExecutor):
        return executor.abstract_state(model, training)
    shapes = jax.eval_shape(_draw(model, dataclasses.replace(training, steps=1), executor))
    shardings = executor.shardings(shapes)
    if shardings is None:
        return shapes
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


@functools.cache
def _draw(model, training, executor):
    optimizer = make_optimizer(model, training)

    @jax.jit
    def draw():
        init_key, key = jax.random.split(jax.random.key(training.seed))
        params = gpt.init(model, init_key)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), (), key)

    laid_out = executor.shardings(jax.eval_shape(draw))
    return draw if laid_out is None else jax.jit(draw, out_shardings=laid_out)


def make_train_step(
    model: ModelConfig,
    training: TrainingConfig,
    tables: dict | None = None,
    executor: Executor = SINGLE_DEVICE,
) -> Callable:
    """(state, int32 [batch, sequence + 1] tokens, learning rate) -> (state, StepReport).

    With `training.skip_spikes` a fourth argument, float32 [], bounds the loss: where it is above,
    or a gradient is not finite, parameters and moments stay as they are.

    `tables` are the layouts to specialise to; the state's own pass through untouched.  Without
    them the state's own are used, and may change from step to step.
    """
    optimizer = make_optimizer(model, training)
    fixed = tables

    def train_step(state: TrainState, tokens: jax.Array, learning_rate: jax.Array, *limit):
        tables = state.tables if fixed is None else fixed
        with jax.named_scope("loss_and_gradients"):
            loss, gradients = executor.loss_and_gradients(
                model,
                state.params,
                tables,
                tokens,
                training.micro_batches,
                training.state_dtype,
            )
            gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, state.params)
        with jax.named_scope("optimizer"):
            updates, moments = optimizer.update(gradients, state.moments, state.params)
            updates = jax.tree.map(lambda u: -learning_rate * u, updates)
            params = optax.apply_updates(state.params, updates)
        report = StepReport(loss, group_norms(gradients))
        if training.skip_spikes:
            (most,) = limit
            finite = [jnp.isfinite(norm) for norm in (loss, *report.gradient_norms.values())]
            counts = jnp.stack([loss <= most, *finite]).all()
            params, moments = jax.tree.map(
                lambda new, old: jnp.where(counts, new, old),
                (params, moments),
                (state.params, state.moments),
            )
        return state._replace(step=state.step + 1, params=params, moments=moments), report

    return train_step


def jitted_train_step(
    model: ModelConfig,
    training: TrainingConfig,
    tables: dict | None,
    executor: Executor,
    shapes: TrainState,
) -> jax.stages.Wrapped:
    """`make_train_step`, jitted: the state is donated, and its results lie where it lay.

    Args:
      model: as for `make_train_step`, like `training`, `tables` and `executor`.
      shapes: of the state, as the executor places it.
    """
    step = make_train_step(model, training, tables, executor)
    told = executor.replicated()
    laid_out = executor.shardings(shapes._replace(tables=()))
    if laid_out is not None:
        laid_out = laid_out._replace(tables=None), StepReport(told, told)
    return jax.jit(step, donate_argnums=0, out_shardings=laid_out)


def make_eval_step(
    model: ModelConfig, tables: dict | None = None, executor: Executor = SINGLE_DEVICE
) -> Callable:
    """(params, tables, tokens, weights) -> float32 [] sum of weighted losses in nats.

    `tables` as for `make_train_step`.
    """
    fixed = tables

    def eval_step(params: dict, tables, tokens: jax.Array, weights: jax.Array) -> jax.Array:
        return executor.loss(model, params, tables if fixed is None else fixed, tokens, weights)

    return eval_step
