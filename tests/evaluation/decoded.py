"""Models and a tokenizer that the tests of decoding share."""

import dataclasses

import tokenizers
from sparse_dataflow.config.model import LinearSpec, ModelConfig

from sparse_dataflow.data.tokenizer import Tokenizer

DENSE = ModelConfig(num_layers=2, d_model=32, num_heads=4, d_ff=64, vocab_size=40, max_len=16)
SPARSE = DENSE.with_linears(LinearSpec("block_sparse", "monarch", density=0.5, block=8))
LOW_RANK = SPARSE.with_linears(
    LinearSpec("block_sparse", "random", 0.25, 8, rank=3, hadamard=4), ("mlp_in",)
)
CONFIGS = {
    "dense": DENSE,
    "sparse": SPARSE,
    "low rank": LOW_RANK,
    "by depth": dataclasses.replace(LOW_RANK, density_by_depth=(2.0, 1.0)),
    "rotary": dataclasses.replace(SPARSE, positions="rotary", norm="rmsnorm"),
}

BYTES = Tokenizer(tuple(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())), (), 300)
"""One token a byte, so that every character of several bytes is split."""
