"""Which part of the weights is stored, and how the stored blocks change while a model trains."""

import dataclasses

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import (
    BLOCK_KINDS,
    KINDS,
    PATTERN_NAMES,
    PROJECTIONS,
    LinearSpec,
)
from sparse_dataflow.core.config.settings import (
    A_FRACTION,
    A_SHARE,
    MOST_SEQUENCES,
    MOST_SIZE,
    MOST_STEPS,
    Readable,
    between,
    block_sides,
    setting,
    validate,
)
from sparse_dataflow.files.errors import UserError

GROUPED_PATTERNS = ("monarch", "shuffle")
"""Patterns whose layouts are equal groups (`layouts.layout.Groups`)."""

RUNTIME_PATTERN = "cyclic"
"""Pattern in the specs of layouts that are chosen at run time: it accepts every degree."""


@dataclasses.dataclass(frozen=True, repr=False)
class SparsityConfig(Readable):
    """Which projections are block-sparse, and which of their blocks are stored.

    Attributes:
      projections: PROJECTIONS (the default) means all of the model.
      pattern: a name in `layouts.patterns`, or a kind of weight that has no pattern of blocks, such
        as "low_rank".
      density: of a kind without blocks, stored weights over those of the dense weight.
      budget: shares of the density, computed in `runs.allocation`.
    """

    projections: tuple[str, ...] = setting(
        PROJECTIONS, "Block-sparse projections; the others stay dense.", choices=PROJECTIONS
    )
    pattern: str = setting(
        "monarch",
        "Rule that chooses the stored blocks, or a kind of weight that stores factors.",
        choices=PATTERN_NAMES,
    )
    kind: str = setting(
        "auto",
        "Kind of weight with the blocks of the pattern; auto: block_sparse, or the pattern's own.",
        choices=BLOCK_KINDS,
    )
    density: float = setting(0.125, "Fraction of the blocks stored.", legal=A_FRACTION)
    budget: str = setting(
        "uniform",
        "How the density is shared out: uniform; by name, qkv:0.25,mlp_in:0.5x; by depth, "
        "depth:1.5x,0.5x, also after names and a comma.",
    )
    block: int | str = setting(64, "Side of a block, or inputs x outputs (1x16) if masked.")
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

    span: int = setting(
        0,
        "With --pattern=masked, neighbouring inputs among which each output stores equally many; 0 "
        "is all inputs, 4 with --density=0.5 is 2 of 4.",
        legal=between(0, MOST_SIZE),
    )

    def __post_init__(self):
        validate(self, "sparsity")
        inputs, outputs = block_sides(self.block)  # type: ignore[misc]
        # One spelling of each block, as configs are compared.
        object.__setattr__(self, "block", inputs if inputs == outputs else f"{inputs}x{outputs}")
        if self.kind != "auto" and self.pattern in KINDS:
            raise UserError(
                f"sparsity.kind={self.kind} with sparsity.pattern={self.pattern}, which is a kind "
                "itself; legal: a pattern of blocks, or sparsity.kind=auto."
            )

    @property
    def stored_as(self) -> str:
        """Key of the kind of weight."""
        blocks = "block_sparse" if self.kind == "auto" else self.kind
        return self.pattern if self.pattern in KINDS else blocks

    def linears(self, model: ModelConfig) -> dict[str, LinearSpec]:
        """Projection -> its spec, before `budget` shares the density out.

        Raises:
          UserError: `projections` names one that the model does not have.
        """
        inputs, outputs = block_sides(self.block)  # type: ignore[misc]
        if self.pattern == LinearSpec.kind:  # "dense", which has no density and no blocks.
            spec = LinearSpec(rank=self.rank, hadamard=self.hadamard)
        else:
            spec = LinearSpec(
                self.stored_as,
                self.pattern,
                self.density,
                inputs,
                self.rank,
                self.hadamard,
                span=self.span,
                block_outputs=0 if inputs == outputs else outputs,
            )
        return dict.fromkeys(model.selected(self.projections, "sparsity.projections"), spec)


