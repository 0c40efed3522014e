"""GPT-2 and OPT as this project's model: the config, and where each parameter lies.

Both are pre-norm transformers with learned positions and tied embeddings. GPT-2 stores weights
[in, out] and queries, keys and values of all heads one after the other; OPT stores [out, in], the
three apart, and its positions begin two rows late. Here the features of `qkv` are ordered
[head, (query, key, value), head_dim].
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.files.errors import UserError

EPSILON = 1e-5
_GELU = ("gelu_new", "gelu_pytorch_tanh")
_OPT_POSITION_OFFSET = 2

Read = Callable[[str, tuple[int, ...]], np.ndarray]
"""(name, shape) -> float32 array."""


class Architecture(NamedTuple):
    """How one architecture is read.

    Attributes:
      config: its config.json -> the model; UserError where the model cannot be.
      prefixes: what tensor names may begin with.
      probe: a tensor without prefix that is always there.
      params: (model, read) -> parameters as `gpt` has them, in numpy.
    """

    config: Callable[[Mapping[str, Any]], ModelConfig]
    prefixes: tuple[str, ...]
    probe: str
    params: Callable[[ModelConfig, Read], dict]


def _gpt2_config(fields):
    _must(fields, "scale_attn_weights", True, default=True)
    _must(fields, "scale_attn_by_inverse_layer_idx", False, default=False)
    _must(fields, "add_cross_attention", False, default=False)
    _must(fields, "tie_word_embeddings", True, default=True)
    _must(fields, "layer_norm_epsilon", EPSILON, default=EPSILON)
    width = fields["n_embd"]
    return ModelConfig(
        num_layers=fields["n_layer"],
        d_model=width,
        num_heads=fields["n_head"],
        d_ff=fields.get("n_inner") or 4 * width,
        vocab_size=fields["vocab_size"],
        max_len=fields["n_positions"],
        activation=_activation(fields.get("activation_function", "gelu_new")),
    )


def _opt_config(fields):
    _must(fields, "do_layer_norm_before", True, default=True)
    _must(fields, "enable_bias", True, default=True)
    _must(fields, "layer_norm_elementwise_affine", True, default=True)
    _must(fields, "_remove_final_layer_norm", False, default=False)
    _must(fields, "tie_word_embeddings", True, default=True)
    width = fields["hidden_size"]
    _must(fields, "word_embed_proj_dim", width, default=width)
    return ModelConfig(
        num_layers=fields["num_hidden_layers"],
        d_model=width,
        num_heads=fields["num_attention_heads"],
        d_ff=fields["ffn_dim"],
        vocab_size=fields["vocab_size"],
        max_len=fields["max_position_embeddings"],
        activation=_activation(fields.get("activation_function", "relu")),
    )


def _must(fields, name, value, default):
    if fields.get(name, default) != value:
        raise UserError(f"config.json says {name}={fields[name]!r}; legal: {value!r}.")


def _activation(name):
    if name not in (*_GELU, "relu"):
        raise UserError(
            f"config.json says activation_function={name!r}; legal: {', '.join(_GELU)}, relu."
        )
    return "relu" if name == "relu" else "gelu"


def _gpt2_params(model: ModelConfig, read: Read) -> dict:
    D, F, H = model.d_model, model.d_ff, model.num_heads

    def layer(i):
        def linear(name, inside, outside):
            return {
                "kernel": read(f"h.{i}.{name}.weight", (inside, outside)),
                "bias": read(f"h.{i}.{name}.bias", (outside,)),
            }

        qkv = linear("attn.c_attn", D, 3 * D)
        return {
            "norm1": _norm(read, f"h.{i}.ln_1", D),
            "qkv": {name: by_head(leaf, H) for name, leaf in qkv.items()},
            "attn_out": linear("attn.c_proj", D, D),
            "norm2": _norm(read, f"h.{i}.ln_2", D),
            "mlp_in": linear("mlp.c_fc", D, F),
            "mlp_out": linear("mlp.c_proj", F, D),
        }

    return {
        "embed": {
            "tokens": read("wte.weight", (model.vocab_size, D)),
            "positions": read("wpe.weight", (model.max_len, D)),
        },
        "blocks": _stacked([layer(i) for i in range(model.num_layers)]),
        "head": {"norm": _norm(read, "ln_f", D)},
    }


def _opt_params(model: ModelConfig, read: Read) -> dict:
    D, F, H = model.d_model, model.d_ff, model.num_heads

    def layer(i):
        def linear(name, inside, outside):
            return {
                "kernel": read(f"layers.{i}.{name}.weight", (outside, inside)).T,
                "bias": read(f"layers.{i}.{name}.bias", (outside,)),
            }

        parts = [linear(f"self_attn.{part}_proj", D, D) for part in "qkv"]
        joined = {
            name: by_head(np.concatenate([part[name] for part in parts], axis=-1), H)
            for name in ("kernel", "bias")
        }
        return {
            "norm1": _norm(read, f"layers.{i}.self_attn_layer_norm", D),
            "qkv": joined,
            "attn_out": linear("self_attn.out_proj", D, D),
            "norm2": _norm(read, f"layers.{i}.final_layer_norm", D),
            "mlp_in": linear("fc1", D, F),
            "mlp_out": linear("fc2", F, D),
        }

    positions = read("embed_positions.weight", (model.max_len + _OPT_POSITION_OFFSET, D))
    return {
        "embed": {
            "tokens": read("embed_tokens.weight", (model.vocab_size, D)),
            "positions": positions[_OPT_POSITION_OFFSET:],
        },
        "blocks": _stacked([layer(i) for i in range(model.num_layers)]),
        "head": {"norm": _norm(read, "final_layer_norm", D)},
    }


ARCHITECTURES = {
    "gpt2": Architecture(_gpt2_config, ("transformer.", ""), "wte.weight", _gpt2_params),
    "opt": Architecture(
        _opt_config,
        ("model.decoder.", "decoder.", ""),
        "embed_tokens.weight",
        _opt_params,
    ),
}


def gpt2_tensors(model: ModelConfig, params: dict) -> dict[str, np.ndarray]:
    """The inverse of what is read of GPT-2, under the names of `GPT2LMHeadModel`.

    Args:
      model: a dense one.
      params: its parameters.
    """
    embed, blocks = params["embed"], params["blocks"]
    tensors = {
        "transformer.wte.weight": embed["tokens"],
        "transformer.wpe.weight": embed["positions"],
    }
    names = {"attn_out": "attn.c_proj", "mlp_in": "mlp.c_fc", "mlp_out": "mlp.c_proj"}
    for i in range(model.num_layers):
        at = f"transformer.h.{i}"
        for ours, theirs in (("norm1", "ln_1"), ("norm2", "ln_2")):
            tensors[f"{at}.{theirs}.weight"] = blocks[ours]["scale"][i]
            tensors[f"{at}.{theirs}.bias"] = blocks[ours]["bias"][i]
        for part, leaf in (("weight", "kernel"), ("bias", "bias")):
            tensors[f"{at}.attn.c_attn.{part}"] = by_part(blocks["qkv"][leaf][i], model.num_heads)
            for ours, theirs in names.items():
                tensors[f"{at}.{theirs}.{part}"] = blocks[ours][leaf][i]
    norm = params["head"]["norm"]
    tensors |= {"transformer.ln_f.weight": norm["scale"], "transformer.ln_f.bias": norm["bias"]}
    return {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}


def gpt2_config(model: ModelConfig, end_of_text: int) -> dict[str, Any]:
    """The config.json of `GPT2LMHeadModel` for a dense model."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new" if model.activation == "gelu" else "relu",
        "n_layer": model.num_layers,
        "n_embd": model.d_model,
        "n_head": model.num_heads,
        "n_inner": model.d_ff,
        "n_positions": model.max_len,
        "vocab_size": model.vocab_size,
        "layer_norm_epsilon": EPSILON,
        "tie_word_embeddings": True,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "torch_dtype": "float32",
    }


def by_head(features: np.ndarray, heads: int) -> np.ndarray:
    """[..., (query, key, value), head, head_dim] features -> [..., head, (q, k, v), head_dim]."""
    return _turned(features, (3, heads))


def by_part(features: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `by_head`."""
    return _turned(features, (heads, 3))


def _turned(features, grid):
    features = np.asarray(features)
    shaped = features.reshape(*features.shape[:-1], *grid, -1)
    return shaped.swapaxes(-3, -2).reshape(features.shape)


def _norm(read, name, width):
    return {"scale": read(f"{name}.weight", (width,)), "bias": read(f"{name}.bias", (width,))}


def _stacked(layers):
    if isinstance(layers[0], dict):
        return {name: _stacked([layer[name] for layer in layers]) for name in layers[0]}
    return np.stack(layers)
