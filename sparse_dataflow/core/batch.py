"""A batch, in the one form that it has from the data to the blocks of a model."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray
"""An array on devices or on the host."""

_ROWS = ("tokens", "targets", "token_weights", "documents", "real", "teacher_hidden", "features")
"""Fields of which each row has its own."""

_NOT_OF_BLOCKS = ("tokens", "targets", "token_weights", "teacher_hidden", "teacher", "features")
"""Fields that embedding or head alone read."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Rows of tokens and what a model reads of them; a field that is None is absent.

    It is data: other values do not recompile.  Data sets fill the first three fields, a training's
    teacher its own two, and `executors.whole.local_batch` the others.

    Attributes:
      tokens: int32 [B, T], the inputs.
      targets: int32 [B, T], the next tokens.
      token_weights: float32 [B, T], of the losses of the targets; None for their mean.
      documents: int32 [B, T], see `dot_product.document_numbers`: a token attends within its
        document.  None for one document.
      positions: int32 [T] or [B, T], positions of the tokens; None for 0 to T - 1.
      real: bool [B, T], whether a token is no padding, which has no experts; None for all.
      routed: float32 [], tokens of the whole batch that have experts; None without experts.
      teacher_hidden: [B, T, D of the teacher], its last hidden states; None without a teacher.
      teacher: (its output layer [V, D], float32 [] weight of its loss); see `TeacherOutput`.
      features: inputs of the layers of a frozen model; see `training.features`.  None to compute
        them.
    """

    tokens: Any = None
    targets: Any = None
    token_weights: Any = None
    documents: Array | None = None
    positions: jax.Array | None = None
    real: Array | None = None
    routed: Any = None
    teacher_hidden: jax.Array | None = None
    teacher: tuple[jax.Array, jax.Array] | None = None
    features: Array | None = None

    @classmethod
    def from_windows(cls, windows: Array, token_weights: Array | None = None) -> "Batch":
        """Returns the batch of int32 [..., T + 1] tokens, of which each predicts the next one."""
        return cls(windows[..., :-1], windows[..., 1:], token_weights)

    @property
    def rows(self) -> dict[str, Any]:
        """The arrays with a row for each of the batch, by field."""
        fields = {name: getattr(self, name) for name in _ROWS}
        return {name: array for name, array in fields.items() if array is not None}

    def with_rows(self, rows: Mapping[str, Any]) -> "Batch":
        """Returns the batch with other `rows`."""
        return dataclasses.replace(self, **rows)

    def map_rows(self, function: Callable) -> "Batch":
        """Returns the batch with `function` of each array of `rows`."""
        return self.with_rows({name: function(array) for name, array in self.rows.items()})

    def for_blocks(self) -> "Batch":
        """Returns the batch without what embedding or head alone read."""
        return dataclasses.replace(self, **dict.fromkeys(_NOT_OF_BLOCKS))

    @property
    def unweighted(self) -> "Batch":
        """The batch whose targets count equally."""
        return dataclasses.replace(self, token_weights=None)

    def weighted(self, shards: int = 1) -> "Batch":
        """Returns the batch with weights of its targets; without any, those of their mean.

        Args:
          shards: number of shards of the rows, each of which is a batch.
        """
        if self.token_weights is not None:
            return self
        # A batch on the host stays there.
        xp: Any = np if isinstance(self.targets, np.ndarray) else jnp
        # All shards have equally many targets, so the weights of all shards add up to 1.
        mean = xp.full(self.targets.shape, 1 / (self.targets.size * shards), np.float32)
        return dataclasses.replace(self, token_weights=mean)


NO_BATCH = Batch()
"""What sections read of rows of one document each, at positions from 0 on."""
