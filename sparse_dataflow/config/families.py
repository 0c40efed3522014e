"""Model families: the fields in which the shape of a published family differs from GPT-3's."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

EXPERT_TRAINING = ("expert_capacity", "balance_loss", "router_z_loss")
"""Fields of `ModelConfig` that say how experts are trained, not what they compute."""

MIXTURE = ("experts", "top_k", "prototypes", "shared_expert", *EXPERT_TRAINING)
"""Fields of `ModelConfig` that only a mixture of experts has."""

FAMILY_FIELDS = (
    "num_kv_heads",
    "head_dim",
    "fused_qkv",
    "gated_mlp",
    "qk_norm",
    "window",
    "tied_embeddings",
    "biases",
    "norm_epsilon",
    "rotary_base",
    "rotary_factor",
    "rotary_low",
    "rotary_high",
    "rotary_length",
    *MIXTURE,
)
"""Fields of `ModelConfig` in which families differ from GPT-3, whose values are the defaults."""

_LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "positions": "rotary",
    "activation": "silu",
    "gated_mlp": True,
    "fused_qkv": False,
    "biases": (),
    "tied_embeddings": False,
}

FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gpt2": {},
        "gpt3": {},
        "opt": {"activation": "relu"},
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "qwen2": {**_LLAMA, "biases": ("q", "k", "v")},
        "qwen3": {**_LLAMA, "qk_norm": True},
    }
)
"""Family -> fields of `ModelConfig`.  Sizes, `norm_epsilon`, `rotary_*`, `window` and
`tied_embeddings` differ between the models of a family; see `presets.SIZES`."""
