"""Shapes of models by scale, from a laptop to a trillion parameters."""

from sparse_dataflow.core.config.families import FAMILIES
from sparse_dataflow.core.config.model import ModelConfig


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
