"""Conversions of a model to another config that computes the same function."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config.model import SUPAR_HEAD, SUPAR_WIDTH, ModelConfig
from sparse_dataflow.core.config.projections import MLP, PRECISIONS
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.ops.hadamard.transform import hadamard
from sparse_dataflow.core.weights.dense import Dense
from sparse_dataflow.core.weights.kind import LAYOUT, with_term

QKV = ("q", "k", "v")


def dense_form(model: ModelConfig, params: dict) -> tuple[ModelConfig, dict]:
    """Converts a model to a dense one of standard parametrization.

    Blocks that are not stored become zeros, two factors their product. Hadamard transforms and
    low-rank terms are folded into the dense weights. SuPar's query and logit factors are folded
    into the parameters before them.

    Returns:
      (dense config, dense parameter tree in numpy float32).
    """
    dense = dataclasses.replace(model, linears={}, parametrization="standard")
    layers = []
    for layer_params in stacks.layers(params["blocks"]):
        layer = stacks.map_arrays(lambda leaf: np.asarray(leaf, np.float32), layer_params)
        for name in model.projections:
            if model.experts and name in MLP:
                experts = layer["experts"]
                # One layout serves all experts, the shared one too, and stands with the routed
                # ones.
                layout = {n: part for n, part in experts[name].items() if n == LAYOUT}
                for each in (experts, experts.get("shared")):
                    if each:
                        each[name] = dense_module(model, name, {**layout, **each[name]})
            else:
                layer[name] = dense_module(model, name, layer[name])
        layers.append(layer)
    blocks = stacks.stacked_layers(dense, layers)
    head = params["head"]
    if model.supar:
        blocks = _with_scaled_queries(model, blocks)
        scale = SUPAR_WIDTH / model.d_model
        # The head reads the normalized stream alone, so a factor of the logits is one of the norm.
        norm = {name: scale * np.asarray(leaf) for name, leaf in head["norm"].items()}
        head = {**head, "norm": norm}
    return dense, {**params, "blocks": blocks, "head": head}


def dense_module(model: ModelConfig, name: str, module: dict) -> dict:
    """Returns the dense form of a projection, or of that of every expert.

    Args:
      module: its parameters with its layout, of one layer, in numpy.
    """
    spec = model.linear(name)
    kernel = np.asarray(spec.weight.form(spec).from_arrays(module, PRECISIONS[0]).dense())
    if spec.hadamard:
        # (x H) W = x (H W), and H is symmetric: it acts on the inputs of the kernel.
        mixed = hadamard(jnp.asarray(kernel.swapaxes(-1, -2)), spec.hadamard)
        kernel = np.asarray(mixed).swapaxes(-1, -2)
    dense = with_term(spec, Dense(kernel), module).dense()
    return {"kernel": dense, **({"bias": module["bias"]} if "bias" in module else {})}


def _with_scaled_queries(model, blocks):
    """Multiplies the queries by SuPar's factor, which `gpt.Block` applies to a SuPar model."""
    factor = np.float32(math.sqrt(SUPAR_HEAD / model.head_width))
    if model.qk_norm or not model.fused_qkv:
        # A norm of the queries would undo a factor of their projection.
        name = model.qk_norms[0] if model.qk_norm else "q"
        return {**blocks, name: {n: factor * leaf for n, leaf in blocks[name].items()}}
    queries = model.num_heads // model.kv_heads
    # [kv heads, (queries..., key, value), K]: keys and values keep their scale.
    factors = np.ones((model.kv_heads, queries + 2, model.head_width), np.float32)
    factors[:, :queries] = factor
    return {**blocks, "qkv": {n: leaf * factors.reshape(-1) for n, leaf in blocks["qkv"].items()}}


def split_config(model: ModelConfig) -> ModelConfig:
    """Returns the dense config with `q`, `k` and `v` for `qkv`."""
    if not model.fused_qkv:
        return model
    names = model.selected(model.biases, "biases")
    biases = tuple(n for name in names for n in (QKV if name == "qkv" else (name,)))
    return dataclasses.replace(model, fused_qkv=False, biases=biases)


def joined_config(model: ModelConfig) -> ModelConfig:
    """Returns the dense config with `qkv` for `q`, `k` and `v`, whose biases are all or none."""
    if model.fused_qkv:
        return model
    names = model.selected(model.biases, "biases")
    biases = tuple(dict.fromkeys("qkv" if name in QKV else name for name in names))
    return dataclasses.replace(model, fused_qkv=True, biases=biases)


def split_qkv(model: ModelConfig, params: dict) -> dict:
    """Converts the parameter tree of a dense model to that of `split_config`."""
    if not model.fused_qkv:
        return params
    blocks = dict(params["blocks"])
    groups, queries = model.kv_heads, model.num_heads // model.kv_heads
    for name, features in blocks.pop("qkv").items():
        # [..., kv heads, (queries..., key, value), K], of a kernel or a bias.
        grid = features.reshape(*features.shape[:-1], groups, queries + 2, model.head_width)
        parts = grid[..., :queries, :], grid[..., queries, :], grid[..., queries + 1, :]
        for projection, part in zip(QKV, parts):
            leaf = part.reshape(*features.shape[:-1], -1)
            blocks[projection] = {**blocks.get(projection, {}), name: leaf}
    return {**params, "blocks": blocks}


def fuse_qkv(model: ModelConfig, params: dict) -> dict:
    """Inverts `split_qkv`; `model` is the dense config with `qkv` or without."""
    if not model.fused_qkv:
        return params
    blocks, groups = dict(params["blocks"]), model.kv_heads
    modules = [blocks.pop(name) for name in QKV]
    fused = {}
    for name in modules[0]:
        leaves = [module[name] for module in modules]
        shape = leaves[0].shape[:-1]
        grids = [leaf.reshape(*shape, groups, -1, model.head_width) for leaf in leaves]
        fused[name] = np.concatenate(grids, axis=-2).reshape(*shape, -1)
    return {**params, "blocks": {**blocks, "qkv": fused}}


def unit_gate_config(model: ModelConfig) -> ModelConfig:
    """Returns the gated config of `with_unit_gate`."""
    biases = set(model.selected(model.biases, "biases"))
    biases |= {"mlp_gate", "mlp_in"} if "mlp_in" in biases else {"mlp_in"}
    return dataclasses.replace(model, gated_mlp=True, biases=tuple(sorted(biases)))


def with_unit_gate(params: dict) -> dict:
    """Converts dense MLPs without gate: mlp_gate computes the activation, mlp_in is always 1.

    activation(x W + b) equals activation(x W + b) * (x 0 + 1).
    """
    module = params["blocks"]["mlp_in"]
    layers, _, outputs = module["kernel"].shape
    ones = {
        "kernel": np.zeros_like(module["kernel"]),
        "bias": np.ones((layers, outputs), np.float32),
    }
    blocks = {**params["blocks"], "mlp_gate": module, "mlp_in": ones}
    return {**params, "blocks": blocks}


def with_zero_biases(model: ModelConfig, params: dict) -> dict:
    """Returns the parameters of a dense model with zeros for the biases of `model` they lack."""
    blocks = dict(params["blocks"])
    for name in model.selected(model.biases, "biases"):
        module = blocks[name]
        if "bias" not in module:
            zeros = np.zeros((len(module["kernel"]), module["kernel"].shape[-1]), np.float32)
            blocks[name] = {**module, "bias": zeros}
    return {**params, "blocks": blocks}
