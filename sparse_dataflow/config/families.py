"""Model families: the fields in which the shape of a published family differs from GPT-3's."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

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
