"""Fields of a `ModelConfig` in which architectures differ, and their checks."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from sparse_dataflow.core.config.projections import MLP
from sparse_dataflow.core.config.settings import (
    MOST_EXPERTS,
    MOST_SIZE,
    Readable,
    between,
    positive,
    setting,
)
from sparse_dataflow.files.errors import UserError

SCALINGS = ("llama3", "linear", "dynamic", "yarn", "longrope")

READ_BY_SCALING = {
    "llama3": ("rotary_factor", "rotary_low", "rotary_high", "rotary_length"),
    "linear": ("rotary_factor",),
    "dynamic": ("rotary_factor",),
    "yarn": (
        "rotary_factor",
        "rotary_low",
        "rotary_high",
        "rotary_length",
        "rotary_attention",
    ),
    "longrope": ("rotary_factor", "rotary_length", "rotary_attention", "rotary_factors"),
}
"""Scaling -> the settings that it reads."""

WHOLE_PAIRS = ("yarn", "longrope")
"""Scalings that count pairs of features, so that an odd share is not legal."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RotarySettings(Readable):
    """The rotary positions of a `ModelConfig`.

    Attributes:
      rotary_scaling: how the frequencies change with rotary_factor; names are those of
        `transformers`.  "llama3": wavelengths above rotary_length / rotary_low are multiplied by
        the factor, those below rotary_length / rotary_high are unchanged, and between them the
        frequency is interpolated.  "yarn" (arXiv 2309.00071): as llama3, interpolated over the
        index of the frequency, and the rotations are scaled.  "linear": all wavelengths are
        multiplied.  "dynamic" and "longrope" (arXiv 2402.13753) change with the length of a
        context; here contexts are no longer than max_len and rotary_length, up to which dynamic
        changes nothing and longrope divides frequencies by rotary_factors.
    """

    rotary_base: float = setting(10_000.0, "Base of the rotary frequencies.", legal=positive(1e12))
    rotary_local_base: float = setting(
        0.0,
        "Base in layers with model.window, which then have no scaling; 0 is model.rotary_base.",
        legal=between(0, 1e12),
    )
    rotary_share: float = setting(
        1.0, "Share of a head's features, the first, that are rotated.", legal=positive(1)
    )
    rotary_scaling: str = setting(
        "llama3", "Scaling of rotary wavelengths by model.rotary_factor.", choices=SCALINGS
    )
    rotary_factor: float = setting(
        1.0, "Scaling factor of long rotary wavelengths; 1 is none.", legal=between(1, MOST_SIZE)
    )
    rotary_low: float = setting(
        1.0, "low_freq_factor of llama3, beta_slow of yarn.", legal=positive(MOST_SIZE)
    )
    rotary_high: float = setting(
        4.0, "high_freq_factor of llama3, beta_fast of yarn.", legal=positive(MOST_SIZE)
    )
    rotary_length: int = setting(
        8192,
        "original_max_position_embeddings of llama3, yarn and longrope, in tokens.",
        legal=between(1, MOST_SIZE),
    )
    rotary_attention: float = setting(
        0.0,
        "Scale of rotated queries and of keys with yarn and longrope; 0 is that of the paper.",
        legal=between(0, MOST_SIZE),
    )
    rotary_factors: tuple[float, ...] = setting(
        (), "Divisors of longrope's frequencies, its short_factor.", legal=positive(MOST_SIZE)
    )

    def rotated(self, head_width: int) -> int:
        """Returns how many features of a head are rotated, the first ones.

        As in `transformers`, an odd share is rounded up, and its frequencies are those of the odd
        width.
        """
        return 2 * math.ceil(int(head_width * self.rotary_share) / 2)

    def check_rotary(self, head_width: int) -> None:
        """Raises UserError if the settings do not fit the width of a head or each other."""
        width = self.rotated(head_width)
        share, whole = int(head_width * self.rotary_share), self.rotary_scaling in WHOLE_PAIRS
        if not 0 < width <= head_width or (whole and share % 2):
            raise UserError(
                f"rotary positions need an even number of rotated features, and {share} of "
                f"{head_width} are; legal: fewer heads, another model.head_dim or "
                "model.rotary_share, or learned positions."
            )
        factors = width // 2 if self.rotary_scaling == "longrope" else 0
        if len(self.rotary_factors) != factors:
            raise UserError(
                f"model.rotary_factors has {len(self.rotary_factors)} numbers with "
                f"model.rotary_scaling={self.rotary_scaling} and {width} rotated features; legal: "
                f"{factors}."
            )


