"""Larger models that begin with the function of given weights.

Every expert of a mixture begins as the MLP of a model without experts (sparse upcycling, arXiv
2212.05055), and its router is drawn.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.config.layer_groups import split_groups
from sparse_dataflow.config.model import MIXTURE, MLP, ModelConfig
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.equivalent_forms import dense_module
from sparse_dataflow.models import gpt
from sparse_dataflow.models.experts import ROUTER, expert_layout


def grown(
    old: ModelConfig, params: dict, tables: Any, new: ModelConfig, key: jax.Array
) -> tuple[ModelConfig, dict, Any]:
    """Returns (config, parameters, layout tables) of the shape of `new` and the function of `old`.

    Storage is that of the old model, except that a sparse MLP becomes dense where experts are. A
    shape that is not larger stays as it is.

    Args:
      old: config of the parameters.
      params: parameter tree; see `gpt`.
      tables: concrete layout tables.
      new: config of the larger model.
      key: draws new parameters.

    Raises:
      UserError: the new model cannot begin with this function; names legal values.
    """
    if new.experts and not old.experts:
        old, params, tables = _with_experts(old, params, tables, new, key)
    return old, params, tables


def _with_experts(old, params, tables, new, key):
    """Puts the MLP in every expert, over the number of experts whose outputs are summed."""
    if new.top_k == 1:
        raise UserError(
            "model.top_k=1 multiplies the output of an expert by its router probability, so "
            "experts that begin as the MLP of the initial weights have another function; legal: "
            "model.top_k of 2 or more."
        )
    layouts = gpt.layouts_from_tables(old, tables)
    names = [name for name in old.projections if name in MLP]
    stored = [name for name in names if new.linear(name).kind == "block_sparse"]
    for name in stored:
        _refuse_other_layouts(old, new, name, layouts)
    linears = {name: spec for name, spec in old.linears if name not in names or name in stored}
    fields = {name: getattr(new, name) for name in MIXTURE}
    config = dataclasses.replace(old, **fields, linears=linears)
    share = np.float32(1 / (new.prototypes + new.shared_expert))
    routers = _drawn_routers(config, key)
    layers, layer_tables = [], []
    for i, (layer, tables_of_layer) in enumerate(gpt.layers(params["blocks"], tables)):
        layer, mlp = dict(layer), {}
        for name in names:
            module = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), layer.pop(name))
            if name not in stored:
                layout = layouts[name][i] if name in layouts else None
                module = dense_module(old, name, module, layout)
            mlp[name] = module
        mlp["mlp_out"] = {name: share * leaf for name, leaf in mlp["mlp_out"].items()}
        copies = lambda leaf: np.broadcast_to(leaf, (new.experts, *leaf.shape))  # noqa: E731
        experts = {ROUTER: routers[i], **jax.tree.map(copies, mlp)}
        experts |= {"shared": mlp} if new.shared_expert else {}
        layers.append({**layer, "experts": experts})
        layer_tables.append(
            {name: t for name, t in tables_of_layer.items() if name not in names or name in stored}
        )
    blocks, tables = (gpt.stacked_layers(config, trees) for trees in (layers, layer_tables))
    return config, {**params, "blocks": blocks}, tables


def _refuse_other_layouts(old, new, name, layouts):
    """Raises UserError unless the MLP has the blocks that the experts of `new` have."""
    before, after = old.linear(name), new.linear(name)
    mask = expert_layout(new, name).mask
    if (
        name not in layouts
        or (before.block, before.hadamard, before.rank) != (after.block, after.hadamard, 0)
        or any(not np.array_equal(layout.mask, mask) for layout in layouts[name])
    ):
        raise UserError(
            f"{name} of the experts is block-sparse at density {after.density:g} in this run, and "
            "the MLP of the initial weights does not have these blocks; legal: dense experts, by "
            "sparsity.projections of attention alone or experiments.gpt13b_dense, or initial "
            "weights with the layouts of this run."
        )


def _drawn_routers(config, key):
    """Returns the routers of all layers as `gpt.init` draws them, [layers, d_model, experts]."""

    @jax.jit
    def draw(key):
        groups = split_groups(gpt.init(config, key)["blocks"])
        return jnp.concatenate([group["experts"][ROUTER] for group in groups])

    return np.asarray(draw(key))
