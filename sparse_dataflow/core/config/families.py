"""Model families: the fields in which the shape of a published family differs from GPT-3's."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sparse_dataflow.core.config.attention_kinds import AttentionSettings
from sparse_dataflow.core.config.rotary_scaling import RotarySettings

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
    "post_norms",
    "scaled_embeddings",
    "logit_cap",
    "tied_embeddings",
    "biases",
    "norm_epsilon",
    *(field.name for field in dataclasses.fields(RotarySettings)),
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

_GEMMA: dict[str, Any] = {
    **_LLAMA,
    "activation": "gelu",
    "tied_embeddings": True,
    "post_norms": True,
    "scaled_embeddings": True,
    "window": 4096,
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
        "phi3": _LLAMA,
        "gemma2": {
            **_GEMMA,
            "layer_types": "sliding+full",
            "attention_cap": 50.0,
            "logit_cap": 30.0,
        },
        "gemma3": {
            **_GEMMA,
            "qk_norm": True,
            "layer_types": "sliding+sliding+sliding+sliding+sliding+full",
            "rotary_base": 1e6,
            "rotary_local_base": 1e4,
        },
    }
)
"""Family -> fields of `ModelConfig`.  Sizes, `norm_epsilon`, `rotary_*`, `window` and
`tied_embeddings` differ between the models of a family; see `presets.SIZES`."""
