"""Forward pass of the sparse form in numpy; the model card prints this file.

Readers of the card may not have sparse_dataflow, so this file does not import it.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def load(folder):
    """Returns the model's config and its tensors by name."""
    config = json.loads(Path(folder, "config.json").read_text())["model"]
    return config, load_file(Path(folder, "model.safetensors"))


def logits(config, tensors, ids):
    """Token ids [tokens] -> float32 logits [tokens, vocab]."""
    x = tensors["embed.tokens"][ids]
    if config["positions"] == "learned":
        x = x + tensors["embed.positions"][: len(ids)]
    for layer in range(config["num_layers"]):
        at = f"blocks.{layer}"
        qkv = linear(config, tensors, norm(config, tensors, x, f"{at}.norm1"), f"{at}.qkv")
        x = x + linear(config, tensors, attention(config, qkv), f"{at}.attn_out")
        hidden = linear(config, tensors, norm(config, tensors, x, f"{at}.norm2"), f"{at}.mlp_in")
        x = x + linear(config, tensors, activation(config, hidden), f"{at}.mlp_out")
    x = norm(config, tensors, x, "head.norm")
    if config["parametrization"] == "supar":
        x = x * np.float32(256 / config["d_model"])
    return x @ tensors["embed.tokens"].T


def linear(config, tensors, x, at):
    """The projection `at`: blocks read the Hadamard transform of x, the low-rank term reads x."""
    size = config["linears"].get(at.split(".")[-1], {}).get("hadamard", 0)
    y = (hadamard(x, size) if size else x) @ weight(tensors, at) + tensors[f"{at}.bias"]
    if f"{at}.gate" in tensors:
        low_rank = x @ tensors[f"{at}.a_kernel"] @ tensors[f"{at}.b_kernel"]
        y = y + tensors[f"{at}.gate"] * low_rank
    return y


def weight(tensors, at):
    """The weight [in, out] of the projection `at`, with zeros where no block is stored."""
    if f"{at}.kernel" in tensors:
        return tensors[f"{at}.kernel"]
    values, index, slot = (tensors[f"{at}.{name}"] for name in ("values", "in_index", "in_slot"))
    block, in_blocks = values.shape[-1], len(tensors[f"{at}.out_index"])
    dense = np.zeros((in_blocks, block, len(index), block), np.float32)
    for out, position in np.argwhere(slot >= 0):
        dense[index[out, position], :, out, :] = values[slot[out, position]]
    return dense.reshape(in_blocks * block, -1)


def hadamard(x, size):
    """The orthonormal Walsh-Hadamard transform of every `size` neighbouring features."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (x.reshape(-1, size) @ matrix / np.float32(size**0.5)).reshape(x.shape)


def norm(config, tensors, x, at):
    """LayerNorm or RMSNorm over the features, epsilon 1e-5."""
    if config["norm"] == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(1e-5))
    return x * tensors[f"{at}.scale"] + tensors.get(f"{at}.bias", np.float32(0))


def activation(config, x):
    """ReLU, or GELU in its tanh form."""
    if config["activation"] == "relu":
        return np.maximum(x, 0)
    return 0.5 * x * (1 + np.tanh(np.float32((2 / np.pi) ** 0.5) * (x + 0.044715 * x**3)))


def attention(config, qkv):
    """Causal attention; the features of qkv are ordered [head, (query, key, value), width]."""
    tokens, heads = len(qkv), config["num_heads"]
    width = config["d_model"] // heads
    query, key, value = np.moveaxis(qkv.reshape(tokens, heads, 3, width), 2, 0)
    if config["positions"] == "rotary":
        query, key = rotate(query), rotate(key)
    scale = 8 / width if config["parametrization"] == "supar" else width**-0.5
    scores = np.einsum("qhw,khw->hqk", query, key) * np.float32(scale)
    scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares = shares / shares.sum(-1, keepdims=True)
    return np.einsum("hqk,khw->qhw", shares, value).reshape(tokens, -1)


def rotate(x):
    """Rotates x [tokens, heads, width] by position, base 10,000; halves of a head are paired."""
    width = x.shape[-1]
    angle = np.arange(len(x))[:, None, None] * 10_000.0 ** (-np.arange(0, width, 2) / width)
    sin, cos = np.sin(angle).astype(x.dtype), np.cos(angle).astype(x.dtype)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
