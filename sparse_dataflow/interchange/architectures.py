"""Conversion of GPT-2 and OPT configs and weights to this project's model, and back to GPT-2.

Both are pre-norm transformers with learned positions and tied embeddings. Weight conventions:

- GPT-2: kernels are [in, out]; the features of `c_attn` are [(query, key, value), head, head_dim].
- OPT: kernels are [out, in]; query, key and value are separate tensors; the position table has two
  unused rows in front.
- Here: kernels are [in, out]; the features of `qkv` are [head, (query, key, value), head_dim].
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
"""Maps (tensor name, expected shape) to a float32 array."""


class Architecture(NamedTuple):
    """Converters of one Hugging Face architecture.

    Attributes:
      config: maps the fields of config.json to a `ModelConfig`; raises UserError if a field has a
        value that this project does not support.
      prefixes: legal prefixes of tensor names.
      probe: name, without prefix, of a tensor that every checkpoint has; it identifies the prefix.
      params: maps (model, read) to the parameter tree of `gpt`, numpy float32.
    """

    config: Callable[[Mapping[str, Any]], ModelConfig]
    prefixes: tuple[str, ...]
    probe: str
    params: Callable[[ModelConfig, Read], dict]


def _gpt2_config(fields):
    _require(fields, "scale_attn_weights", True, default=True)
    _require(fields, "scale_attn_by_inverse_layer_idx", False, default=False)
    _require(fields, "add_cross_attention", False, default=False)
    _require(fields, "tie_word_embeddings", True, default=True)
    _require(fields, "layer_norm_epsilon", EPSILON, default=EPSILON)
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
    _require(fields, "do_layer_norm_before", True, default=True)
    _require(fields, "enable_bias", True, default=True)
    _require(fields, "layer_norm_elementwise_affine", True, default=True)
    _require(fields, "_remove_final_layer_norm", False, default=False)
    _require(fields, "tie_word_embeddings", True, default=True)
    width = fields["hidden_size"]
    _require(fields, "word_embed_proj_dim", width, default=width)
    return ModelConfig(
        num_layers=fields["num_hidden_layers"],
        d_model=width,
        num_heads=fields["num_attention_heads"],
        d_ff=fields["ffn_dim"],
        vocab_size=fields["vocab_size"],
        max_len=fields["max_position_embeddings"],
        activation=_activation(fields.get("activation_function", "relu")),
    )


def _require(fields, name, value, default):
    if fields.get(name, default) != value:
        raise UserError(f"config.json has {name}={fields[name]!r}; legal: {value!r}.")


def _activation(name):
    if name not in (*_GELU, "relu"):
        raise UserError(
            f"config.json has activation_function={name!r}; legal: {', '.join(_GELU)}, relu."
        )
    return "relu" if name == "relu" else "gelu"


def _gpt2_params(model: ModelConfig, read: Read) -> dict:
    D, F, H = model.d_model, model.d_ff, model.num_heads

    def layer(i):
        def linear(name, in_features, out_features):
            return {
                "kernel": read(f"h.{i}.{name}.weight", (in_features, out_features)),
                "bias": read(f"h.{i}.{name}.bias", (out_features,)),
            }

        qkv = linear("attn.c_attn", D, 3 * D)
        return {
            "norm1": _norm(read, f"h.{i}.ln_1", D),
            "qkv": {name: qkv_to_head_major(leaf, H) for name, leaf in qkv.items()},
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
        "blocks": _stack_layers([layer(i) for i in range(model.num_layers)]),
        "head": {"norm": _norm(read, "ln_f", D)},
    }


def _opt_params(model: ModelConfig, read: Read) -> dict:
    D, F, H = model.d_model, model.d_ff, model.num_heads

    def layer(i):
        def linear(name, in_features, out_features):
            return {
                "kernel": read(f"layers.{i}.{name}.weight", (out_features, in_features)).T,
                "bias": read(f"layers.{i}.{name}.bias", (out_features,)),
            }

        projections = [linear(f"self_attn.{letter}_proj", D, D) for letter in "qkv"]
        qkv = {
            name: qkv_to_head_major(np.concatenate([p[name] for p in projections], axis=-1), H)
            for name in ("kernel", "bias")
        }
        return {
            "norm1": _norm(read, f"layers.{i}.self_attn_layer_norm", D),
            "qkv": qkv,
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
        "blocks": _stack_layers([layer(i) for i in range(model.num_layers)]),
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
    """Converts a dense model to the tensors of `GPT2LMHeadModel`; the inverse of the import.

    Args:
      model: config of a dense model.
      params: its parameter tree; see `gpt`.

    Returns:
      Float32 arrays by tensor name.
    """
    embed, blocks = params["embed"], params["blocks"]
    tensors = {
        "transformer.wte.weight": embed["tokens"],
        "transformer.wpe.weight": embed["positions"],
    }
    names = {"attn_out": "attn.c_proj", "mlp_in": "mlp.c_fc", "mlp_out": "mlp.c_proj"}
    for i in range(model.num_layers):
        layer = f"transformer.h.{i}"
        for ours, theirs in (("norm1", "ln_1"), ("norm2", "ln_2")):
            tensors[f"{layer}.{theirs}.weight"] = blocks[ours]["scale"][i]
            tensors[f"{layer}.{theirs}.bias"] = blocks[ours]["bias"][i]
        for suffix, leaf in (("weight", "kernel"), ("bias", "bias")):
            tensors[f"{layer}.attn.c_attn.{suffix}"] = qkv_from_head_major(
                blocks["qkv"][leaf][i], model.num_heads
            )
            for ours, theirs in names.items():
                tensors[f"{layer}.{theirs}.{suffix}"] = blocks[ours][leaf][i]
    norm = params["head"]["norm"]
    tensors |= {"transformer.ln_f.weight": norm["scale"], "transformer.ln_f.bias": norm["bias"]}
    return {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}


def gpt2_config(model: ModelConfig, end_of_text: int) -> dict[str, Any]:
    """Returns the fields of config.json for a dense model as `GPT2LMHeadModel`."""
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


def qkv_to_head_major(features: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the last axis from [(query, key, value), head, head_dim] to [head, (q, k, v),
    head_dim]; the shape stays."""
    return _swap_axes_of_features(features, (3, heads))


def qkv_from_head_major(features: np.ndarray, heads: int) -> np.ndarray:
    """Inverts `qkv_to_head_major`."""
    return _swap_axes_of_features(features, (heads, 3))


def _swap_axes_of_features(features, axes):
    features = np.asarray(features)
    grid = features.reshape(*features.shape[:-1], *axes, -1)
    return grid.swapaxes(-3, -2).reshape(features.shape)


def _norm(read, name, width):
    return {"scale": read(f"{name}.weight", (width,)), "bias": read(f"{name}.bias", (width,))}


def _stack_layers(layers):
    if isinstance(layers[0], dict):
        return {name: _stack_layers([layer[name] for layer in layers]) for name in layers[0]}
    return np.stack(layers)
