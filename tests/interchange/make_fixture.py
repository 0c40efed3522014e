"""Writes tests/interchange/ARCHITECTURE: small random models saved by transformers, with logits.

python tests/interchange/make_fixture.py     those that are missing; needs transformers, torch
"""

import json
import sys
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.interchange import tokenizer_files
from sparse_dataflow.interchange.architectures import ARCHITECTURES

FOLDERS = {name: Path(__file__).with_name(name) for name in ARCHITECTURES}
FOLDER, OPT_FOLDER = FOLDERS["gpt2"], FOLDERS["opt"]
BYTES = Tokenizer(tuple(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())), (), 260)
OPT_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
MIXTURES = ("mixtral", "qwen3_moe", "qwen2_moe")
SHARDED = "mistral"
"""The fixture whose weights are in several files."""

_NO_DROPOUT = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
_LLAMA = {
    "vocab_size": 260,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": BYTES.eot_id,
    "eos_token_id": BYTES.eot_id,
}
_SINGLE_HEADS = {name: value for name, value in _LLAMA.items() if name != "num_key_value_heads"}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

SHAPES = {
    "gpt2": {
        "vocab_size": 260,
        "n_positions": 24,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": BYTES.eot_id,
        "eos_token_id": BYTES.eot_id,
        **_NO_DROPOUT,
    },
    "opt": {
        "vocab_size": 260,
        "max_position_embeddings": 24,
        "hidden_size": 16,
        "word_embed_proj_dim": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "ffn_dim": 48,
        "dropout": 0.0,
        "bos_token_id": 2,
        "pad_token_id": 1,
        "eos_token_id": 2,
    },
    # Every feature of each architecture: grouped queries, another head width, scaled rotary
    # positions, a window of fewer tokens than the test has, biases, norms of queries and keys.
    "llama": _LLAMA
    | {"rope_theta": 100.0, "rope_scaling": LLAMA3_SCALING, "head_dim": 8, "mlp_bias": True},
    "mistral": _LLAMA | {"sliding_window": 5, "rms_norm_eps": 1e-3, "head_dim": 8},
    "qwen2": _LLAMA | {"tie_word_embeddings": True, "rope_theta": 1000.0},
    "qwen3": _LLAMA
    | {
        "head_dim": 8,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 0,
    },
    "mixtral": _LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6},
    "qwen3_moe": _LLAMA
    | {
        "head_dim": 8,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 7,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
    "qwen2_moe": _LLAMA
    | {
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
    },
    "gemma2": _LLAMA
    | {
        "num_hidden_layers": 3,
        "head_dim": 8,
        "sliding_window": 5,
        "query_pre_attn_scalar": 11,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3_text": _LLAMA
    | {
        "num_hidden_layers": 3,
        "head_dim": 8,
        "sliding_window": 5,
        "query_pre_attn_scalar": 11,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "phi3": _LLAMA
    | {
        "sliding_window": 7,
        "pad_token_id": None,
        "original_max_position_embeddings": 16,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.5],
            "long_factor": [1.0, 4.0],
        },
        "partial_rotary_factor": 0.7,
    },
    "gemma": _LLAMA | {"head_dim": 10, "attention_bias": True},
    "olmo2": _LLAMA | {"head_dim": 8, "rope_theta": 500.0, "attention_bias": True},
    "granite": _LLAMA
    | {
        "tie_word_embeddings": True,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.3,
        "logits_scaling": 0.7,
        "mlp_bias": True,
    },
    "smollm3": _LLAMA
    | {
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 5,
        "tie_word_embeddings": True,
        "pad_token_id": None,
    },
    "starcoder2": _LLAMA | {"sliding_window": 7},
    "stablelm": _LLAMA
    | {
        "hidden_size": 32,
        "partial_rotary_factor": 0.5,
        "use_qkv_bias": True,
        "qk_layernorm": True,
        "use_parallel_residual": True,
    },
    "phi": _LLAMA | {"partial_rotary_factor": 0.4, "qk_layernorm": True},
    "gpt_neox": _SINGLE_HEADS | {"rotary_pct": 0.7, "rotary_emb_base": 500},
    "gpt_neo": {
        "vocab_size": 260,
        "hidden_size": 24,
        "num_layers": 3,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1], [["local"], 1]],
        "window_size": 5,
        "max_position_embeddings": 24,
        "bos_token_id": BYTES.eot_id,
        "eos_token_id": BYTES.eot_id,
    },
}
"""Architecture -> fields of its fixture's config.json."""


def write(name, folder, shape, seed=0):
    """Saves a random model of an architecture with transformers, its tokenizer and its logits."""
    import torch
    import transformers

    torch.manual_seed(seed)
    class_name = ARCHITECTURES[name].class_name
    config = transformers.CONFIG_MAPPING[name](**shape)
    model = getattr(transformers, class_name)(config)
    options = {"max_shard_size": "40KB"} if name == SHARDED else {}
    save(folder, model, shape["vocab_size"], seed, **options)
    if name == "opt":
        vocab = {token: number for number, token in enumerate((*OPT_SPECIALS, *BYTES.tokens))}
        (folder / "vocab.json").write_text(json.dumps(vocab))
        (folder / "merges.txt").write_text("#version: 0.2\n")
    else:
        tokenizer_files.write(folder, BYTES, 24)


def save(folder, model, vocab_size, seed=0, **options):
    """Draws new weights, then saves the model and its logits of random tokens."""
    import torch
    import transformers

    model.eval()
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter)
    ids = np.random.default_rng(seed).integers(4, vocab_size, (2, 16), np.int32)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids).long()).logits.numpy()
    model.save_pretrained(folder, **options)
    (folder / "generation_config.json").unlink(missing_ok=True)
    save_file({"ids": ids, "logits": logits}, folder / "expected.safetensors")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    (folder / "made_with.json").write_text(json.dumps(versions, indent=1) + "\n")


def main():
    """Writes the fixtures that are missing."""
    for name, folder in FOLDERS.items():
        if not folder.exists():
            write(name, folder, SHAPES[name])


if __name__ == "__main__":
    sys.exit(main())
