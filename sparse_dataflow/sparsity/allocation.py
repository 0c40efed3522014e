"""How much of each projection is stored, and at which depth: one density for all, or a budget."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping

from sparse_dataflow.errors import UserError
from sparse_dataflow.models.groups import layer_groups, mean_multiplier
from sparse_dataflow.models.sizes import PROJECTIONS, ModelConfig
from sparse_dataflow.sparsity.patterns import legal_densities, make_layout

BUDGETS = ("uniform", "compute")
DEPTH = "depth:"
"""Before the multipliers of the parts of the depth."""


def allocate(model: ModelConfig, budget: str) -> ModelConfig:
    """`model` with its block-sparse projections at the densities that `budget` gives them.

    Args:
      model: its specs' density, equal on all of them, is the budget: the share of their dense FLOPs
        that the stored blocks may cost together.
      budget: "uniform" changes nothing.  "compute" follows the Erdos-Renyi rule (arXiv 1707.04780,
        section 3; arXiv 1911.11134, section 3): a density proportional to (in + out) / (in out), so
        that small projections, which have fewer paths to lose, keep more; never above the budget.
        Or densities by name, "qkv:0.25,mlp_in:0.0625", or what multiplies the model's own,
        "qkv:0.5x,mlp_in:1.5x"; the others keep it.  Or what multiplies the density of all in equal
        parts of the depth, from first to last, "depth:1.5x,0.5x".

    Raises:
      UserError: an unknown budget or projection, parts that do not divide the layers, or a density
        that the pattern has no layout for; names the legal ones.
    """
    if budget == "uniform" or not model.sparse_projections:
        return model
    if budget.startswith(DEPTH):
        return _by_depth(model, budget)
    if budget == "compute":
        densities = _erdos_renyi(model)
    else:
        densities = _named(model, budget)
    specs = dict(model.linears)
    for name, density in densities.items():
        specs[name] = dataclasses.replace(specs[name], density=density)
    return dataclasses.replace(model, linears=specs)


def _erdos_renyi(model):
    """The legal densities next to the rule's, of all that fit the budget the nearest in ratio."""
    names = model.sparse_projections
    sides = {name: model.projection_shape(name) for name in names}
    weights = {name: math.prod(pair) for name, pair in sides.items()}
    legal = {name: _legal(model, name) for name in names}
    budget = sum(model.linear(name).density * weights[name] for name in names)
    wanted = _shared(budget, weights, {name: sum(pair) for name, pair in sides.items()})
    nearest = {
        name: {
            max([d for d in legal[name] if d <= wanted[name]], default=legal[name][0]),
            min([d for d in legal[name] if d >= wanted[name]], default=legal[name][-1]),
        }
        for name in names
    }
    best = None
    for densities in itertools.product(*(sorted(nearest[name]) for name in names)):
        cost = sum(density * weights[name] for name, density in zip(names, densities))
        away = sum(abs(math.log(d / wanted[name])) for name, d in zip(names, densities))
        if cost <= budget * (1 + 1e-9) and (best is None or (away, -cost) < best[:2]):
            best = away, -cost, dict(zip(names, densities))
    if best is None:
        least = sum(legal[name][0] * weights[name] for name in names)
        whole = sum(weights.values())
        raise UserError(
            f"--density_budget=compute finds no densities that cost {budget / whole:.4g} of the "
            f"dense FLOPs or less; one block a line of every projection costs {least / whole:.4g}: "
            "legal: a larger --density, or a smaller --block."
        )
    return best[2]


def _shared(budget, weights, parts):
    """Densities proportional to parts / weights, at most 1, that cost the budget together."""
    full: set[str] = set()
    while True:
        left = budget - sum(weights[name] for name in full)
        scale = left / max(1, sum(part for name, part in parts.items() if name not in full))
        found = {n: 1.0 if n in full else scale * parts[n] / weights[n] for n in weights}
        above = {name for name, density in found.items() if density > 1}
        if not above:
            return found
        full |= above


def _legal(model, name):
    """The densities that the projection's pattern has a layout for, ascending."""
    rows, columns = model.projection_shape(name)
    balanced = legal_densities(rows, columns, model.linear(name).block)
    return [density for density in balanced if _has_layout(model, name, density)]


def _has_layout(model, name, density):
    spec, (rows, columns) = model.linear(name), model.projection_shape(name)
    try:
        make_layout(spec.pattern, rows, columns, spec.block, density)
    except UserError:
        return False
    return True


