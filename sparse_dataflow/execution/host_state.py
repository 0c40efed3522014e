"""A training state in host memory, and its sections as views of it.

The state is that of every executor, with numpy arrays for leaves: blocks are stacked, and a block's
view is its slice of each stack.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sparse_dataflow.models import gpt
from sparse_dataflow.models.sizes import ModelConfig
from sparse_dataflow.training.optimizer import TrainingConfig, make_optimizer, map_moments
from sparse_dataflow.training.step import TrainState

EMBED, HEAD = "embed", "head"
Section = str | int
"""EMBED, HEAD, or the number of a block."""

RESIDUAL = ("attn_out", "mlp_out")
"""Projections behind which a block's result is added to its input."""


def section_name(section: Section) -> str:
    """As people read it."""
    return f"block {section}" if isinstance(section, int) else section


def view(tree: dict, section: Section) -> Any:
    """One section of a tree that is shaped like the parameters; writing to it writes to the tree."""
    if isinstance(section, int):
        return jax.tree.map(lambda stack: stack[section, ...], tree["blocks"])
    return tree[section]


def adam(moments: Any) -> Any:
    """The part of an optimizer's state that holds `count`, `mu` and `nu`."""
    return next(part for part in moments if hasattr(part, "mu"))


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


def fresh_state(
    model: ModelConfig,
    training: TrainingConfig,
    new: Callable[[jax.ShapeDtypeStruct], np.ndarray] | None = None,
    starting_blocks: int | None = None,
) -> TrainState:
    """The state that `training.step.initial_state` draws, section by section, in host memory.

    Args:
      model: its config.
      training: gives the seed.
      new: makes the array of each leaf of parameters and moments, zeroed; numpy's own where None.
      starting_blocks: blocks from this number on start as the identity (their residual branches
        are zero), so that they join a growing network without changing its function.
    """
    new = new or (lambda leaf: np.zeros(leaf.shape, leaf.dtype))
    shapes = abstract_state(model, training)
    params = jax.tree.map(new, shapes.params)
    moments = map_moments(lambda tree: jax.tree.map(new, tree), shapes.moments)
    init_key, key = jax.random.split(jax.random.key(training.seed))
    keys = gpt.init_keys(model, init_key)
    draw = {
        name: jax.jit(lambda key, name=name: gpt.init_section(model, name, key))
        for name in (EMBED, "block", HEAD)
    }
    _fill(params[EMBED], draw[EMBED](keys["embed"]))
    for number in range(model.num_layers):
        drawn = dict(draw["block"](keys["blocks"][number]))
        if starting_blocks is not None and number >= starting_blocks:
            drawn |= {name: jax.tree.map(np.zeros_like, drawn[name]) for name in RESIDUAL}
        _fill(view(params, number), drawn)
    _fill(params[HEAD], draw[HEAD](keys["head"]))
    filled = with_adam(moments, 0, adam(moments).mu, adam(moments).nu)
    return TrainState(np.zeros((), np.int32), params, filled, shapes.tables, key)


def _fill(views, drawn):
    jax.tree.map(lambda to, leaf: np.copyto(to, np.asarray(leaf)), views, jax.device_get(drawn))
