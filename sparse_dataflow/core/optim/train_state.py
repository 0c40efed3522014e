"""The training state and the report of a training step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparse_dataflow.core.model.model_weights import ModelWeights


class TrainState(NamedTuple):
    """All arrays of a training, and of its checkpoints, except that those leave out `frozen`.

    Attributes:
      step: int32 [], number of optimizer steps done; also the data position.
      params: float32 master parameters that are trained; see `gpt`.
      moments: the optimizer state.
      tables: layout tables (int32) of the sparse projections, or `Fixed` ones.
      key: random key of every draw during training.
      frozen: parameters that are not trained, the base of `adapters`; () if all are.
    """

    step: Any
    params: Any
    moments: Any
    tables: Any
    key: Any
    frozen: Any = ()

    @property
    def weights(self) -> ModelWeights:
        """All weights, as executors take them."""
        return ModelWeights(self.params, self.tables, self.frozen)


class StepReport(NamedTuple):
    """Result of a training step.

    Attributes:
      loss: float32 [], in nats per token.
      gradient_norms: {parameter group: float32 []}; see `group_norms`.
      routing: `model.experts.Routing` stacked over the layers; () for a model without experts.
    """

    loss: Any
    gradient_norms: Any
    routing: Any = ()


def group_norms(tree: dict) -> dict[str, jax.Array]:
    """Returns the Euclidean norm of each parameter group: "embed", "head", "blocks.<module>"."""
    squares: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = [key.key for key in path if hasattr(key, "key")]
        group = ".".join(names[:2]) if names[0] == "blocks" else names[0]
        squares[group] = squares.get(group, 0.0) + jnp.sum(jnp.square(leaf))
    return {group: jnp.sqrt(total) for group, total in squares.items()}
