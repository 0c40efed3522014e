"""Forward pass of the sparse form in numpy, written from its description alone."""

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def load(folder):
    """Returns the model's config and its tensors by name."""
    fields = json.loads(Path(folder, "config.json").read_text())
    config = {**fields["model"], **fields["forward"]}
    tensors: dict = {}
    for path in Path(folder).glob("*.safetensors"):
        tensors |= load_file(path)
    return config, {
        name: tensor if tensor.dtype.kind in "iu" else tensor.astype(np.float32)
        for name, tensor in tensors.items()
    }


def logits(config, tensors, ids):
    """Token ids [tokens] -> float32 logits [tokens, vocab]."""
    x = tensors["embed.tokens"][ids]
    x = x * np.float32(config["embedding_scale"])
    if config["positions"] == "learned":
        x = x + tensors["embed.positions"][: len(ids)]
    for layer in range(config["num_layers"]):
        at, layer_fields = f"blocks.{layer}", {**config, **config["layers"][layer]}
        attended = x + half(attention, layer_fields, tensors, x, at, "norm1", "norm1_out")
        read = attended if config["residual"] == "sequential" else x
        name = "norm1" if config["residual"] == "parallel_shared_norm" else "norm2"
        x = attended + half(mlp, layer_fields, tensors, read, at, name, "norm2_out")
    x = norm(config, tensors, x, "head.norm") * np.float32(config["logit_scale"])
    y = x @ tensors.get("head.output", tensors["embed.tokens"]).T
    return capped(y + tensors.get("head.output_bias", np.float32(0)), config["logit_cap"])


def half(function, config, tensors, x, at, before, after):
    """What attention or the MLP of a layer adds to the residual stream x."""
    if config["pre_norms"]:
        x = norm(config, tensors, x, f"{at}.{before}")
    y = function(config, tensors, x, at)
    if config["post_norms"]:
        y = norm(config, tensors, y, f"{at}.{after}")
    return y * np.float32(config["residual_scale"])


def capped(x, cap):
    """Values whose magnitude stays below a cap, if it is not 0."""
    return cap * np.tanh(x / cap) if cap else x


def linear(config, tensors, x, at):
    """The projection `at`: blocks read the Hadamard transform of x, the low-rank term reads x."""
    size = config["linears"].get(at.split(".")[-1], {}).get("hadamard", 0)
    y = (hadamard(x, size) if size else x) @ weight(config, tensors, at)
    if f"{at}.gate" in tensors:
        term = x @ tensors[f"{at}.a_kernel"] @ tensors[f"{at}.b_kernel"]
        y = y + tensors[f"{at}.gate"] * term
    return y + tensors.get(f"{at}.bias", np.float32(0))


def weight(config, tensors, at):
    """The weight [in, out] of the projection `at`, with zeros where nothing is stored."""
    if f"{at}.mask" in tensors:
        spec, values = config["linears"][at.split(".")[-1]], tensors[f"{at}.kernel"]
        rows, columns = spec["block"], spec["block_outputs"] or spec["block"]
        bits = np.unpackbits(tensors[f"{at}.mask"], axis=1, count=len(values) // columns)
        mask = bits.astype(bool).repeat(rows, 0).repeat(columns, 1)
        dense = np.zeros(mask.shape, np.float32)
        dense.T[mask.T] = values.ravel()
        return dense
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
    """LayerNorm or RMSNorm over the last axis."""
    if config["norm"] == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    variance = np.square(x).mean(-1, keepdims=True)
    x = x / np.sqrt(variance + np.float32(config["norm_epsilon"]))
    return x * tensors[f"{at}.scale"] + tensors.get(f"{at}.bias", np.float32(0))


def normed(config, tensors, x, at):
    """Queries or keys [tokens, heads, width], normalised over a head or over all heads."""
    if config["qk_norm_scope"] == "all_heads":
        return norm(config, tensors, x.reshape(len(x), -1), f"{at}_norms").reshape(x.shape)
    return norm(config, tensors, x, f"{at}_norm" + "s" * (config["qk_norm_scope"] != "head"))


def mlp(config, tensors, x, at):
    """The activation of mlp_in, or mlp_in times the activation of mlp_gate; then mlp_out."""
    hidden = linear(config, tensors, x, f"{at}.mlp_in")
    if config["gated_mlp"]:
        hidden = hidden * activation(config, linear(config, tensors, x, f"{at}.mlp_gate"))
    else:
        hidden = activation(config, hidden)
    return linear(config, tensors, hidden, f"{at}.mlp_out")


def activation(config, x):
    """One of ACTIVATIONS; a KeyError names another."""
    return ACTIVATIONS[config["activation"]](x).astype(x.dtype)


ACTIVATIONS = {
    "gelu": lambda x: 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "gelu_exact": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / 2**0.5)),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def heads(config, tensors, x, at):
    """Queries [tokens, heads, width], keys and values [tokens, key/value heads, width].

    Features of `qkv` are ordered [key/value head, (its queries, key, value), width].
    """
    queries, groups = config["num_heads"], config["num_kv_heads"] or config["num_heads"]
    width, tokens = config["head_dim"] or config["d_model"] // queries, len(x)
    if not config["fused_qkv"]:
        q, k, v = (linear(config, tensors, x, f"{at}.{name}") for name in "qkv")
        return tuple(part.reshape(tokens, -1, width) for part in (q, k, v))
    grid = linear(config, tensors, x, f"{at}.qkv").reshape(tokens, groups, -1, width)
    return grid[:, :, :-2].reshape(tokens, queries, width), grid[:, :, -2], grid[:, :, -1]


def attention(config, tensors, x, at):
    """Causal attention, over the last `window` tokens if it is not 0."""
    query, key, value = heads(config, tensors, x, at)
    if config["qk_norm"]:
        query, key = (
            normed(config, tensors, query, f"{at}.q"),
            normed(config, tensors, key, f"{at}.k"),
        )
    query, key = rotate(config, query), rotate(config, key)
    tokens, _, width = query.shape
    shared = query.shape[1] // key.shape[1]
    key, value = np.repeat(key, shared, axis=1), np.repeat(value, shared, axis=1)
    scale = np.float32(config["query_scale"] / width**0.5)
    scores = np.einsum("qhw,khw->hqk", query, key) * scale
    scores = capped(scores, config["attention_cap"])
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    seen = (distance >= 0) & (distance < (config["window"] or tokens))
    scores = np.where(seen, scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares = shares / shares.sum(-1, keepdims=True)
    attended = np.einsum("hqk,khw->qhw", shares, value).reshape(tokens, -1)
    return linear(config, tensors, attended, f"{at}.attn_out")


def rotate(config, x):
    """Rotates the first features of x [tokens, heads, width] by position, their halves paired."""
    frequency, scale = np.asarray(config["frequencies"], np.float32), config["rotation_scale"]
    width = 2 * len(frequency)
    angle = np.arange(len(x), dtype=np.float32)[:, None, None] * frequency
    sin, cos = (scale * np.sin(angle)).astype(x.dtype), (scale * np.cos(angle)).astype(x.dtype)
    first, second = np.split(x[..., :width], 2, axis=-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    return np.concatenate([*rotated, x[..., width:]], axis=-1)
