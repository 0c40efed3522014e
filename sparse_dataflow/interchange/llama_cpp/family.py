"""How llama.cpp names a family of models: what a row of `architectures` says of GGUF."""

import dataclasses
from collections.abc import Mapping

TENSORS: Mapping[str, str] = {
    "embed.tokens": "token_embd.weight",
    "embed.positions": "position_embd.weight",
    "blocks.norm1": "blk.{}.attn_norm",
    "blocks.qkv": "blk.{}.attn_qkv",
    "blocks.q": "blk.{}.attn_q",
    "blocks.k": "blk.{}.attn_k",
    "blocks.v": "blk.{}.attn_v",
    "blocks.q_norm": "blk.{}.attn_q_norm",
    "blocks.k_norm": "blk.{}.attn_k_norm",
    "blocks.q_norms": "blk.{}.attn_q_norm",
    "blocks.k_norms": "blk.{}.attn_k_norm",
    "blocks.attn_out": "blk.{}.attn_output",
    "blocks.norm1_out": "blk.{}.post_attention_norm",
    "blocks.norm2": "blk.{}.ffn_norm",
    "blocks.mlp_gate": "blk.{}.ffn_gate",
    "blocks.mlp_in": "blk.{}.ffn_up",
    "blocks.mlp_out": "blk.{}.ffn_down",
    "blocks.norm2_out": "blk.{}.post_ffw_norm",
    "blocks.experts.router": "blk.{}.ffn_gate_inp.weight",
    "blocks.experts.mlp_gate": "blk.{}.ffn_gate_exps",
    "blocks.experts.mlp_in": "blk.{}.ffn_up_exps",
    "blocks.experts.mlp_out": "blk.{}.ffn_down_exps",
    "blocks.experts.shared.router": "blk.{}.ffn_gate_inp_shexp.weight",
    "blocks.experts.shared.mlp_gate": "blk.{}.ffn_gate_shexp",
    "blocks.experts.shared.mlp_in": "blk.{}.ffn_up_shexp",
    "blocks.experts.shared.mlp_out": "blk.{}.ffn_down_shexp",
    "head.norm": "output_norm",
}
"""Our parameter, or our module, -> its name in every GGUF file; see `Architecture.tensors`."""

OUTPUT = "output"
"""Name of the output layer."""

JOINED_QKV = {f"blocks.{name}": "blk.{}.attn_qkv" for name in ("q", "k", "v")}
JOINED_GATE = {"blocks.mlp_gate": "blk.{}.ffn_up"}
"""Names of projections that one tensor has, one after the other."""

KEYS: Mapping[str, str] = {
    "num_layers": "block_count",
    "d_model": "embedding_length",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "d_ff": "feed_forward_length",
    "max_len": "context_length",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "attention_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
    "embedding_scale": "embedding_scale",
    "residual_scale": "residual_scale",
    "logit_divisor": "logit_scale",
    "residual": "use_parallel_residual",
}
"""Field of `ModelConfig` -> the key of its value, which begins with the name of the family."""

RMS_EPSILON = "attention.layer_norm_rms_epsilon"
"""The key of `norm_epsilon` where the norms are RMSNorm."""


@dataclasses.dataclass(frozen=True)
class Family:
    """What differs between families of llama.cpp, beside the rules of config.json.

    Attributes:
      name: its name in a file.
      tensors: names that differ from TENSORS.
      paired: whether the rows of queries and keys are in the order of llama.cpp's own rotations:
        the two features of each are neighbours.
      fixed: fields of config.json that a file does not have; a function gets the others.
      keys: keys that differ from KEYS.
      windows: whether llama.cpp computes attention with a window; a file may name one anyway.
      windowed: whether llama.cpp refuses a file without a window; one of the context is none.
    """

    name: str
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    paired: bool = False
    fixed: Mapping[str, object] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    windows: bool = False
    windowed: bool = False
