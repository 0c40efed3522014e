"""Which part of the weights is stored."""

import dataclasses

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LOW_RANK, PROJECTIONS, LinearSpec
from sparse_dataflow.core.config.settings import (
    A_FRACTION,
    MOST_SIZE,
    Readable,
    between,
    setting,
    validate,
)

PATTERN_NAMES: list[str] = [LOW_RANK]
"""Names of the patterns, filled by `layouts.patterns.register`, and LOW_RANK, which has no
layout."""

GROUPED_PATTERNS = ("monarch", "shuffle")
"""Patterns whose layouts are equal groups (`layouts.layout.Groups`)."""


@dataclasses.dataclass(frozen=True, repr=False)
class SparsityConfig(Readable):
    """Which projections are block-sparse, and which of their blocks are stored.

    Attributes:
      projections: PROJECTIONS (the default) means all of the model.
      pattern: a name in `layouts.patterns`, or LOW_RANK, whose factors' product is the weight.
      density: with LOW_RANK, stored weights of the factors over those of the dense weight.
      budget: shares of the density, computed in `layouts.allocation`.
    """

    projections: tuple[str, ...] = setting(
        PROJECTIONS, "Block-sparse projections; the others stay dense.", choices=PROJECTIONS
    )
    pattern: str = setting(
        "monarch",
        "Rule that chooses the stored blocks; low_rank stores two factors instead.",
        choices=PATTERN_NAMES,
    )
    density: float = setting(0.125, "Fraction of the blocks stored.", legal=A_FRACTION)
    budget: str = setting(
        "uniform",
        "How the density is shared out: uniform; compute (equal FLOPs, Erdos-Renyi rule); by name, "
        "qkv:0.25,mlp_in:0.5x; by depth, depth:1.5x,0.5x.",
    )
    block: int = setting(64, "Side of a square block, in features.", legal=between(1, MOST_SIZE))
    rank: int = setting(
        0, "Width of an added gated low-rank term; 0 is none.", legal=between(0, MOST_SIZE)
    )
    hadamard: int = setting(
        0,
        "Neighbouring features that a Walsh-Hadamard transform mixes before each block-sparse "
        "product; 0 is none.",
        legal=(
            f"0 or a power of 2 up to {MOST_SIZE:,}",
            lambda n: 0 <= n <= MOST_SIZE and int(n).bit_count() <= 1,
        ),
    )

    def __post_init__(self):
        validate(self, "sparsity")

    def linears(self, model: ModelConfig) -> dict[str, LinearSpec]:
        """Projection -> its spec, before `budget` shares the density out.

        Raises:
          UserError: `projections` names one that the model does not have.
        """
        spec = LinearSpec(
            LOW_RANK if self.pattern == LOW_RANK else "block_sparse",
            self.pattern,
            self.density,
            self.block,
            self.rank,
            self.hadamard,
        )
        return dict.fromkeys(model.selected(self.projections, "sparsity.projections"), spec)
