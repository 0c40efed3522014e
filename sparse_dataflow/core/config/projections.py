"""The projections of a model: their names, and how each is stored."""

import dataclasses
from collections.abc import Collection
from typing import Any

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

KINDS: dict[str, Any] = {}
KIND_NAMES: list[str] = []
"""Key of a kind of weight -> its class, and the keys, filled by `weights.kind.register`."""

ADDED_TERMS: dict[str, Any] = {}
"""Field of a `LinearSpec` -> class of the term that it adds to a weight, filled by
`weights.kind.register_term`."""

PATTERN_NAMES: list[str] = []
"""Legal values of `sparsity.pattern`: the patterns, filled by `layouts.patterns.register`, and the
kinds of weights that have none, filled by `weights.kind.register`."""

BLOCK_KINDS = ["auto"]
"""Legal values of `sparsity.kind`: the kinds that store the blocks of a pattern, filled by
`weights.kind.register`."""

PRECISIONS = ("compute_dtype", "fp8", "int8")
"""Legal values of `model.precision`; the first quantises nothing."""

MLP = ("mlp_gate", "mlp_in", "mlp_out")
"""Projections of the MLP; in a mixture of experts, those of each expert."""


FROZEN_DTYPES = ("compute", "int8")


@dataclasses.dataclass(frozen=True, repr=False)
class LinearSpec(Readable):
    """Storage of one projection.

    Attributes:
      kind: key of a class of weights, see `weights.kinds`; such as "dense" or "block_sparse".
      pattern: name in `layouts.patterns.PATTERNS` that chooses the blocks (block_sparse only).
      density: fraction of the dense weights stored, in (0, 1]: as blocks, or as factors.
      block: side of a square block, in features (block-sparse and masked weights).
      block_outputs: outputs of a block of a masked weight, whose inputs are `block`; 0 is `block`.
      rank: width of an added gated low-rank term `x A B` (Pixelfly, arXiv 2112.00029); 0 for none.
      hadamard: width of the Walsh-Hadamard transform of consecutive input features before a
        block-sparse product (`ops.hadamard`): a power of 2 that divides them; 0 for none.
      turned_dense: whether a dense weight was block-sparse before, which raises its learning rate;
        see `optim.optimizers`.
      frozen_dtype: how a dense weight under an adapter is stored: in the compute dtype, or as int8
        with a scale for each output.
      span: neighbouring inputs among which every output of a masked weight stores equally many; 0
        is all inputs (4 with density 0.5 is 2 of 4).
      max_fan_out: width of a layout's tables by input block, as a multiple of the mean fan-out;
        above 1 for a layout that training changes (`layouts.evolution`).

    Raises:
      UserError: a value is not legal, or the kind has no such field; names the legal values.

    Examples:
        >>> spec = sd.LinearSpec("block_sparse", "monarch", density=0.125, block=64)
        >>> spec.scaled(2).density
        0.25
    """

    kind: str = setting("dense", choices=KIND_NAMES)
    pattern: str = setting("monarch")
    density: float = setting(1.0, legal=A_FRACTION)
    block: int = setting(64, legal=between(1, MOST_SIZE))
    rank: int = setting(0, legal=between(0, MOST_SIZE))
    hadamard: int = setting(0, legal=between(0, MOST_SIZE))
    turned_dense: bool = setting(False)
    max_fan_out: float = setting(1.0, legal=AT_LEAST_ONE)
    span: int = setting(0, legal=between(0, MOST_SIZE))
    block_outputs: int = setting(0, legal=between(0, MOST_SIZE))
    frozen_dtype: str = setting("compute", choices=FROZEN_DTYPES)

    def __post_init__(self):
        validate(self, "LinearSpec")
        if self.hadamard and self.hadamard.bit_count() != 1:
            raise UserError(f"hadamard {self.hadamard} is not legal; legal: 0 or a power of 2.")
        uses = ("turned_dense", "rank", "hadamard", "block_outputs")
        for name in (name for name in uses if getattr(self, name)):
            words = f"{name}={getattr(self, name)}"
            if name == "block_outputs":
                words = f"block={self.block}x{self.block_outputs}"
            self.weight.require(name, words)

    @property
    def block_sides(self) -> tuple[int, int]:
        """Inputs and outputs of a block."""
        return self.block, self.block_outputs or self.block

    @property
    def weight(self) -> Any:
        """The class of its kind; see `weights.kind.Weight`."""
        return KINDS[self.kind]

    @property
    def term(self) -> Any:
        """The class of its added term, which says its facts as a kind does; None without one."""
        return next((term for name, term in ADDED_TERMS.items() if getattr(self, name)), None)

    @property
    def term_leaves(self) -> dict[str, Any]:
        """Name of each array of its added term -> `weights.kind.Leaf`."""
        return self.term.leaves() if self.term else {}

    @property
    def leaves(self) -> dict[str, Any]:
        """Name of each array of its weight and its added term -> `weights.kind.Leaf`."""
        return {**self.weight.form(self).leaves(), **self.term_leaves}

    def term_numbers(self, sides: tuple[int, int], roles: Collection[str] = ("matrix",)) -> int:
        """Returns the numbers of a layer's added term, of arrays of some roles; 0 without one."""
        return self.term.numbers(self, sides, roles) if self.term else 0

    def scaled(self, multiplier: float) -> "LinearSpec":
        """Returns this spec with its density times `multiplier`.

        Raises:
          UserError: the product is above 1.
        """
        density = self.density * multiplier
        # Rounding may leave a product just above 1.
        if density > 1 + 1e-9:
            raise UserError(
                f"density {self.density:g} times {multiplier:g} is above 1; legal: multiples up "
                f"to {1 / self.density:g}."
            )
        return dataclasses.replace(self, density=min(1.0, density))
