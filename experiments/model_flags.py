"""Flags of the model: its size, which blocks of its weights exist, and how they change."""

from sparse_dataflow.config.model import DTYPES, PROJECTIONS
from sparse_dataflow.config.presets import SIZES

from experiments.command_line import A_FRACTION, AT_LEAST_ONE, AT_LEAST_ZERO, Flag, Group


def _patterns() -> tuple[str, ...]:
    from sparse_dataflow.sparsity.patterns import PATTERNS

    return tuple(PATTERNS)


def _methods() -> tuple[str, ...]:
    from sparse_dataflow.sparsity.evolution import METHODS

    return tuple(METHODS)


MODEL = Group(
    "Model",
    "which GPT is trained",
    (
        Flag(
            "scale",
            "choice",
            "auto",
            "Named size; auto is nano on a CPU, else the largest up to 13b that fits the device.",
            ("auto", *SIZES),
        ),
        Flag(
            "sequence",
            "integer",
            0,
            "Tokens in a sequence; 0 is the scale's own length.",
            legal=AT_LEAST_ZERO,
        ),
        Flag(
            "positions",
            "choice",
            "learned",
            "How a token knows its place.",
            ("learned", "rotary"),
        ),
        Flag(
            "norm",
            "choice",
            "layernorm",
            "Normalisation before each half of a block.",
            ("layernorm", "rmsnorm"),
        ),
        Flag(
            "parametrization",
            "choice",
            "standard",
            "supar scales initialisation and learning rate with width and density.",
            ("standard", "supar"),
        ),
        Flag(
            "remat",
            "choice",
            "none",
            "Activations computed again in the backward pass: none, all but matmuls, or all.",
            ("none", "dots", "full"),
            fixed=False,
        ),
        Flag(
            "dtype",
            "choice",
            "auto",
            "Type of activations; masters stay float32. auto is float32 on a CPU, else bfloat16.",
            ("auto", *DTYPES),
        ),
    ),
)
SPARSITY = Group(
    "Sparsity",
    "which blocks of the weights exist",
    (
        Flag("pattern", "choice", "monarch", "Rule that chooses the stored blocks.", _patterns),
        Flag(
            "density",
            "number",
            0.125,
            "Fraction of blocks stored.",
            legal=A_FRACTION,
        ),
        Flag(
            "density_budget",
            "text",
            "uniform",
            "uniform gives every projection --density; compute shares the FLOPs that this costs "
            "out by the Erdos-Renyi rule; or name some: qkv:0.25,mlp_in:0.0625, or 0.5x and 1.5x "
            "of --density; depth:1.5x,0.5x multiplies it in equal parts of the depth, first to "
            "last.",
        ),
        Flag("block", "integer", 64, "Side of a square block, in features.", legal=AT_LEAST_ONE),
        Flag(
            "rank",
            "integer",
            0,
            "Width of an added gated low-rank term; 0 is none.",
            legal=AT_LEAST_ZERO,
        ),
        Flag(
            "hadamard",
            "integer",
            0,
            "Neighbouring features that a Walsh-Hadamard transform mixes before each block-sparse "
            "product, so that large blocks at a low density read more of them; 0 is none.",
            legal=("0 or a power of 2", lambda n: n >= 0 and int(n).bit_count() <= 1),
        ),
        Flag(
            "sparse_projections",
            "list",
            "all",
            "Projections that are block-sparse; the others stay dense.",
            PROJECTIONS,
        ),
    ),
)
EVOLUTION = Group(
    "Evolution",
    "how the stored blocks change while training",
    (
        Flag(
            "evolution",
            "choice",
            "static",
            "set and rigl exchange blocks, at random or by their gradient; gradual prunes a dense "
            "model in halvings; sparse_to_dense ends dense; low_rank_tail adds --rank at the end.",
            _methods,
        ),
        Flag(
            "evolve_every",
            "integer",
            100,
            "Steps between two exchanges of set and rigl.",
            legal=AT_LEAST_ONE,
        ),
        Flag(
            "evolve_at",
            "number",
            0.0,
            "Fraction of the steps at which set and rigl stop, gradual reaches --density, "
            "sparse_to_dense becomes dense, low_rank_tail adds its term; 0 is 0.75, 0.75, 0.5, "
            "0.7, 0.99.",
            legal=("in [0, 1)", lambda fraction: 0 <= fraction < 1),
        ),
        Flag(
            "evolve_first",
            "list",
            "none",
            "Projections that sparse_to_dense makes dense at evolve_at, the others halfway from "
            "there to the end; none is all at once.",
            PROJECTIONS,
        ),
        Flag(
            "evolve_plateau",
            "integer",
            0,
            "Evaluations in a row without 0.5% of gain after which sparse_to_dense becomes dense "
            "before evolve_at; 0 is never. --minutes is planned for evolve_at.",
            legal=AT_LEAST_ZERO,
        ),
    ),
)
