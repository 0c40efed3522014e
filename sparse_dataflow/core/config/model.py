"""The shape of a decoder-only transformer, the storage of its projections, and shapes by scale."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparse_dataflow.core.config import arguments, remat
from sparse_dataflow.core.config import attention_settings as families
from sparse_dataflow.core.config.activations import ACTIVATION_NAMES, ACTIVATIONS
from sparse_dataflow.core.config.attention_settings import (
    FAMILY_FIELDS,
    AttentionSettings,
    RotarySettings,
)
from sparse_dataflow.core.config.projections import (
    KEY_NORMS,
    MLP,
    PRECISIONS,
    PROJECTIONS,
    QUERY_NORMS,
    LinearSpec,
)
from sparse_dataflow.core.config.settings import (
    ADOPTED,
    MOST_EXPERTS,
    MOST_SIZE,
    between,
    positive,
    setting,
    validate,
)
from sparse_dataflow.files.errors import UserError

if TYPE_CHECKING:
    from sparse_dataflow.core.config.attention_rules import AttentionBlocks

DENSE = LinearSpec()
"""Spec of a dense projection."""

DTYPES = ("float32", "bfloat16")
NORMS = ("layernorm", "rmsnorm")
POSITIONS = ("learned", "rotary", "none")
GROWN = ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff")
"""Fields of `ModelConfig` in which a model may be larger than the one whose weights it begins
with."""

REMATS = ("none", "keep", "full")
"""Kinds of remat that the search of layouts prices, for all blocks alike."""

PARAMETRIZATIONS = ("standard", "supar")

SUPAR_WIDTH = 256
"""d_model at which "supar" equals "standard" for a dense model with heads of width SUPAR_HEAD.