def _by_depth(model, budget):
    given = budget.removeprefix(DEPTH).split(",")
    multipliers = [_multiplier(text) for text in given]
    for text, multiplier in zip(given, multipliers):
        if multiplier <= 0:
            raise UserError(
                f"--density_budget={budget}: {text!r} is no multiple of --density; legal: numbers "
                f"above 0 with x behind them, as in {DEPTH}1.5x,0.5x."
            )
    layers, parts = model.num_layers, len(multipliers)
    if layers % parts:
        legal = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0)
        raise UserError(
            f"--density_budget={budget} names {parts} parts of the depth, which do not divide "
            f"{layers} layers; legal: {legal}."
        )
    for name in model.sparse_projections:
        spec, density = model.linear(name), model.linear(name).density
        for text, multiplier in zip(given, multipliers):
            wanted = density * multiplier
            if not _has_layout(model, name, wanted):
                named = _nearest(_legal(model, name), wanted)
                raise UserError(
                    f"--density_budget={budget}: {text} of --density={density:g} gives {name} a "
                    f"density of {wanted:.4g}, and {spec.pattern} has no balanced layout of that; "
                    f"legal next to it: "
                    f"{', '.join(f'{one / density:.6g}x' for one in named)}."
                )
    each = layers // parts
    by_depth = tuple(multiplier for multiplier in multipliers for _ in range(each))
    return dataclasses.replace(model, density_by_depth=by_depth)


def _multiplier(text):
    """The number of "1.5x"; 0 where it is none."""
    try:
        found = float(text.removesuffix("x")) if text.endswith("x") else 0.0
    except ValueError:
        return 0.0
    return found if math.isfinite(found) else 0.0


def _nearest(legal, wanted):
    """The legal densities next to one, below and above it."""
    below = [one for one in legal if one < wanted][-1:]
    return below + [one for one in legal if one > wanted][:1]


def _named(model, budget):
    densities = {}
    for part in budget.split(","):
        name, colon, text = part.partition(":")
        if not colon or name not in PROJECTIONS:
            raise UserError(
                f"--density_budget={budget} is not legal: {part!r} names no projection; legal: "
                f"{', '.join(BUDGETS)}, {DEPTH}1.5x,0.5x, or densities such as {PROJECTIONS[0]}:"
                f"0.25,{PROJECTIONS[2]}:0.125 of {', '.join(model.sparse_projections)}."
            )
        if name not in model.sparse_projections:
            raise UserError(
                f"--density_budget={budget} gives a density to {name}, which is dense; legal: "
                f"{', '.join(model.sparse_projections)}."
            )
        unit = model.linear(name).density if text.endswith("x") else 1.0
        try:
            densities[name] = unit * float(text.removesuffix("x"))
        except ValueError:
            densities[name] = 0.0
        if not 0 < densities[name] <= 1:
            raise UserError(
                f"--density_budget={budget}: {part!r} is not a density in (0, 1], nor one with x "
                "behind it that multiplies --density."
            )
    return densities


def allocation_table(
    model: ModelConfig, flops: Callable[[ModelConfig], Mapping[str, float]]
) -> str:
    """What each projection of every block stores, as lines of text; by groups of layers where they
    store unequally much, with the mean over all below.

    Args:
      model: its specs.
      flops: model -> projection -> training FLOPs a token over all layers, as `planning.cost`
        counts.
    """
    total = sum(flops(model)[name] for name in PROJECTIONS)
    found = layer_groups(model)
    lines = [f"{'projection':<11}{'grid':>11}{'density':>9}{'blocks a layer':>16}{'FLOPs':>8}"]
    before = [""]
    for group in found:
        layers, own = group.layers, flops(group.model)
        for name in PROJECTIONS:
            share = own[name] * len(layers) / model.num_layers / total
            lines.append(_row(group.model, name, share))
            before.append(f"{layers.start + 1} to {layers.stop}")
    if len(found) == 1:
        return "\n".join(lines)
    lines = [f"{layers or 'layers':<11}{line}" for layers, line in zip(before, lines)]
    mean = ", ".join(
        f"{name} {model.linear(name).density * mean_multiplier(model):.4g}"
        for name in PROJECTIONS
        if name in model.sparse_projections
    )
    return "\n".join([*lines, f"mean density over {model.num_layers} layers: {mean}"])


def _row(model, name, share):
    spec, sides = model.linear(name), model.projection_shape(name)
    if spec.kind == "dense":
        return f"{name:<11}{f'{sides[0]}x{sides[1]}':>11}{'dense':>9}{'':>16}{share:>8.1%}"
    blocks = sides[0] * sides[1] // spec.block**2
    stored = f"{round(spec.density * blocks):,} of {blocks:,}"
    grid = "x".join(str(side // spec.block) for side in sides)
    return f"{name:<11}{grid:>11}{spec.density:>9.4g}{stored:>16}{share:>8.1%}"
