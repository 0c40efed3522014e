"""The layouts that a model begins with.  Loads no jax: what has none is refused before that."""

import dataclasses
import functools
import math

from sparse_dataflow.core.config.layer_groups import layer_groups, layer_linear
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP, ROW_PARALLEL, LinearSpec
from sparse_dataflow.core.layouts.layout import BlockLayout, Groups
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.files.errors import UserError


def projection_layout(config: ModelConfig, projection: str, layer: int) -> BlockLayout:
    """Returns the initial layout of one block-sparse projection of one layer.

    Raises:
      UserError: the spec has no balanced layout; names the legal values.
    """
    spec = layer_linear(config, projection, layer)
    names = config.projections
    # Weights are numbered in order of depth, so successive ones may have successive factors.
    offset = config.seed + layer * len(names) + names.index(projection)
    in_features, out_features = config.projection_shape(projection)
    shape = (in_features, out_features, spec.block, spec.density, offset)
    reads_residual = projection not in ROW_PARALLEL
    try:
        return with_room(make_layout(spec.pattern, *shape, reads_residual), spec)
    except UserError as error:
        raise UserError(
            f"{projection}: {error} Or leave {projection} dense: sparsity.projections names the "
            "others."
        ) from None


def with_room(layout: BlockLayout, spec: LinearSpec) -> BlockLayout:
    """Returns the layout with tables as wide as `LinearSpec.max_fan_out` asks."""
    # Factor 1 asks for tables without room, as wide as the longest line.
    if spec.max_fan_out == 1:
        return layout
    mean = layout.nnz / layout.in_blocks
    width = min(layout.out_blocks, math.ceil(spec.max_fan_out * mean))
    return dataclasses.replace(layout, max_fan_out=width)


def layouts(config: ModelConfig) -> dict[str, list[BlockLayout]]:
    """Returns the initial layouts of each sparse projection, one for each layer.

    Raises:
      UserError: a projection has no balanced layout of its density.
    """
    return {
        projection: [projection_layout(config, projection, i) for i in range(config.num_layers)]
        for projection in config.projections
        if config.linear(projection).weight.stores_blocks
    }


def check_layouts(config: ModelConfig) -> None:
    """Raises UserError where `layouts` does, but builds only one layer of each group."""
    for group in layer_groups(config):
        layouts(dataclasses.replace(group.model, num_layers=1))
    if config.experts:
        for name in set(config.sparse_projections) & set(MLP):
            expert_layout(config, name)


@functools.lru_cache(maxsize=64)
def expert_layout(config: ModelConfig, projection: str) -> BlockLayout:
    """Returns a layout of a block-sparse projection of the experts, with the groups of all layers.

    Raises:
      UserError: the layouts do not consist of equal groups that all layers share.
    """
    layouts = [projection_layout(config, projection, layer) for layer in range(config.num_layers)]
    groups: set[Groups | None] = {layout.groups for layout in layouts}
    if None in groups or len(groups) > 1:
        from sparse_dataflow.core.config.sparsity import GROUPED_PATTERNS

        raise UserError(
            f"The experts of {projection} have layouts of the pattern "
            f"{config.linear(projection).pattern}, whose blocks are not equal groups, the same in "
            f"every layer; legal for experts: sparsity.pattern={' or '.join(GROUPED_PATTERNS)}, or "
            "sparsity.projections of attention alone."
        )
    return layouts[0]
