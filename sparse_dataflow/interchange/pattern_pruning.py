"""Pruning to the layouts of a pattern, so that programs are specialised to them."""

import dataclasses
from collections.abc import Callable, Mapping

import jax

from sparse_dataflow.core.config.model import GROWN, ModelConfig
from sparse_dataflow.core.config.sparsity import GROUPED_PATTERNS
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.optim.optimizers import TrainState
from sparse_dataflow.core.training.transitions import change_model
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import feature_order, width

OTHERWISE = "or run.prune_to=blocks"


def is_grouped(model: ModelConfig, params: Mapping) -> bool:
    """Returns whether weights store exactly the blocks of a pattern of equal groups.

    Args:
      params: a tree with their layouts.
    """
    patterns = {model.linear(name).pattern for name in model.sparse_projections}
    if not patterns or not patterns <= set(GROUPED_PATTERNS):
        return False
    return stacks.layouts_of(model, params) == model_layouts.layouts(model)


def refuse(old: ModelConfig, params: Mapping, new: ModelConfig) -> None:
    """Raises UserError if weights cannot be pruned to the patterns of a model.

    Args:
      params: a tree with their layouts.
    """
    if any(getattr(old, name) != getattr(new, name) for name in GROWN):
        return  # The larger weights are judged once they are made.
    layouts, stored = model_layouts.layouts(new), stacks.layouts_of(old, params)
    if all(stored.get(name) == layers for name, layers in layouts.items()):
        return
    if new.experts:
        raise UserError(
            "run.prune_to=pattern exchanges features, which is not possible with experts; legal: "
            f"models without model.experts, {OTHERWISE}."
        )
    for name, layers in layouts.items():
        spec = new.linear(name)
        if spec.hadamard:
            raise UserError(
                f"run.prune_to=pattern exchanges features, and sparsity.hadamard={spec.hadamard} "
                f"mixes those that {name} reads; legal: sparsity.hadamard=0, {OTHERWISE}."
            )
        before = stored.get(name, layers)
        if before != layers and [each.nnz for each in before] == [each.nnz for each in layers]:
            raise UserError(
                f"run.prune_to=pattern prunes weights, and those of run.init_from have as many "
                f"blocks of {name} as the pattern {spec.pattern}, but others; legal: "
                "run.prune_to=blocks, which keeps them."
            )


def refuse_other_layouts(old: ModelConfig, params: Mapping, new: ModelConfig) -> None:
    """Raises UserError unless weights have the layouts of a model's patterns already."""
    if stacks.layouts_of(old, params) != model_layouts.layouts(new):
        raise UserError(
            "training.adapter_rank freezes the weights of run.init_from, which have other blocks "
            "than the pattern; legal: run.prune_to=blocks."
        )


def to_pattern(
    state: TrainState,
    old: ModelConfig,
    new: ModelConfig,
    refit: Callable[[ModelConfig, dict, ModelConfig, Mapping], dict] | None = None,
) -> TrainState:
    """Returns a state of model `old` as a state of `new` with the layouts of its patterns.

    The weights become dense and features change places (`feature_order`); then the blocks of the
    patterns are stored.  Weights that have these layouts keep every bit.

    Args:
      state: canonical, without moments and with concrete layouts; it must not be used again.
      old: config of the state's model; `refuse` refuses others.
      refit: (dense model, its params, new model, layouts) -> params that are fitted on the blocks
        of the layouts; None keeps the weights of these blocks.
    """
    layouts = model_layouts.layouts(new)
    stored = stacks.layouts_of(old, state.rest)
    if not layouts or all(stored.get(name) == layers for name, layers in layouts.items()):
        return change_model(state, old, new)
    if old.linears:
        dense = dataclasses.replace(old, linears={}, density_by_depth=())
        state, old = change_model(state, old, dense), dense
    params, layouts = moved(old, jax.device_get(state.params), new, "run.prune_to=pattern")
    if refit is not None:
        params = refit(old, params, new, layouts)
    params = jax.tree.map(jax.numpy.asarray, params)
    return change_model(state._replace(params=params), old, new, given=layouts)


def moved(
    old: ModelConfig, params: dict, new: ModelConfig, setting: str
) -> tuple[dict, dict[str, list[BlockLayout]]]:
    """Returns dense parameters whose features changed places, and the layouts of the patterns.

    A line says how much of the weights the stored blocks have.

    Args:
      old: dense model of the parameters.
      params: on the host.
      new: the model with patterns.
      setting: what asked for it, for the line.
    """
    layouts = model_layouts.layouts(new)
    order = feature_order.search(old, params, layouts)
    say(
        f"{setting}: the stored blocks have {order.after:.1%} of the squared weights, and "
        f"{order.before:.1%} before features changed places"
    )
    return width.reordered(old, params, order.sources), layouts
