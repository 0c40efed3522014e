"""The training state, and what a step tells."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class TrainState(NamedTuple):
    """All that a checkpoint holds in arrays.

    Attributes:
      step: int32 [], optimizer steps done; also the data position.
      params: float32 masters; see `gpt`.
      moments: the optimizer's state.
      tables: layout tables (int32) of the sparse projections.
      key: random key for everything drawn while training.
    """

    step: Any
    params: Any
    moments: Any
    tables: Any
    key: Any


class StepReport(NamedTuple):
    """What a step tells: float32 [] loss in nats per token, and {group: gradient norm}."""

    loss: Any
    gradient_norms: Any


def group_norms(tree: dict) -> dict[str, jax.Array]:
    """Euclidean norm by parameter group: "embed", "head" and "blocks.<module>"."""
    squares: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = [key.key for key in path if hasattr(key, "key")]
        group = ".".join(names[:2]) if names[0] == "blocks" else names[0]
        squares[group] = squares.get(group, 0.0) + jnp.sum(jnp.square(leaf))
    return {group: jnp.sqrt(total) for group, total in squares.items()}