SLIDING, FULL = "sliding", "full"
LAYER_TYPES = (SLIDING, FULL)
"""Kinds of layers: those with the window or the blocks, and those that see all tokens."""

ROTATED, UNROTATED = "rotated", "unrotated"
ROTARY_LAYERS = (ROTATED, UNROTATED)
"""Kinds of layers of a model with rotary positions: those that have them, and those without."""

EACH_HEAD, ALL_HEADS = "each_head", "all_heads"
QK_NORM_SCOPES = ("head", EACH_HEAD, ALL_HEADS)

SEQUENTIAL, PARALLEL, SHARED_NORM = "sequential", "parallel", "parallel_shared_norm"
RESIDUALS = (SEQUENTIAL, PARALLEL, SHARED_NORM)
"""How the residual stream connects attention and the MLP of a block."""

DENSE_TOKENS = 1024
"""Most keys whose scores XLA computes at once, where no kernel of attention runs; the scores of
more are computed in chunks."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AttentionSettings(Readable):
    """The attention of a `ModelConfig`.

    Attributes:
      attention_blocks: rules of the layout of attention, as in Big Bird (arXiv 2007.14062), and the
        tokens of a block: "window:2,global:1,random:3,block:128".  A token sees those before it in
        its own block, in the last `window` blocks, in the first `global` ones, and in `random`
        ones, the same in all layers and heads; `layouts.attention_blocks.register` adds rules.
      attention_cap: the scores s become cap * tanh(s / cap) before the softmax (Gemma 2, arXiv
        2408.00118).
      layer_types: "sliding+full" alternates, beginning with a layer with the window.  A list that
        is longer than the model counts from its start.
      rotary_layers: as layer_types; other positions ignore it (arXiv 2501.18795, SmolLM3).
      qk_norm_scope: "head" normalises over the width of a head, with one scale for all heads;
        "each_head" with a scale for each and no bias (StableLM 2); "all_heads" normalises over the
        features of all heads together (OLMo 2, arXiv 2501.00656).
    """

    qk_norm: bool = setting(False, "Normalise queries and keys before rotation.")
    qk_norm_scope: str = setting(
        "head",
        "Norms of queries and keys: over a head with a scale for all heads (head) or for each "
        "(each_head), or over all heads (all_heads).",
        choices=QK_NORM_SCOPES,
    )
    window: int = setting(
        0,
        "Last tokens that each token attends to, itself included; 0 is all.",
        legal=between(0, MOST_SIZE),
    )
    attention_blocks: str = setting(
        "",
        "Blocks of tokens that each block attends to: window:W,global:G,random:R,block:TOKENS,"
        "seed:N, one or more of the first three; empty is all.",
    )
    layer_types: str = setting(
        SLIDING,
        "Layers with model.window or model.attention_blocks (sliding) and without (full): names "
        "joined by +, repeated over the depth.",
    )
    rotary_layers: str = setting(
        ROTATED,
        "Layers with rotary positions (rotated) and without (unrotated): names joined by +, "
        "repeated over the depth.",
    )
    attention_cap: float = setting(
        0.0, "Soft cap of attention scores; 0 is none.", legal=between(0, MOST_SIZE)
    )
    attention_scalar: float = setting(
        0.0,
        "Attention scores are divided by its square root; 0 is the width of a head.",
        legal=between(0, MOST_SIZE),
    )

    def layer_type(self, layer: int) -> str:
        """Returns the kind of a layer, one of LAYER_TYPES."""
        return _repeated(self.layer_types, layer)

    def rotates(self, layer: int) -> bool:
        """Returns whether a layer of a model with rotary positions has them."""
        return _repeated(self.rotary_layers, layer) == ROTATED

    @property
    def mixed_layers(self) -> dict[str, str]:
        """Settings that give layers several kinds: name -> value."""
        return {
            name: value
            for name in ("layer_types", "rotary_layers")
            if "+" in (value := getattr(self, name))
        }

    def check_layer_types(self) -> None:
        """Raises UserError if a kind of layer is unknown, or `layer_types` differs without a
        window."""
        for field, legal in (("layer_types", LAYER_TYPES), ("rotary_layers", ROTARY_LAYERS)):
            value = getattr(self, field)
            if not set(value.split("+")) <= set(legal):
                raise UserError(
                    f"model.{field}={value[:60]} is unknown. Legal: {', '.join(legal)}, or several "
                    f"of them as in {'+'.join(legal)}."
                )
        limited = self.window or self.attention_blocks
        if FULL in self.layer_types.split("+") and not limited:
            raise UserError(
                f"model.layer_types={self.layer_types[:60]} needs a window or attention_blocks; "
                f"legal without them: {SLIDING}."
            )


_kinds = functools.lru_cache(8)(lambda names: names.split("+"))


def _repeated(names: str, layer: int) -> str:
    kinds = _kinds(names)
    return kinds[layer % len(kinds)]


def shortest_layer_types(kinds: Sequence[str]) -> str:
    """Returns the shortest `layer_types` or `rotary_layers` that gives the kinds of all layers."""
    for period in range(1, len(kinds)):
        # A list that repeats equals itself, shifted by its period.
        if kinds[period:] == kinds[:-period]:
            return "+".join(kinds[:period])
    return "+".join(kinds)


EXPERT_TRAINING = ("expert_capacity", "balance_loss", "router_z_loss")
"""Fields of `ModelConfig` that say how experts are trained, not what they compute."""

MIXTURE = ("experts", "top_k", "prototypes", "shared_expert", "shared_gate", "raw_gates",
           *EXPERT_TRAINING)  # fmt: skip
"""Fields of `ModelConfig` that only a mixture of experts has."""

FAMILY_FIELDS = (
    "num_kv_heads",
    "head_dim",
    "fused_qkv",
    "gated_mlp",
    *(field.name for field in dataclasses.fields(AttentionSettings)),
    "pre_norms",
    "post_norms",
    "residual",
    "residual_scale",
    "scaled_embeddings",
    "embedding_scale",
    "logit_cap",
    "logit_divisor",
    "output_bias",
    "tied_embeddings",
    "biases",
    "norm_epsilon",
    *(field.name for field in dataclasses.fields(RotarySettings)),
    *MIXTURE,
)
"""Fields of `ModelConfig` in which families differ from GPT-3, whose values are the defaults."""


MOST_BLOCKS = 2**28
"""Upper bound of the stored blocks of one projection, summed over layers."""


def check_attention(model: Any) -> None:
    """Checks that heads fit the width, the key/value heads and the position encoding."""
    if not model.head_dim and model.d_model % model.num_heads:
        raise UserError(
            f"d_model {model.d_model} is not divisible by num_heads {model.num_heads}; "
            f"legal head counts: {_divisors(model.d_model)}."
        )
    if model.num_heads % model.kv_heads:
        raise UserError(
            f"num_kv_heads {model.num_kv_heads} does not divide num_heads {model.num_heads}; "
            f"legal: {_divisors(model.num_heads)}."
        )
    if model.positions == "rotary":
        model.check_rotary(model.head_width)
    model.check_layer_types()
    if model.attention_blocks:
        from sparse_dataflow.core.config.attention_rules import parse

        parse(model.attention_blocks)  # Refuses an illegal text.
    if model.attention_blocks and model.window:
        raise UserError(
            f"model.window={model.window} with model.attention_blocks={model.attention_blocks[:60]}"
            ", whose rule window is in blocks; legal with it: 0."
        )
    if model.rotary_local_base and not model.window:
        raise UserError(
            f"model.rotary_local_base={model.rotary_local_base:g} is for layers with a window; "
            "legal with model.window=0: 0."
        )
    if model.rotary_low >= model.rotary_high:
        raise UserError(
            f"rotary_low {model.rotary_low:g} is not below rotary_high {model.rotary_high:g}; "
            f"legal: above 0, below {model.rotary_high:g}."
        )


def check_norms(model: Any) -> None:
    """Checks that a block has a norm for each of its inputs or outputs."""
    if not model.pre_norms and not model.post_norms:
        raise UserError(
            "model.pre_norms=no and model.post_norms=no leave a block without norms; legal: one of "
            "them yes."
        )
    if not model.pre_norms and model.residual == SHARED_NORM:
        raise UserError(
            f"model.residual={SHARED_NORM} with model.pre_norms=no, which has no norm to share; "
            f"legal: {SEQUENTIAL}, {PARALLEL}."
        )
    if not model.qk_norm and model.qk_norm_scope != QK_NORM_SCOPES[0]:
        raise UserError(
            f"model.qk_norm_scope={model.qk_norm_scope} needs model.qk_norm=yes; legal without: "
            f"{QK_NORM_SCOPES[0]}."
        )


def check_experts(model: Any) -> None:
    """Checks the groups of experts, and that experts have the storage that a mixture can."""
    if not model.experts:
        names = ("top_k", "prototypes", "expert_capacity", "shared_expert", "shared_gate",
                 "raw_gates")  # fmt: skip
        if given := [name for name in names if name in model.family_fields()]:
            raise UserError(
                f"model.{given[0]}={getattr(model, given[0])} needs experts; legal with it: "
                f"model.experts of 1 to {MOST_EXPERTS}."
            )
        return
    if model.experts % model.prototypes:
        raise UserError(
            f"model.prototypes={model.prototypes} does not divide model.experts={model.experts}; "
            f"legal: {_divisors(model.experts)}."
        )
    # A token goes to `top_k` experts of each group of prototypes.
    group = model.experts // model.prototypes
    if model.top_k > group:
        raise UserError(
            f"model.top_k={model.top_k} is above the {group} experts of a group; legal: 1 to "
            f"{group}."
        )
    if model.shared_gate and not model.shared_expert:
        raise UserError("model.shared_gate=yes needs a shared expert; legal without one: no.")
    if model.shared_expert > 1 and set(MLP) & set(model.sparse_projections):
        raise UserError(
            f"model.shared_expert={model.shared_expert} with block-sparse experts, whose layouts "
            "it shares; legal: 0, 1, or sparsity.projections of attention alone."
        )
    if model.quantized:
        raise UserError(
            f"model.precision={model.precision} with model.experts={model.experts}; legal with "
            "experts: compute_dtype."
        )
    # Experts are stacked on one more axis.  A kind of weight says whether its product has one.
    specs = {name: model.linear(name) for name in model.projections if name in MLP}
    for name, spec in specs.items():
        spec.weight.require(
            "experts",
            f"{name} of experts",
            "another sparsity.pattern, or sparsity.projections of attention alone",
        )
        if spec.rank:
            raise UserError(
                f"{name} has a low-rank term of {spec.rank}, and experts can have none; legal: "
                "sparsity.rank=0, or sparsity.projections of attention alone."
            )
    if model.density_by_depth and any(s.weight.stores_blocks for s in specs.values()):
        raise UserError(
            "The density of experts varies by depth; legal for experts: one density in all layers."
        )


def check_blocks(model: Any) -> None:
    """Checks that weights fit their projections, their Hadamard transform and MOST_BLOCKS."""
    for name, spec in dict(model.linears).items():
        fan_in, fan_out = model.projection_shape(name)
        spec.weight.check(name, spec, (fan_in, fan_out))
        # fan_in & -fan_in is the largest power of 2 that divides it.
        if spec.hadamard and fan_in % spec.hadamard:
            raise UserError(
                f"sparsity.hadamard={spec.hadamard} does not divide the {fan_in} input features of "
                f"{name}; legal: powers of 2 up to {fan_in & -fan_in}."
            )
    for name in model.sparse_projections:
        spec, (fan_in, fan_out) = model.linear(name), model.projection_shape(name)
        # A layer with a multiplier of the density counts as so many layers.
        layers = sum(model.density_by_depth) or model.num_layers
        layers *= model.stored_copies(name)
        if layers * fan_in * fan_out / spec.block**2 * spec.density > MOST_BLOCKS:
            raise UserError(
                f"{name} has more than {MOST_BLOCKS} blocks with --block={spec.block}; legal: "
                "larger blocks."
            )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