METHOD_NAMES: list[str] = []
"""Names of the methods, filled by `layouts.evolution.register`."""

EXCHANGED_BLOCKS = 0.05
"""Share of the blocks that the first update of rigl or set exchanges.  RigL's is 0.3 (arXiv
1911.11134, section 3); three seeds of `pico` do not tell the two apart
(docs/evidence/quality.md)."""


FEATURE_CHOICES = ("sampled", "top", "uniform")


@dataclasses.dataclass(frozen=True, repr=False)
class EvolutionConfig(Readable):
    """Which method, and when.

    Attributes:
      method: a name in `layouts.evolution`.
      share: it falls to 0 along a cosine (arXiv 1911.11134, section 3).
      max_fan_out: counts the output blocks of an input block.  Tables by input block have this
        width, so the gradient of the inputs costs up to this multiple of the stored blocks in plain
        XLA; the TPU and Hopper kernels skip padding.
      sequences: rounded up to whole micro-batches.  A sequence costs a forward and a backward pass
        with dense weight gradients.
      row_shards: shards of a tensor-parallel mesh then store equally many blocks.  Results depend
        on it and not on the mesh.
      given_layouts: whether the first layouts come with imported weights, and so are data, not
        those of the pattern.
    """

    method: str = setting(
        "static",
        "set and rigl exchange blocks, at random or by gradient; gradual prunes a dense model in "
        "halvings; sparse_to_dense ends dense; shared_to_own copies one trained block; "
        "omit_features leaves out features of MLPs for a while. Options follow a colon: "
        "rigl:every=100,share=0.05.",
        choices=METHOD_NAMES,
    )
    every: int = setting(
        100, "Steps between two updates of set or rigl.", legal=between(1, MOST_STEPS)
    )
    at: float = setting(
        0.0,
        "Fraction of the steps at which set and rigl stop (0.75), gradual's cubic schedule ends "
        "(0.5), sparse_to_dense turns dense (0.7), shared_to_own copies its block (0.3) or "
        "omit_features puts all features back (0.75); 0 is the number in brackets.",
        legal=A_SHARE,
    )
    share: float = setting(
        EXCHANGED_BLOCKS,
        "Share of the blocks that the first update of set or rigl exchanges.",
        legal=("in (0, 1)", lambda share: 0 < share < 1),
    )
    max_fan_out: float = setting(
        3.0,
        "Most outputs of an input block after an update of set or rigl, as a multiple of the mean.",
        legal=("above 1, at most 100", lambda multiple: 1 < multiple <= 100),
    )
    sequences: int = setting(
        32,
        "Sequences that rigl measures gradients on before an update, and omit_features "
        "activations.",
        legal=between(1, MOST_SEQUENCES),
    )
    row_shards: int = setting(
        1,
        "Parts of the inputs between which set and rigl move no block in attn_out and mlp_out: a "
        "multiple of the mesh's tensor axis.",
        legal=between(1, MOST_SEQUENCES),
    )
    first: tuple[str, ...] = setting(
        (),
        "Projections that sparse_to_dense makes dense first, the others halfway from there to the "
        "end; none is all at once.",
        choices=PROJECTIONS,
    )
    omitted: float = setting(
        0.5,
        "Share of the hidden features that omit_features leaves out first; it falls to 0 in equal "
        "steps.",
        legal=("in (0, 1)", lambda share: 0 < share < 1),
    )
    features: str = setting(
        "sampled",
        "Hidden features that take part in omit_features: drawn with probabilities that grow with "
        "their mean absolute activation (sampled), the largest (top), or any (uniform).",
        choices=FEATURE_CHOICES,
    )
    given_layouts: bool = False

    def __post_init__(self):
        object.__setattr__(self, "first", tuple(self.first))
        validate(self, "evolution")