Under SuPar, a learning rate tuned at this width holds for every width and density.
"""

SUPAR_HEAD = 64
"""Head width at which "supar" equals "standard"."""

MOST_LAYERS = 2**14
"""Upper bound of the number of layers."""


@dataclasses.dataclass(frozen=True, repr=False)
class ModelConfig(AttentionSettings, RotarySettings):
    """A decoder-only transformer: blocks of attention and an MLP.

    The defaults are GPT-3 (arXiv 2005.14165, section 2.1).  `runs.families` has the fields in
    which other families differ; `model.gpt` lists the parameters.  The help of each setting, which
    `--help=all` and the page of settings list, explains it; "Attributes" has what that leaves out.

    Attributes:
      norm: normalisation before each half of a block, and of queries and keys with qk_norm.  A
        layernorm has biases, an rmsnorm has none.
      residual: "parallel" (arXiv 2204.06745) and "parallel_shared_norm" (Phi 2) add the outputs of
        attention and of the MLP to the residual stream that both read.
      activation: a row of `config.activations`.
      remat: a kind for all blocks, or counts of blocks; see `config.remat`.
      precision: 8-bit numbers have a scale for each row that a product sums (`ops.quantized`):
        "fp8" (e4m3, gradients e5m2) or "int8".  Low-rank terms, attention and the output layer keep
        compute_dtype.
      parametrization: "supar" keeps the scale of activations and of their updates constant over
        width and density.
      num_kv_heads: grouped-query attention (arXiv 2305.13245): query head h reads key/value head
        h // (num_heads / num_kv_heads).  `kv_heads` is the resolved number.
      head_dim: width of a head, 0 for the default; `head_width` is the resolved width.
      gated_mlp: the MLP is mlp_out(activation(mlp_gate(x)) * mlp_in(x)) (arXiv 2002.05202), not
        mlp_out(activation(mlp_in(x))).
      experts: each expert is an MLP of d_ff with the storage of `linears`; all experts of a layer
        have one layout.
      top_k: outputs are summed, times their router probabilities; with top_k above 1 these are
        divided by their sum (Mixtral, arXiv 2401.04088) unless raw_gates, with 1 they are not
        (Switch, arXiv 2101.03961).
      prototypes: each group of experts has a softmax of its own (M6-T, arXiv 2105.15082).
      expert_capacity: later choices of an expert that is full are dropped.  A device and
        micro-batch count by themselves; evaluation and generation drop nothing.
      balance_loss: the loss is 1 in each layer where all experts have the same load (arXiv
        2101.03961, section 2.2).
      router_z_loss: the loss of arXiv 2202.08906, section 3.2.
      linears: (projection name, LinearSpec) pairs or a mapping of them; missing names are dense.
        Empty in a `RunConfig`, whose `sparsity` says what is stored.
      density_by_depth: per-layer multipliers of the density of every block-sparse projection, first
        layer first.  Empty means 1 everywhere.  Equal multipliers are folded into `linears`, which
        leaves it empty.
      bidirectional: whether a token also attends to the tokens after it.  training.objective=masked
        sets it; no setting.
      shared_layers: whether all layers apply one block, whose parameters exist once.  A phase of
        the evolution method shared_to_own; no setting.
      prompt_vectors: trained vectors in front of each row of tokens; see `model.adapters`.
        training.prompt_vectors sets it; no setting.
      side_width: features of the state of a side network; see `model.side`.  training.side_width
        sets it; no setting.
      left_out: hidden features of each MLP that are left out, beside the d_ff that take part.  A
        phase of the evolution method omit_features; no setting.
      seed: offset of the patterns, and so the seed of random ones.

    Raises:
      UserError: a value is not legal, or two do not go together; names the legal values.

    Examples:
        >>> shape = {"num_layers": 2, "d_model": 128, "num_heads": 2, "d_ff": 512}
        >>> config = sd.ModelConfig(**shape, vocab_size=512, max_len=64)
        >>> spec = sd.LinearSpec("block_sparse", "monarch", density=0.125, block=16)
        >>> config.with_linears(spec, ["mlp_in", "mlp_out"]).sparse_projections
        ('mlp_in', 'mlp_out')
    """

    num_layers: int = setting(help="Layers of the model.", legal=between(1, MOST_LAYERS))
    d_model: int = setting(help="Residual width, in features.", legal=between(1, MOST_SIZE))
    num_heads: int = setting(
        help="Attention heads; must divide model.d_model, unless model.head_dim is given.",
        legal=between(1, MOST_SIZE),
    )
    d_ff: int = setting(help="Width of the MLP, in features.", legal=between(1, MOST_SIZE))
    vocab_size: int = setting(
        help="Tokens of the vocabulary; bpe learns 257 or more.", legal=between(1, MOST_SIZE)
    )
    max_len: int = setting(
        help="Learned positions; the longest training.sequence.", legal=between(1, MOST_SIZE)
    )
    linears: tuple[tuple[str, LinearSpec], ...] | Mapping[str, LinearSpec] = ()
    density_by_depth: tuple[float, ...] = ()
    norm: str = setting(
        "layernorm", "Normalisation of the inputs of attention and MLP.", choices=NORMS
    )
    positions: str = setting("learned", "Position encoding.", choices=POSITIONS)
    activation: str = setting("gelu", "Activation of the MLP.", choices=ACTIVATION_NAMES)
    remat: str = setting(
        "none",
        "Activations recomputed in the backward pass: none, all but the outputs of products and of "
        "attention (keep), or all (full); "
        "offload copies those of matmuls to host memory. Layers may differ: offload+full:4,none:8. "
        "With auto the planner chooses.",
        resumed=ADOPTED,
    )
    compute_dtype: str = setting(
        "float32",
        "Dtype of activations, and of weights in products; master weights stay float32.",
        choices=DTYPES,
    )
    precision: str = setting(
        "compute_dtype",
        "Operands of the projections' products in training: fp8 and int8 are quantised, by the "
        "extra `quantized`; layouts must have equal groups, as monarch's and shuffle's.",
        choices=PRECISIONS,
    )
    parametrization: str = setting(
        "standard",
        "supar scales initialisation and learning rate with width and density (arXiv 2405.15743).",
        choices=PARAMETRIZATIONS,
    )
    num_kv_heads: int = setting(
        0, "Heads of keys and values; 0 is model.num_heads.", legal=between(0, MOST_SIZE)
    )
    head_dim: int = setting(
        0, "Width of a head, in features; 0 is d_model / num_heads.", legal=between(0, MOST_SIZE)
    )
    fused_qkv: bool = setting(True, "One projection qkv, or separate q, k and v.")
    gated_mlp: bool = setting(False, "Multiply mlp_in by the activation of a projection mlp_gate.")
    tied_embeddings: bool = setting(True, "Use the token embedding as the output layer.")
    biases: tuple[str, ...] = setting(
        PROJECTIONS,
        "Projections with a bias: all (of the model), none or names.",
        choices=PROJECTIONS,
    )
    norm_epsilon: float = setting(1e-5, "Added to the variance in each norm.", legal=positive(1))
    pre_norms: bool = setting(True, "Normalise the inputs of attention and of the MLP.")
    post_norms: bool = setting(
        False, "Normalise the outputs of attention and of the MLP, before they are added."
    )
    residual: str = setting(
        families.SEQUENTIAL,
        "The MLP reads the residual stream after attention (sequential), or before it (parallel), "
        "also with the same norm as attention (parallel_shared_norm).",
        choices=families.RESIDUALS,
    )
    residual_scale: float = setting(
        1.0,
        "Factor of the outputs of attention and of the MLP, before they are added.",
        legal=positive(MOST_SIZE),
    )
    scaled_embeddings: bool = setting(
        False, "Multiply the embedding of a token by the square root of model.d_model."
    )
    embedding_scale: float = setting(
        1.0, "Factor of the embedding of a token.", legal=positive(MOST_SIZE)
    )
    logit_cap: float = setting(
        0.0, "Soft cap of the logits; 0 is none.", legal=between(0, MOST_SIZE)
    )
    logit_divisor: float = setting(1.0, "The logits are divided by it.", legal=positive(MOST_SIZE))
    output_bias: bool = setting(False, "Give the output layer a bias for each token.")
    experts: int = setting(
        0, "Experts of each MLP; 0 is one MLP for all tokens.", legal=between(0, MOST_EXPERTS)
    )
    top_k: int = setting(
        1, "Experts per token in each group of experts.", legal=between(1, MOST_EXPERTS)
    )
    prototypes: int = setting(
        1,
        "Equal groups of experts; a token uses model.top_k of each group.",
        legal=between(1, MOST_EXPERTS),
    )
    shared_expert: int = setting(
        0,
        "Width of an expert that every token uses, as a multiple of model.d_ff; 0 is none.",
        legal=between(0, MOST_EXPERTS),
    )
    shared_gate: bool = setting(
        False, "Multiply the shared expert's output by the sigmoid of a product with its input."
    )
    raw_gates: bool = setting(
        False, "Router probabilities of a token's experts are not divided by their sum."
    )
    expert_capacity: float = setting(
        0.0,
        "Most tokens of an expert in training, as a multiple of the mean; 0 is no limit.",
        legal=between(0, MOST_EXPERTS),
    )
    balance_loss: float = setting(
        0.01, "Weight of the load-balance loss of experts.", legal=between(0, 1000)
    )
    router_z_loss: float = setting(
        0.001, "Weight of the z-loss of routers.", legal=between(0, 1000)
    )
    mask_documents: bool = setting(
        False,
        "Attention in training and held-out losses stays within a document; otherwise it covers "
        "the whole window.",
    )
    bidirectional: bool = False
    shared_layers: bool = False
    prompt_vectors: int = 0
    side_width: int = 0
    left_out: int = 0
    seed: int = 0

    def __post_init__(self):
        # Files of earlier versions say whether there is a shared expert.
        if isinstance(self.shared_expert, bool):
            object.__setattr__(self, "shared_expert", int(self.shared_expert))
        validate(self, "model")
        if self.remat != remat.AUTO:
            remat.terms(self.remat)  # Refuses an illegal text.
        object.__setattr__(self, "seed", arguments.argument("seed", int, self.seed))
        if self.seed < 0:
            raise UserError(f"seed={self.seed} is not legal: it must be 0 or more.")
        families.check_attention(self)
        families.check_norms(self)
        self.selected(self.biases, "model.biases")
        specs: Any = self.linears
        with contextlib.suppress(TypeError, ValueError):
            specs = dict(specs)
        specs = arguments.argument("linears", Mapping[str, LinearSpec], specs)
        # A config is hashed and compared, so specs have one order.
        linears = tuple(sorted(specs.items()))
        for name, _ in linears:
            if name not in self.projections:
                raise UserError(
                    f"projection {name!r} is unknown; legal: {', '.join(self.projections)}."
                )
        object.__setattr__(self, "linears", linears)
        # Before the checks below, which read it: equal multipliers are none.
        self._settle_depth()
        families.check_experts(self)
        if self.quantized:
            self.require("quantised_products", f"model.precision={self.precision}", PRECISIONS[0])
        families.check_blocks(self)

    def selected(self, names: tuple[str, ...], path: str) -> tuple[str, ...]:
        """Returns the projections that a setting names, in the model's order.

        Args:
          names: projections; PROJECTIONS means all of the model.
          path: of the setting, such as "model.biases".

        Raises:
          UserError: the model has no projection of a name.
        """
        absent = set(names) - set(self.projections)
        if absent and tuple(names) != PROJECTIONS:
            raise UserError(
                f"{path} names {', '.join(sorted(absent))}, which the model does not have; legal: "
                f"{', '.join(self.projections)}, all, none."
            )
        return tuple(name for name in self.projections if name in names)

    def _settle_depth(self):
        """Checks `density_by_depth`, and folds equal multipliers into `linears`."""
        multipliers = tuple(
            arguments.argument("density_by_depth", Sequence[float], self.density_by_depth)
        )
        if multipliers and len(multipliers) != self.num_layers:
            raise UserError(
                f"density_by_depth has {len(multipliers)} numbers for {self.num_layers} layers; "
                "legal: one for each layer, or none."
            )
        for number in multipliers:
            if number <= 0:
                raise UserError(f"density_by_depth has {str(number)[:40]}; legal: numbers above 0.")
        specs = {name: self.linear(name) for name in self.sparse_projections}
        scaled = {
            number: {name: spec.scaled(number) for name, spec in specs.items()}
            for number in dict.fromkeys(multipliers)
        }
        # One multiplier is another density, so that equal models have equal configs.
        if not specs or len(scaled) < 2:
            linears = dict(self.linears)
            for scaled_specs in scaled.values():
                linears |= scaled_specs
            object.__setattr__(self, "linears", tuple(sorted(linears.items())))
            multipliers = ()
        object.__setattr__(self, "density_by_depth", tuple(map(float, multipliers)))

    def linear(self, projection: str) -> LinearSpec:
        """Returns the spec of one projection before `density_by_depth`; dense if unset."""
        return dict(self.linears).get(projection, DENSE)

    def projection_shape(self, projection: str) -> tuple[int, int]:
        """Returns (input features, output features) of one projection."""
        queries, keys = self.num_heads * self.head_width, self.kv_heads * self.head_width
        return {
            "qkv": (self.d_model, queries + 2 * keys),
            "q": (self.d_model, queries),
            "k": (self.d_model, keys),
            "v": (self.d_model, keys),
            "attn_out": (queries, self.d_model),
            "mlp_gate": (self.d_model, self.d_ff),
            "mlp_in": (self.d_model, self.d_ff),
            "mlp_out": (self.d_ff, self.d_model),
        }[projection]

    def inner_width(self, projection: str) -> int:
        """Returns the features between the products of a weight, such as the rank of two factors;
        0 for a single product."""
        spec = self.linear(projection)
        return spec.weight.inner_width(spec, self.projection_shape(projection))

    def require(self, ability: str, feature: str, legal: str = "") -> None:
        """Refuses a feature that the weight of a projection does not offer.

        Args:
          ability: of `weights.kind.ABILITIES`.
          feature: words that begin the sentence.
          legal: what is legal instead; the kinds that offer it if empty.

        Raises:
          UserError: naming the projection, its kind and what is legal.
        """
        for name, spec in dict(self.linears).items():
            spec.weight.require(ability, f"{name}: {feature}", legal)

    def lacks(self, ability: str) -> bool:
        """Returns whether the weight of any projection does not offer one of
        `weights.kind.ABILITIES`."""
        return any(ability not in spec.weight.offers for spec in dict(self.linears).values())

    def with_linears(self, spec: LinearSpec, projections=PROJECTIONS) -> "ModelConfig":
        """Returns this config with `spec` for the named projections; PROJECTIONS means all."""
        names = self.selected(tuple(projections), "projections")
        return dataclasses.replace(self, linears={**dict(self.linears), **{n: spec for n in names}})

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the model's projections, in the order of the forward pass."""
        absent: tuple[str, ...] = ("q", "k", "v") if self.fused_qkv else ("qkv",)
        absent += () if self.gated_mlp else ("mlp_gate",)
        return tuple(name for name in PROJECTIONS if name not in absent)

    @property
    def stored_layers(self) -> int:
        """Blocks whose parameters exist: one that all layers share, or one for each layer."""
        return 1 if self.shared_layers else self.num_layers

    @property
    def with_all_features(self) -> "ModelConfig":
        """The model with the hidden features that it leaves out."""
        return dataclasses.replace(self, d_ff=self.d_ff + self.left_out, left_out=0)

    @property
    def left_out_part(self) -> "ModelConfig":
        """The model whose MLPs have the hidden features that are left out, and nothing else."""
        # The bias of mlp_out is of output features, none of which is left out.
        biases = tuple(name for name in self.biases if name != "mlp_out")
        names = [name for name in self.projections if name in biases]
        return dataclasses.replace(self, d_ff=self.left_out, left_out=0, biases=tuple(names))

    @property
    def active_experts(self) -> int:
        """Experts of width d_ff that compute a token, with the width of the shared one; 1 for a
        model without experts."""
        return self.prototypes * self.top_k + self.shared_expert if self.experts else 1

    def stored_copies(self, projection: str) -> int:
        """Returns how many weights of a projection a layer stores: one, or one for each expert of
        width d_ff."""
        return self.experts + self.shared_expert if self.experts and projection in MLP else 1

    def refuse_experts(self, feature: str, legal: str) -> None:
        """Refuses a model with experts where a feature does not have them.

        Args:
          feature: words that begin the sentence.
          legal: what is legal with experts.

        Raises:
          UserError: the model has experts.
        """
        if self.experts:
            raise UserError(
                f"{feature} with model.experts={self.experts} is not supported; legal with "
                f"experts: {legal}."
            )

    def refuse_bidirectional(self, feature: str, legal: str) -> None:
        """Refuses a model of training.objective=masked where a feature reads from left to right.

        Args:
          feature: words that begin the sentence.
          legal: what is legal with such a model.

        Raises:
          UserError: the model is bidirectional.
        """
        if self.bidirectional:
            raise UserError(
                f"{feature} reads text from left to right, and the model was trained with "
                f"training.objective=masked; legal with it: {legal}."
            )

    def refuse_additions(self, feature: str, legal: str) -> None:
        """Refuses a model with prompt vectors or a side network where a feature has neither.

        Args:
          feature: words that begin the sentence.
          legal: what is legal with such a model.

        Raises:
          UserError: the model has one of them.
        """
        if self.prompt_vectors:
            raise UserError(
                f"{feature} has no place for the trained vectors of training.prompt_vectors="
                f"{self.prompt_vectors}; legal with them: {legal}."
            )
        if self.side_width:
            raise UserError(
                f"{feature} has no place for the side network of training.side_width="
                f"{self.side_width}; legal with it: {legal}."
            )

    def side_shapes(self, section: str) -> dict[str, tuple[int, int]]:
        """Returns the shapes of the arrays of the side network in a section; "embed" has none, and
        a model without one."""
        width, model = self.side_width, self.d_model
        shapes = {"down": (model, width), "in": (width, width), "out": (width, width)}
        if section == "head":
            shapes["up"] = (width, model)
        return shapes if width and section != "embed" else {}

    def refuse_blocks(self, feature: str) -> None:
        """Raises UserError if attention is to blocks, which a file, by its words, cannot say."""
        if self.attention_blocks:
            raise UserError(
                f"{feature} has no model.attention_blocks={self.attention_blocks[:60]}; legal with "
                "it: the run folder, or a model in memory."
            )

    def dropless(self) -> "ModelConfig":
        """Returns the model that evaluation and generation use: no expert drops a token."""
        return dataclasses.replace(self, expert_capacity=0.0) if self.expert_capacity else self

    @property
    def longest(self) -> int:
        """Longest context in tokens: max_len, or rotary_length with longrope."""
        is_long = self.positions == "rotary" and self.rotary_scaling == "longrope"
        return min(self.max_len, self.rotary_length) if is_long else self.max_len

    def row(self, sequence: int) -> int:
        """Returns the tokens of a row of text, with the prompt vectors in front."""
        return sequence + self.prompt_vectors

    def check_context(self, tokens: int, name: str = "") -> None:
        """Raises UserError if a context, by its name, is longer than the model's positions.

        Args:
          tokens: of a row, with the prompt vectors in front.
        """
        front = self.prompt_vectors
        learned = self.positions == "learned"
        is_limited = learned or self.rotary_scaling in ("dynamic", "longrope")
        # In this order: of an exported program the tokens are a symbol without an upper limit here.
        if is_limited and tokens > self.longest:
            scaled = "" if learned else f" of {self.rotary_scaling} scaling"
            more = ", or model.positions=rotary" if learned and not front else ""
            more = f" after {front} prompt vectors, or fewer vectors" if front else more
            raise UserError(
                f"{name or f'Sequence of {tokens - front} tokens'} is longer than the model's "
                f"{self.longest} positions{scaled}; "
                f"legal: 1 to {max(1, self.longest - front)}{more}."
            )

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """Width of a head, in features."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the norms of a block over the residual stream, by what reads or writes it."""
        before = ("norm1",) if self.residual == families.SHARED_NORM else ("norm1", "norm2")
        after = ("norm1_out", "norm2_out") if self.post_norms else ()
        return (before if self.pre_norms else ()) + after

    @property
    def qk_norms(self) -> tuple[str, str]:
        """Names of the norms of queries and of keys."""
        return ("q_norm", "k_norm") if self.qk_norm_scope == "head" else (QUERY_NORMS, KEY_NORMS)

    def qk_norm_shape(self, heads: int) -> tuple[int, ...]:
        """Returns the shape of the scale of the norm of `heads` heads of queries or of keys."""
        each = {"head": (self.head_width,), families.EACH_HEAD: (heads, self.head_width)}
        return each.get(self.qk_norm_scope, (heads * self.head_width,))

    @property
    def blocks(self) -> "AttentionBlocks | None":
        """Blocks of tokens that attention reads, in layers with `attention_blocks`."""
        from sparse_dataflow.core.config.attention_rules import parse

        return parse(self.attention_blocks) if self.attention_blocks else None

    @property
    def attention_width(self) -> float:
        """Number whose square root divides the attention scores."""
        return self.attention_scalar or self.head_width

    def family_fields(self) -> dict[str, object]:
        """Returns the values of FAMILY_FIELDS that differ from GPT-3's."""
        default = {field.name: field.default for field in dataclasses.fields(self)}
        return {
            name: getattr(self, name)
            for name in FAMILY_FIELDS
            if getattr(self, name) != default[name]
        }

    @property
    def supar(self) -> bool:
        """Whether the parametrization is SuPar."""
        return self.parametrization == "supar"

    @property
    def quantized(self) -> bool:
        """Whether the operands of the projections' products are quantised."""
        return self.precision != PRECISIONS[0]

    @property
    def has_fused_mlp(self) -> bool:
        """Whether an op computes a whole MLP, see `model.mlp`: gated ones without biases, and those
        with a bias and no gate, whose weights are stored blocks and nothing else."""
        biases = {"mlp_gate", "mlp_in"} & set(self.biases)
        fused = not biases if self.gated_mlp else biases and ACTIVATIONS[self.activation].fused
        specs = [self.linear(name) for name in self.projections if name in MLP]
        plain = all(s.weight.stores_blocks and not s.rank and not s.hadamard for s in specs)
        return bool(fused) and plain and not self.quantized

    @property
    def weight_words(self) -> tuple[str, ...]:
        """Words of the kinds of its weights, sorted, without dense ones."""
        kinds = {spec.weight for spec in dict(self.linears).values()} - {DENSE.weight}
        return tuple(sorted(weight.words for weight in kinds))

    @property
    def partial_projections(self) -> tuple[str, ...]:
        """Names of the projections that are a part of a dense weight, which may change."""
        linears = dict(self.linears)
        return tuple(name for name, spec in linears.items() if spec.weight.is_partial)

    @property
    def masked_projections(self) -> tuple[str, ...]:
        """Names of the projections that are whole kernels under a mask."""
        linears = dict(self.linears)
        return tuple(name for name, spec in linears.items() if spec.weight.has_mask)

    @property
    def sparse_projections(self) -> tuple[str, ...]:
        """Names of the block-sparse projections."""
        linears = dict(self.linears)
        return tuple(name for name, spec in linears.items() if spec.weight.stores_blocks)

    def to_json(self) -> dict:
        """Returns a JSON-compatible dict; `from_json` is its inverse."""
        linears = {name: dict(vars(spec)) for name, spec in dict(self.linears).items()}
        names = ("density_by_depth", "biases", "rotary_factors")
        lists = {name: list(getattr(self, name)) for name in names}
        return {**vars(self), "linears": linears, **lists}

    @classmethod
    def from_json(cls, fields: Mapping) -> "ModelConfig":
        """Builds the config from a dict of `to_json`; absent fields take their defaults."""
        linears = {k: LinearSpec(**v) for k, v in fields["linears"].items()}
        # JSON has lists, and a config must be hashable.
        tuples = {"biases": tuple(fields.get("biases", PROJECTIONS))}
        tuples["rotary_factors"] = tuple(fields.get("rotary_factors", ()))
        return cls.from_file(**{**fields, "linears": linears, **tuples})

    @classmethod
    def from_file(cls, **fields: Any) -> "ModelConfig":
        """Builds the config from fields that this or an earlier version wrote."""
        if isinstance(text := fields.get("remat"), str):
            fields["remat"] = remat.current(text)
        return cls(**fields)
