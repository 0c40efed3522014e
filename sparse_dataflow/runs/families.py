"""Model families and published sizes: rows of two tables."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sparse_dataflow.core.config.attention_settings import (
    ALL_HEADS,
    EACH_HEAD,
    PARALLEL,
    SHARED_NORM,
)
from sparse_dataflow.core.config.model import ModelConfig

_LLAMA: dict[str, object] = {
    "norm": "rmsnorm",
    "positions": "rotary",
    "activation": "silu",
    "gated_mlp": True,
    "fused_qkv": False,
    "biases": (),
    "tied_embeddings": False,
}

_GEMMA: dict[str, object] = {
    **_LLAMA,
    "activation": "gelu",
    "tied_embeddings": True,
    "post_norms": True,
    "scaled_embeddings": True,
    "window": 4096,
}

_LAYERNORM: dict[str, object] = {
    "positions": "rotary",
    "fused_qkv": False,
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
        "gemma": {
            **_LLAMA,
            "activation": "gelu",
            "tied_embeddings": True,
            "scaled_embeddings": True,
        },
        "pythia": {
            **_LAYERNORM,
            "fused_qkv": True,
            "activation": "gelu_exact",
            "rotary_share": 0.25,
            "residual": PARALLEL,
        },
        "gpt_neo": {
            "fused_qkv": False,
            "biases": ("attn_out", "mlp_in", "mlp_out"),
            "attention_scalar": 1.0,
            "window": 256,
            "layer_types": "full+sliding",
        },
        "phi": {**_LAYERNORM, "rotary_share": 0.5, "residual": SHARED_NORM, "output_bias": True},
        "olmo2": {
            **_LLAMA,
            "pre_norms": False,
            "post_norms": True,
            "qk_norm": True,
            "qk_norm_scope": ALL_HEADS,
        },
        "stablelm": {**_LLAMA, "norm": "layernorm", "rotary_share": 0.25},
        "stablelm2_12b": {
            **_LLAMA,
            "norm": "layernorm",
            "rotary_share": 0.25,
            "residual": SHARED_NORM,
            "qk_norm": True,
            "qk_norm_scope": EACH_HEAD,
        },
        "granite": {
            **_LLAMA,
            "tied_embeddings": True,
            "embedding_scale": 12.0,
            "residual_scale": 0.22,
            "attention_scalar": 4096.0,
            "logit_divisor": 8.0,
        },
        "smollm3": {
            **_LLAMA,
            "tied_embeddings": True,
            "rotary_layers": "rotated+rotated+rotated+unrotated",
        },
        "starcoder2": {**_LAYERNORM, "tied_embeddings": True, "window": 4096},
    }
)
"""Family -> fields of `ModelConfig`.  Sizes, `norm_epsilon`, `rotary_*`, `window`, scales and
`tied_embeddings` differ between the models of a family; see `runs.families.SIZES`."""


def _size(num_layers, d_model, num_heads, vocab_size, max_len):
    return ModelConfig(num_layers, d_model, num_heads, 4 * d_model, vocab_size, max_len)


def _published(family, num_layers, d_model, num_heads, d_ff, vocab_size, max_len, **fields):
    shape = (num_layers, d_model, num_heads, d_ff, vocab_size, max_len)
    return ModelConfig(*shape, num_kv_heads=8, **{**FAMILIES[family], **fields})


_LLAMA_3_2 = {"rotary_base": 5e5, "rotary_factor": 32.0, "tied_embeddings": True}
_QWEN_3 = {"rotary_base": 1e6, "norm_epsilon": 1e-6, "head_dim": 128}


SIZES: dict[str, ModelConfig] = {
    "pico": _size(2, 128, 2, 512, 64),
    "3m": _size(4, 256, 4, 1024, 128),
    "nano": _size(2, 1024, 8, 3072, 128),
    "micro": _size(4, 1024, 8, 2048, 256),
    "mini": _size(6, 1536, 12, 4096, 256),
    "125m": _size(12, 768, 12, 50257, 2048),
    "350m": _size(24, 1024, 16, 50257, 2048),
    "1.3b": _size(24, 2048, 16, 50257, 2048),
    "6.7b": _size(32, 4096, 32, 50257, 2048),
    "13b": _size(40, 5120, 40, 50257, 2048),
    "22b": _size(48, 6144, 48, 51200, 2048),
    "175b": _size(96, 12288, 96, 51200, 2048),
    "1t": _size(128, 25600, 160, 51200, 2048),
    "llama3-1b": _published("llama", 16, 2048, 32, 8192, 128256, 131072, **_LLAMA_3_2),
    "llama3-8b": _published("llama", 32, 4096, 32, 14336, 128256, 8192, rotary_base=5e5),
    "qwen3-0.6b": _published(
        "qwen3", 28, 1024, 16, 3072, 151936, 40960, tied_embeddings=True, **_QWEN_3
    ),
    "qwen3-8b": _published("qwen3", 36, 4096, 32, 12288, 151936, 40960, **_QWEN_3),
}
"""Shapes by scale.  Laptop scales are wide and shallow with short sequences and a small vocabulary,
so that projections hold at least 85% of the FLOPs, as they hold about 95% in the 13B.  125m to 13b
and 175b are GPT-3's (arXiv 2005.14165, table 2.1), 22b and 1t Frontier's (arXiv 2312.12705).
The others are those of config.json in meta-llama/Llama-3.2-1B, meta-llama/Meta-Llama-3-8B,
Qwen/Qwen3-0.6B and Qwen/Qwen3-8B."""
