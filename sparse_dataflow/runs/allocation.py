"""Density budgets: the density of each projection, and of each part of the depth."""

import dataclasses
import math
from collections.abc import Callable, Mapping

from sparse_dataflow.core.config.layer_groups import layer_groups, mean_multiplier
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.layouts.patterns import legal_densities, make_layout
from sparse_dataflow.files.errors import UserError

DEPTH = "depth:"
"""Prefix of a budget that lists multipliers by depth."""


def allocate(model: ModelConfig, budget: str) -> ModelConfig:
    """Returns `model` with the densities of a budget on its block-sparse or masked projections.

    Args:
      model: config with equal densities of all sparse projections.  That density is the budget: the
        fraction of the dense FLOPs of these projections that their stored blocks may cost.
      budget: one of
        "uniform": no change.
        "qkv:0.25,mlp_in:0.0625": densities by projection; the others are unchanged.
        "qkv:0.5x,mlp_in:1.5x": multiples of the density of the model; the others are unchanged.
        "depth:1.5x,0.5x": multiples for equal parts of the depth, first layers first.
        "qkv:0.25,depth:1.5x,0.5x": both; multiples are of each projection's density.

    Raises:
      UserError: the budget or a projection is unknown, the parts do not divide the layers, or the
        pattern has no layout of a density; names the legal values.
    """
    if budget == "uniform" or not _budgeted(model):
        return model
    # The comma before both texts makes a budget that is nothing but a depth look like one after
    # names.
    names, by_depth, multiples = f",{budget}".partition(f",{DEPTH}")
    if model.masked_projections and by_depth:
        raise UserError(
            f"--set sparsity.budget={budget} is for block-sparse weights; legal for masked ones: "
            "uniform, or densities by projection such as mlp_in:0.5."
        )
    densities = _named(model, names[1:], budget) if names else {}
    specs = dict(model.linears)
    for name, density in densities.items():
        specs[name] = dataclasses.replace(specs[name], density=density)
    model = dataclasses.replace(model, linears=specs)
    return _by_depth(model, multiples, budget) if by_depth else model


def _legal(model, name):
    """Returns the densities for which the pattern of a projection has a layout, ascending."""
    rows, columns = model.projection_shape(name)
    balanced = legal_densities(rows, columns, model.linear(name).block)
    return [density for density in balanced if has_layout(model, name, density)]


def has_layout(model: ModelConfig, name: str, density: float) -> bool:
    """Returns whether the pattern of a projection has a layout of a density."""
    spec, (rows, columns) = model.linear(name), model.projection_shape(name)
    try:
        make_layout(spec.pattern, rows, columns, spec.block, density)
    except UserError:
        return False
    return True


# Two projections may have different grids, so a multiplier can be legal for one and not for the
# other: all are tried before training.
def _by_depth(model, multiples, budget):
    texts = multiples.split(",")
    multipliers = [_multiplier(text) for text in texts]
    for text, multiplier in zip(texts, multipliers):
        if multiplier <= 0:
            raise UserError(
                f"--set sparsity.budget={budget}: {text!r} is not a multiple of --density; legal: "
                f"numbers above 0 followed by x, as in {DEPTH}1.5x,0.5x."
            )
    layers, count = model.num_layers, len(multipliers)
    if layers % count:
        legal = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0)
        raise UserError(
            f"--set sparsity.budget={budget} names {count} parts of the depth, which do not divide "
            f"{layers} layers; legal: {legal}."
        )
    for name in model.sparse_projections:
        spec, density = model.linear(name), model.linear(name).density
        for text, multiplier in zip(texts, multipliers):
            product = density * multiplier
            if not has_layout(model, name, product):
                legal = _neighbours(_legal(model, name), product)
                raise UserError(
                    f"--set sparsity.budget={budget}: {text} of {density:g} gives {name} a "
                    f"density of {product:.4g}, for which {spec.pattern} has no balanced layout; "
                    f"nearest legal: {', '.join(f'{value / density:.6g}x' for value in legal)}."
                )
    by_depth = tuple(value for value in multipliers for _ in range(layers // count))
    return dataclasses.replace(model, density_by_depth=by_depth)


def _multiplier(text):
    """Parses a number such as "1.5x"; returns 0 for other texts."""
    try:
        value = float(text.removesuffix("x")) if text.endswith("x") else 0.0
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def _neighbours(legal, density):
    """Returns the legal densities just below and just above a density."""
    below = [value for value in legal if value < density][-1:]
    return below + [value for value in legal if value > density][:1]


def _budgeted(model):
    """Returns the projections that have densities of their own."""
    return (*model.sparse_projections, *model.masked_projections)


def _named(model, items, budget):
    densities, names = {}, _budgeted(model)
    for item in items.split(","):
        name, colon, text = item.partition(":")
        if not colon or name not in model.projections:
            raise UserError(
                f"--set sparsity.budget={budget} is not legal: {item!r} names no projection; "
                f"legal: uniform, {DEPTH}1.5x,0.5x, or densities such as "
                f"attn_out:0.25,mlp_in:0.125 of {', '.join(names)}."
            )
        if name not in names:
            raise UserError(
                f"--set sparsity.budget={budget} sets a density for {name}, which is dense; legal: "
                f"{', '.join(names)}."
            )
        if name in densities:
            raise UserError(
                f"--set sparsity.budget={budget} names {name} twice; legal: one density for each."
            )
        unit = model.linear(name).density if text.endswith("x") else 1.0
        try:
            densities[name] = unit * float(text.removesuffix("x"))
        except ValueError:
            densities[name] = 0.0
        if not 0 < densities[name] <= 1:
            raise UserError(
                f"--set sparsity.budget={budget}: {item!r} is not a density in (0, 1], or a "
                "multiple of --density such as 0.5x with a product in (0, 1]."
            )
    return densities


def allocation_table(
    model: ModelConfig, flops: Callable[[ModelConfig], Mapping[str, float]]
) -> str:
    """Returns a text table of the density, stored blocks or rank, and FLOPs of each projection.

    With per-layer densities it has rows for each layer group, and a last line with mean densities.

    Args:
      flops: model -> projection -> training FLOPs per token over all layers (see `training.cost`).
    """
    total = sum(flops(model)[name] for name in model.projections)
    groups = layer_groups(model)
    lines = [f"{'projection':<11}{'grid':>11}{'density':>9}{'blocks a layer':>16}{'FLOPs':>8}"]
    labels = ["layers"]
    for group in groups:
        layers, group_flops = group.layers, flops(group.model)
        for name in model.projections:
            share = group_flops[name] * len(layers) / model.num_layers / total
            lines.append(_row(group.model, name, share))
            labels.append(f"{layers.start + 1} to {layers.stop}")
    if len(groups) == 1:
        return "\n".join(lines)
    lines = [f"{label:<11}{line}" for label, line in zip(labels, lines)]
    mean = ", ".join(
        f"{name} {model.linear(name).density * mean_multiplier(model):.4g}"
        for name in model.projections
        if name in model.sparse_projections
    )
    return "\n".join([*lines, f"mean density over {model.num_layers} layers: {mean}"])


def _row(model, name, share):
    spec, sides = model.linear(name), model.projection_shape(name)
    grid, density, stored = spec.weight.row(spec, sides)
    return f"{name:<11}{grid:>11}{density:>9} {stored:>15}{share:>8.1%}"
