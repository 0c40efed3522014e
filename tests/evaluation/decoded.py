"""Models and a tokenizer for the tests of decoding."""

import dataclasses

import small_models
import tokenizers
from small_models import DENSE, LOW_RANK, SPARSE

from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.runs.families import FAMILIES

CONFIGS = {
    "dense": DENSE,
    "sparse": SPARSE,
    "low rank": LOW_RANK,
    "by depth": dataclasses.replace(LOW_RANK, density_by_depth=(2.0, 1.0)),
    "llama": dataclasses.replace(
        DENSE, **FAMILIES["llama"], num_kv_heads=2, head_dim=12, window=3
    ).with_linears(LinearSpec("block_sparse", "monarch", density=0.5, block=4)),
    "blocks": dataclasses.replace(
        DENSE, positions="rotary", attention_blocks="window:1,global:1,random:1,block:2"
    ),
    "near blocks": dataclasses.replace(
        DENSE, positions="rotary", attention_blocks="window:2,global:1,block:2"
    ),
    "qwen3": dataclasses.replace(DENSE, **FAMILIES["qwen3"], num_kv_heads=1, window=1),
    "gemma2": dataclasses.replace(DENSE, **small_models.GEMMA2).with_linears(
        LinearSpec("block_sparse", "monarch", density=0.5, block=8)
    ),
    "gemma3": dataclasses.replace(DENSE, num_layers=4, **small_models.GEMMA3),
    **{name: dataclasses.replace(DENSE, **small_models.NEWER[name]) for name in small_models.NEWER},
    "yarn": dataclasses.replace(
        DENSE,
        positions="rotary",
        rotary_scaling="yarn",
        rotary_factor=4.0,
        rotary_share=0.5,
        rotary_length=16,
        rotary_high=32.0,
        rotary_base=100.0,
    ),
    "side": dataclasses.replace(SPARSE, side_width=4),
    "prompt vectors": dataclasses.replace(DENSE, positions="rotary", prompt_vectors=3),
    "rotary": dataclasses.replace(SPARSE, positions="rotary", norm="rmsnorm"),
}

BYTES = Tokenizer(tuple(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())), (), 300)
"""One token per byte, so that multi-byte characters are split."""
