"""A training state in host memory, and its sections as views of it.

The state is that of every executor, with numpy arrays for leaves: blocks are stacked by groups (see
`models.groups`), and a block's view is its slice of each stack.
"""

import functools
from typing import Any

import jax
import numpy as np

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.models import gpt
from sparse_dataflow.models.groups import groups, of_layer, parts
from sparse_dataflow.optim.optimizers import adam_state, make_optimizer
from sparse_dataflow.optim.train_state import TrainState

EMBED, HEAD = "embed", "head"
Section = str | int
"""EMBED, HEAD, or the number of a block."""

RESIDUAL = ("attn_out", "mlp_out")
"""Projections behind which a block's result is added to its input."""


def section_name(section: Section) -> str:
    """As people read it."""
    return f"block {section}" if isinstance(section, int) else section


def all_sections(num_layers: int) -> list[Section]:
    """Every section, in the order of execution."""
    return [EMBED, *range(num_layers), HEAD]


def view(tree: dict, section: Section) -> Any:
    """One section of a tree that is shaped like the parameters; writing to it writes to both."""
    return one_layer(tree["blocks"], section) if isinstance(section, int) else tree[section]


def one_layer(stacked: Any, layer: int) -> Any:
    """One layer's view of blocks, or of layout tables, that are stacked by groups of layers."""
    for part in parts(stacked):
        leaves = jax.tree.leaves(part)
        if not leaves or layer < len(leaves[0]):
            return jax.tree.map(lambda stack, i=layer: stack[i, ...], part)
        layer -= len(leaves[0])
    raise IndexError("there is no such layer")


def depth_of(params: dict) -> int:
    """The number of layers."""
    return sum(len(jax.tree.leaves(part)[0]) for part in parts(params["blocks"]))


def with_adam(moments: Any, count: int, mu: dict, nu: dict) -> Any:
    """The optimizer's state with these."""
    return tuple(
        part._replace(count=np.asarray(count, np.int32), mu=mu, nu=nu)
        if hasattr(part, "mu")
        else part
        for part in moments
    )


def abstract_state(model: ModelConfig, training: TrainingConfig) -> TrainState:
    """Shapes and dtypes of the state; its tables are the model's own layouts, in numpy."""

    def draw():
        key = jax.random.key(training.seed)
        params = gpt.init(model, key)
        moments = make_optimizer(model, training).init(params)
        return TrainState(np.zeros((), np.int32), params, moments, (), key)

    return jax.eval_shape(draw)._replace(tables=gpt.layout_tables(gpt.layouts(model)))


def zeros(model: ModelConfig, training: TrainingConfig) -> tuple[dict, dict, dict]:
    """Parameters and both moments, zeroed, in memory that is taken as it is written to."""
    shapes = abstract_state(model, training)
    moments = adam_state(shapes.moments)
    return jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype), (shapes.params, moments.mu, moments.nu)
    )


def fresh_state(
    model: ModelConfig,
    training: TrainingConfig,
    trees: tuple[dict, dict, dict] | None = None,
    starting_blocks: int | None = None,
) -> TrainState:
    """The state that `training.step.initial_state` draws, section by section, in host memory.

    Args:
      model: its config.
      training: gives the seed.
      trees: zeroed parameters and moments to fill; those of `zeros` where None.
      starting_blocks: blocks from this number on start as the identity (their residual branches
        are zero), so that they join a growing network without changing its function.
    """
    params, mu, nu = trees or zeros(model, training)
    shapes = abstract_state(model, training)
    init_key, key = jax.random.split(jax.random.key(training.seed))
    keys = gpt.init_keys(model, init_key)
    for section in (EMBED, HEAD):
        _fill(params[section], _drawing(model, section)(keys[section]))
    for number in range(model.num_layers):
        own = groups(model)[of_layer(model, number)].model
        drawn = dict(_drawing(own, "block")(keys["blocks"][number]))
        if starting_blocks is not None and number >= starting_blocks:
            drawn |= {name: jax.tree.map(np.zeros_like, drawn[name]) for name in RESIDUAL}
        _fill(view(params, number), drawn)
    moments = with_adam(shapes.moments, 0, mu, nu)
    return TrainState(np.zeros((), np.int32), params, moments, shapes.tables, key)


def copied_state(state: TrainState, trees: tuple[dict, dict, dict]) -> TrainState:
    """The state with its parameters and moments copied into these trees."""
    moments = adam_state(state.moments)
    jax.tree.map(
        lambda to, leaf: np.copyto(to, leaf), trees, (state.params, moments.mu, moments.nu)
    )
    params, mu, nu = trees
    after = with_adam(state.moments, int(moments.count), mu, nu)
    return state._replace(params=params, moments=after)


def training_key(training: TrainingConfig) -> jax.Array:
    """The key of every state of a training."""
    return jax.random.split(jax.random.key(training.seed))[1]


@functools.cache
def _drawing(model, section):
    return jax.jit(lambda key: gpt.init_section(model, section, key))


def _fill(views, drawn):
    jax.tree.map(lambda to, leaf: np.copyto(to, np.asarray(leaf)), views, jax.device_get(drawn))
