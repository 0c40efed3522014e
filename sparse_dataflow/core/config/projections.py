"""The projections of a model: their names, and how each is stored."""

import dataclasses

from sparse_dataflow.core.config.settings import (
    A_FRACTION,
    AT_LEAST_ONE,
    MOST_SIZE,
    Readable,
    between,
    setting,
    validate,
)
from sparse_dataflow.files.errors import UserError

PROJECTIONS = ("qkv", "q", "k", "v", "attn_out", "mlp_gate", "mlp_in", "mlp_out")
"""Names of all projections; `ModelConfig.projections` has those of one model."""

ROW_PARALLEL = ("attn_out", "mlp_out")
"""Projections that write to the residual stream.  Tensor parallelism cuts them by input features,
all others by output features."""

KEY_VALUE = ("k", "v")
"""Projections whose output features are key/value heads alone."""

QUERY_NORMS, KEY_NORMS = "q_norms", "k_norms"
"""Norms whose parameters are those of all heads of queries, and of keys; see
`AttentionSettings.qk_norm_scope`."""

LOW_RANK = "low_rank"
"""Kind of a weight that is only the product of two factors, and the pattern that asks for it."""

MLP = ("mlp_gate", "mlp_in", "mlp_out")
"""Projections of the MLP; in a mixture of experts, those of each expert."""


FROZEN_DTYPES = ("compute", "int8")


@dataclasses.dataclass(frozen=True, repr=False)
class LinearSpec(Readable):
    """Storage of one projection.

    Attributes:
      kind: "dense", "block_sparse", or "low_rank": the product of two factors, [in, r] and
        [r, out] (`ModelConfig.factor_rank`), and nothing else.
      pattern: name in `layouts.patterns.PATTERNS` that chooses the blocks (block_sparse only).
      density: fraction of the dense weights stored, in (0, 1]: as blocks, or as factors.
      block: side of a square block, in features (block_sparse only).
      rank: width of an added gated low-rank term `x A B` (Pixelfly, arXiv 2112.00029); 0 for none.
      hadamard: width of the Walsh-Hadamard transform of consecutive input features before a
        block-sparse product (`ops.hadamard`): a power of 2 that divides them; 0 for none.
      turned_dense: whether a dense weight was block-sparse before, which raises its learning rate;
        see `optim.optimizers`.
      frozen_dtype: how a dense weight under an adapter is stored: in the compute dtype, or as int8
        with a scale for each output.
      max_fan_out: width of a layout's tables by input block, as a multiple of the mean fan-out;
        above 1 for a layout that training changes (`layouts.evolution`).

    Examples:
        >>> spec = sd.LinearSpec("block_sparse", "monarch", density=0.125, block=64)
        >>> spec.scaled(2).density
        0.25
    """

    kind: str = setting("dense", choices=("dense", "block_sparse", LOW_RANK))
    pattern: str = setting("monarch")
    density: float = setting(1.0, legal=A_FRACTION)
    block: int = setting(64, legal=between(1, MOST_SIZE))
    rank: int = setting(0, legal=between(0, MOST_SIZE))
    hadamard: int = setting(0, legal=between(0, MOST_SIZE))
    turned_dense: bool = setting(False)
    max_fan_out: float = setting(1.0, legal=AT_LEAST_ONE)
    frozen_dtype: str = setting("compute", choices=FROZEN_DTYPES)

    def __post_init__(self):
        validate(self, "LinearSpec")
        if self.turned_dense and self.kind != "dense":
            raise UserError(f"turned_dense needs kind 'dense', not {self.kind!r}.")
        if self.rank and self.kind == LOW_RANK:
            raise UserError(
                f"rank {self.rank} is not legal for a low_rank weight, which has no other term; "
                "legal: 0."
            )
        if self.hadamard and (self.kind != "block_sparse" or self.hadamard.bit_count() != 1):
            raise UserError(
                f"hadamard {self.hadamard} is not legal for a {self.kind} weight; legal: a power "
                "of 2 for block_sparse, else 0."
            )

    def scaled(self, multiplier: float) -> "LinearSpec":
        """Returns this spec with its density times `multiplier`.

        Raises:
          UserError: the product is above 1.
        """
        density = self.density * multiplier
        if density > 1 + 1e-9:
            raise UserError(
                f"density {self.density:g} times {multiplier:g} is above 1; legal: multiples up "
                f"to {1 / self.density:g}."
            )
        return dataclasses.replace(self, density=min(1.0, density))


DENSE = LinearSpec()
"""Spec of a dense projection."""
