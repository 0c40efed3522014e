"""Drawn models of the families of llama.cpp, and their files as its converter writes them.

`write` knows nothing of the package's own names: those of tensors and keys are those of `gguf`, and
what llama.cpp's converter does to a family's weights is done here once more.
"""

import functools
import json

import gguf
import jax
import numpy as np
from safetensors.numpy import load_file

from sparse_dataflow.core.model import gpt
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.interchange import architectures
from sparse_dataflow.interchange.architectures import ARCHITECTURES

FAMILIES = tuple(name for name, row in ARCHITECTURES.items() if row.gguf)

_SIZES = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "intermediate_size": 96,
}  # fmt: skip
_SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_OWN = {
    "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128, "n_inner": 96},
    "llama": {"rope_scaling": _SCALING, "rope_theta": 500_000.0},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
                  "moe_intermediate_size": 96},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False,
                  "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {"num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "phi3": {"num_key_value_heads": 4, "sliding_window": None},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0,
                "attention_multiplier": 0.2},
    "smollm3": {"num_hidden_layers": 4},
    "stablelm": {"num_key_value_heads": 4, "use_qkv_bias": True},
    "starcoder2": {"use_bias": True},
    "phi": {"num_key_value_heads": 4},
    "gpt_neox": {"num_key_value_heads": 4},
}  # fmt: skip


@functools.cache
def tokenizer():
    return Tokenizer.from_texts(["the cat sat on the mat, and the dog 12 times " * 20], 512)


@functools.cache
def drawn(name):
    """(config, params) of an architecture, of arbitrary numbers."""
    sizes = {} if name == "gpt2" else _SIZES
    fields = {"model_type": name, "vocab_size": tokenizer().vocab_size, **sizes}
    config = architectures.read_config({**fields, **_OWN.get(name, {})})
    shapes = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(1, 0.2, x.shape).astype(np.float32) - (
        0 if len(x.shape) < 3 else 1), shapes)  # fmt: skip
    return config, params


def write(folder, path):
    """Writes a Hugging Face directory of `drawn` as llama.cpp's converter would."""
    fields = json.loads((folder / "config.json").read_text())
    name = fields["model_type"]
    family = ARCHITECTURES[name].gguf.name
    arch = {n: arch for arch, n in gguf.MODEL_ARCH_NAMES.items()}[family]
    config = drawn(name)[0]
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_len)
    writer.add_embedding_length(config.d_model)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.kv_heads)
    if "moe_intermediate_size" in fields:
        writer.add_expert_feed_forward_length(config.d_ff)
    else:
        writer.add_feed_forward_length(config.d_ff)
    rms = config.norm == "rmsnorm"
    (writer.add_layer_norm_rms_eps if rms else writer.add_layer_norm_eps)(config.norm_epsilon)
    if config.positions == "rotary":
        writer.add_rope_freq_base(config.rotary_base)
        writer.add_rope_dimension_count(config.rotated(config.head_width))
        writer.add_key_length(config.head_width)
        writer.add_value_length(config.head_width)
    if config.experts:
        writer.add_expert_count(config.experts)
        writer.add_expert_used_count(config.top_k)
    if config.shared_expert:
        writer.add_expert_shared_feed_forward_length(config.shared_expert * config.d_ff)
    if config.window:
        writer.add_sliding_window(config.window)
    elif name == "phi3":
        writer.add_sliding_window(config.max_len)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attention_cap)
        writer.add_final_logit_softcapping(config.logit_cap)
    if name == "granite":
        writer.add_embedding_scale(fields["embedding_multiplier"])
        writer.add_residual_scale(fields["residual_multiplier"])
        writer.add_logit_scale(fields["logits_scaling"])
        writer.add_attention_scale(fields["attention_multiplier"])
    if name in ("gpt_neox", "stablelm"):
        writer.add_parallel_residual(fields["use_parallel_residual"])
    if fields.get("rope_scaling"):
        writer.add_tensor("rope_freqs.weight", _factors(config))
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config.vocab_size)
    tensors = _converted(name, config, load_file(folder / "model.safetensors"))
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    for theirs, tensor in tensors.items():
        target = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(target or theirs, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _factors(config):
    """Llama 3's divisors, as its reference code computes the frequencies."""
    width, factors = config.head_width, []
    for i in range(0, width, 2):
        wavelength = 2 * np.pi * config.rotary_base ** (i / width)
        low, high = config.rotary_length / np.array([config.rotary_low, config.rotary_high])
        smooth = (config.rotary_length / wavelength - config.rotary_low) / (
            config.rotary_high - config.rotary_low
        )
        between = 1 / ((1 - smooth) / config.rotary_factor + smooth)
        factors.append(
            1.0 if wavelength < high else config.rotary_factor if wavelength > low else between
        )
    return np.array(factors, np.float32)


def _add_tokenizer(writer, fields, rows):
    vocab, special = dict(fields["model"]["vocab"]), set()
    for token in fields["added_tokens"]:
        vocab[token["content"]] = token["id"]
        special.add(token["id"])
    by_id = {number: token for token, number in vocab.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id.get(n, f"[PAD{n}]") for n in range(rows)])
    types = [3 if n in special else 1 if n in by_id else 5 for n in range(rows)]
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in fields["model"]["merges"]])
    writer.add_eos_token_id(max(special))
    writer.add_bos_token_id(max(special))


def _converted(name, config, tensors):
    """Tensors with what the converter of llama.cpp does to them."""
    result, heads = {}, {"q": config.num_heads, "k": config.kv_heads}
    experts: dict = {}
    for theirs, tensor in tensors.items():
        last = theirs.split(".")[-2]
        if ".experts." in theirs:
            before, _, after = theirs.partition(".experts.")
            number, _, projection = after.partition(".")
            experts.setdefault(f"{before}.experts.{projection}", {})[int(number)] = tensor
            continue
        if ARCHITECTURES[name].gguf.paired and last in ("q_proj", "k_proj"):
            count = heads[last[0]]
            split = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
            tensor = split.swapaxes(1, 2).reshape(tensor.shape)
        if name == "gpt2" and tensor.ndim == 2 and ".h." in theirs:
            tensor = tensor.T
        if name.startswith("gemma") and theirs.endswith("norm.weight"):
            tensor = tensor + 1
        if last == "query_key_value":
            parts = tensor.reshape(config.num_heads, 3, config.head_width, *tensor.shape[1:])
            tensor = np.concatenate([parts[:, i].reshape(-1, *tensor.shape[1:]) for i in range(3)])
        result[theirs] = tensor
    for merged, parts in experts.items():
        result[merged] = np.stack([parts[number] for number in sorted(parts)])
    return result
