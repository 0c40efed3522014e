"""The shape of a GPT and how each of its projections is stored."""

import dataclasses
import math
import numbers
from collections.abc import Mapping

from sparse_dataflow.config.settings import ADOPTED, between, setting, validate
from sparse_dataflow.files.errors import UserError

PROJECTIONS = ("qkv", "attn_out", "mlp_in", "mlp_out")
DTYPES = ("float32", "bfloat16")
NORMS = ("layernorm", "rmsnorm")
POSITIONS = ("learned", "rotary")
ACTIVATIONS = ("gelu", "relu")
REMATS = ("none", "dots", "full")
PARAMETRIZATIONS = ("standard", "supar")

SUPAR_WIDTH = 256
"""d_model at which "supar" equals "standard" for a dense model with heads of width SUPAR_HEAD.

Under SuPar, a learning rate tuned at this width holds for every width and density.
"""

SUPAR_HEAD = 64
"""Head width at which "supar" equals "standard"."""

MOST = 2**22
"""Upper bound of widths, vocabulary and positions.

It is far above any model, and stops an untrusted config file from exhausting memory.
"""

MOST_LAYERS = 2**14
"""Upper bound of the number of layers."""

MOST_BLOCKS = 2**28
"""Upper bound of the stored blocks of one projection, summed over layers."""


