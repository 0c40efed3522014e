"""What the sections of a model read of a micro-batch, besides their input.

A section takes (weights, x, context).  An executor makes the context once, and passes it on with
the micro-batch.  It is data: another one does not recompile, and a field that is None costs
nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

_ROWS = ("documents", "real", "targets", "token_weights", "teacher_hidden")
"""Fields of which each row of a micro-batch has its own."""

_HEAD = ("targets", "token_weights", "teacher_hidden", "teacher")
"""Fields that the head alone reads."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BatchContext:
    """Facts of a micro-batch of B rows and T tokens; None for what nobody reads.

    Attributes:
      positions: int32 [T] or [B, T], positions of the tokens; None for 0 to T - 1.
      documents: int32 [B, T], see `dot_product.document_numbers`: a token attends within its
        document.  None for one document.
      real: bool [B, T], whether a token is no padding, which has no experts; None for all.
      routed: float32 [], tokens of the whole batch that have experts; None without experts.
      targets: int32 [B, T], the next tokens.
      token_weights: float32 [B, T], of the losses of the targets.
      teacher_hidden: [B, T, D of the teacher], its last hidden states; None without a teacher.
      teacher: (its output layer [V, D], float32 [] weight of its loss); see `TeacherOutput`.
    """

    positions: jax.Array | None = None
    documents: jax.Array | None = None
    real: jax.Array | None = None
    routed: Any = None
    targets: Any = None
    token_weights: Any = None
    teacher_hidden: jax.Array | None = None
    teacher: tuple[jax.Array, jax.Array] | None = None

    @property
    def rows(self) -> dict[str, jax.Array]:
        """The arrays with a row for each of the micro-batch, by field."""
        fields = {name: getattr(self, name) for name in _ROWS}
        return {name: array for name, array in fields.items() if array is not None}

    def with_rows(self, rows: Mapping[str, Any]) -> "BatchContext":
        """Returns the context of other `rows`."""
        return dataclasses.replace(self, **rows)

    def map_rows(self, function: Callable) -> "BatchContext":
        """Returns the context with `function` of each array of `rows`."""
        return self.with_rows({name: function(array) for name, array in self.rows.items()})

    def for_blocks(self) -> "BatchContext":
        """Returns the context without what the head alone reads."""
        return dataclasses.replace(self, **dict.fromkeys(_HEAD))


NO_CONTEXT = BatchContext()
"""The context of rows of one document each, at positions from 0 on."""