@dataclasses.dataclass(frozen=True)
class LinearSpec:
    """Storage of one projection.

    Attributes:
      kind: "dense" or "block_sparse".
      pattern: name in `sparsity.patterns.PATTERNS` that chooses the blocks (block_sparse only).
      density: fraction of blocks stored, in (0, 1] (block_sparse only).
      block: side of a square block, in features (block_sparse only).
      rank: width of an added gated low-rank term `x A B` (Pixelfly, arXiv 2112.00029); 0 for none.
      hadamard: width of the Walsh-Hadamard transform of consecutive input features before a
        block-sparse product (`kernels.hadamard`): a power of 2 that divides them; 0 for none.
      turned_dense: whether a dense weight was block-sparse before, which raises its learning rate;
        see `optim.optimizers`.
      max_fan_out: width of a layout's tables by input block, as a multiple of the mean fan-out;
        above 1 for a layout that training changes (`sparsity.evolution`).
    """

    kind: str = "dense"
    pattern: str = "monarch"
    density: float = 1.0
    block: int = 64
    rank: int = 0
    hadamard: int = 0
    turned_dense: bool = False
    max_fan_out: float = 1.0

    def __post_init__(self):
        if self.kind not in ("dense", "block_sparse"):
            raise UserError(f"linear kind {self.kind!r} is unknown; legal: dense, block_sparse.")
        if not 0 < self.density <= 1:
            raise UserError(f"density {self.density} is not in (0, 1].")
        if self.turned_dense and self.kind != "dense":
            raise UserError(f"turned_dense needs kind 'dense', not {self.kind!r}.")
        if not self.max_fan_out >= 1:
            raise UserError(f"max_fan_out is {self.max_fan_out}; legal: 1 or more.")
        if not isinstance(self.pattern, str):
            raise UserError(f"pattern {self.pattern!r} must be a name.")
        _whole("block", self.block, 1)
        _whole("rank", self.rank, 0)
        _whole("hadamard", self.hadamard, 0)
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


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A GPT, as in GPT-3 (arXiv 2005.14165, section 2.1): pre-norm, tied embeddings.

    Attributes:
      num_layers: number of equal `block` sections.
      d_model: residual width; a multiple of num_heads.
      num_heads: attention heads of width d_model // num_heads.
      d_ff: MLP width (4 d_model in GPT-3).
      vocab_size: rows of the embedding.
      max_len: longest sequence, in tokens (the number of learned positions).
      norm: normalisation before each half of a block.
      positions: position encoding.
      activation: of the MLP; gelu is its tanh form, as in GPT-2, relu is OPT's.
      remat: activation checkpointing of a block: "none", "dots" (keep matmul outputs) or "full".
      compute_dtype: dtype of activations and of weights in products; master weights are float32.
      parametrization: "standard", or "supar" (arXiv 2405.15743), which keeps the scale of
        activations and of their updates constant over width and density.
      linears: (projection name, LinearSpec) pairs or a mapping of them; missing names are dense.
        Empty in a `RunConfig`, whose `sparsity` says what is stored.
      density_by_depth: per-layer multipliers of the density of every block-sparse projection, first
        layer first.  Empty means 1 everywhere.  Equal multipliers are folded into `linears`, which
        leaves it empty.
      mask_documents: whether attention in training and held-out losses stays within a document.
      seed: offset of the patterns, and so the seed of random ones.
    """

    num_layers: int = setting(help="Blocks of the model.", legal=between(1, MOST_LAYERS))
    d_model: int = setting(help="Residual width, in features.", legal=between(1, MOST))
    num_heads: int = setting(
        help="Attention heads; must divide model.d_model.", legal=between(1, MOST)
    )
    d_ff: int = setting(help="Width of the MLP, in features.", legal=between(1, MOST))
    vocab_size: int = setting(
        help="Tokens of the vocabulary, which bpe learns; 257 or more.", legal=between(1, MOST)
    )
    max_len: int = setting(
        help="Learned positions; the longest training.sequence.", legal=between(1, MOST)
    )
    linears: tuple[tuple[str, LinearSpec], ...] | Mapping[str, LinearSpec] = ()
    density_by_depth: tuple[float, ...] = ()
    norm: str = setting("layernorm", "Normalisation of a block's inputs.", choices=NORMS)
    positions: str = setting("learned", "Position encoding.", choices=POSITIONS)
    activation: str = setting("gelu", "Activation of the MLP.", choices=ACTIVATIONS)
    remat: str = setting(
        "none",
        "Activations recomputed in the backward pass: none, all but matmuls, or all.",
        choices=REMATS,
        resumed=ADOPTED,
    )
    compute_dtype: str = setting(
        "float32", "Dtype of activations; master weights stay float32.", choices=DTYPES
    )
    parametrization: str = setting(
        "standard",
        "supar scales initialisation and learning rate with width and density (arXiv 2405.15743).",
        choices=PARAMETRIZATIONS,
    )
    mask_documents: bool = setting(
        False, "Attention in training stays within a document; else windows are seen whole."
    )
    seed: int = 0

    def __post_init__(self):
        validate(self, "model")
        _whole("seed", self.seed, 0, 2**63)
        if self.d_model % self.num_heads:
            legal = [h for h in range(1, self.d_model + 1) if self.d_model % h == 0]
            raise UserError(
                f"d_model {self.d_model} is not divisible by num_heads {self.num_heads}; "
                f"legal head counts: {', '.join(map(str, legal))}."
            )
        head_dim = self.d_model // self.num_heads
        if self.positions == "rotary" and head_dim % 2:
            raise UserError(
                f"rotary positions need an even head width, but d_model {self.d_model} over "
                f"{self.num_heads} heads is {head_dim}; legal: fewer heads, or learned positions."
            )
        linears = tuple(sorted(dict(self.linears).items()))
        for name, _ in linears:
            _choice("projection", name, PROJECTIONS)
        object.__setattr__(self, "linears", linears)
        self._settle_depth()
        for name in self.sparse_projections:
            spec, (fan_in, fan_out) = self.linear(name), self.projection_shape(name)
            if spec.hadamard and fan_in % spec.hadamard:
                raise UserError(
                    f"sparsity.hadamard={spec.hadamard} does not divide the {fan_in} input "
                    "features of "
                    f"{name}; legal: powers of 2 up to {fan_in & -fan_in}."
                )
            layers = sum(self.density_by_depth) or self.num_layers
            if layers * fan_in * fan_out / spec.block**2 * spec.density > MOST_BLOCKS:
                raise UserError(
                    f"{name} has more than {MOST_BLOCKS} blocks with --block={spec.block}; legal: "
                    "larger blocks."
                )

    def _settle_depth(self):
        """Checks `density_by_depth`, and folds equal multipliers into `linears`."""
        multipliers = tuple(self.density_by_depth)
        if multipliers and len(multipliers) != self.num_layers:
            raise UserError(
                f"density_by_depth has {len(multipliers)} numbers for {self.num_layers} layers; "
                "legal: one for each layer, or none."
            )
        for number in multipliers:
            real = isinstance(number, numbers.Real) and not isinstance(number, bool)
            if not real or not 0 < number < math.inf:
                raise UserError(f"density_by_depth has {str(number)[:40]}; legal: numbers above 0.")
        specs = {name: self.linear(name) for name in self.sparse_projections}
        scaled = {
            number: {name: spec.scaled(number) for name, spec in specs.items()}
            for number in dict.fromkeys(multipliers)
        }
        if not specs or len(scaled) < 2:
            linears = dict(self.linears)
            for scaled_specs in scaled.values():
                linears |= scaled_specs
            object.__setattr__(self, "linears", tuple(sorted(linears.items())))
            multipliers = ()
        object.__setattr__(self, "density_by_depth", tuple(map(float, multipliers)))

    def linear(self, projection: str) -> LinearSpec:
        """Returns the spec of one projection before `density_by_depth`; dense if unset."""
        return dict(self.linears).get(projection, LinearSpec())

    def projection_shape(self, projection: str) -> tuple[int, int]:
        """Returns (input features, output features) of one projection."""
        return {
            "qkv": (self.d_model, 3 * self.d_model),
            "attn_out": (self.d_model, self.d_model),
            "mlp_in": (self.d_model, self.d_ff),
            "mlp_out": (self.d_ff, self.d_model),
        }[projection]

    def with_linears(self, spec: LinearSpec, projections=PROJECTIONS) -> "ModelConfig":
        """Returns this config with `spec` for the named projections."""
        linears = {**dict(self.linears), **{p: spec for p in projections}}
        return dataclasses.replace(self, linears=linears)

    @property
    def supar(self) -> bool:
        """Whether the parametrization is SuPar."""
        return self.parametrization == "supar"

    @property
    def sparse_projections(self) -> tuple[str, ...]:
        """Names of the block-sparse projections."""
        linears = dict(self.linears)
        return tuple(name for name, spec in linears.items() if spec.kind == "block_sparse")

    def to_json(self) -> dict:
        """Returns a JSON-compatible dict; `from_json` is its inverse."""
        linears = {name: dict(vars(spec)) for name, spec in dict(self.linears).items()}
        by_depth = list(self.density_by_depth)
        return {**vars(self), "linears": linears, "density_by_depth": by_depth}

    @classmethod
    def from_json(cls, fields: Mapping) -> "ModelConfig":
        """Builds the config from a dict of `to_json`."""
        linears = {k: LinearSpec(**v) for k, v in fields["linears"].items()}
        return cls(**{**fields, "linears": linears})


def _whole(name: str, value: int, least: int, most: int = MOST) -> None:
    whole = not isinstance(value, bool) and isinstance(value, numbers.Integral)
    if not whole or not least <= value <= most:
        raise UserError(
            f"{name} {str(value)[:40]} is not legal; legal: whole numbers from {least} to {most}."
        )


def _choice(name: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise UserError(f"{name} {value!r} is unknown; legal: {', '.join(legal)}.")
