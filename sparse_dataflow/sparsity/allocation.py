"""How much of each projection is stored: one density for all, or a FLOP budget shared out.

Every block section of a model stores equally many blocks, because executors scan, pipeline and
relay them as equals; so a projection has one density at every depth.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping

from sparse_dataflow.errors import UserError
from sparse_dataflow.models.sizes import PROJECTIONS, ModelConfig
from sparse_dataflow.sparsity.patterns import legal_densities, make_layout

BUDGETS = ("uniform", "compute")


def allocate(model: ModelConfig, budget: str) -> ModelConfig:
    """`model` with its block-sparse projections at the densities that `budget` gives them.

    Args:
      model: its specs' density, equal on all of them, is the budget: the share of their dense FLOPs
        that the stored blocks may cost together.
      budget: "uniform" changes nothing.  "compute" follows the Erdos-Renyi rule (arXiv 1707.04780,
        section 3; arXiv 1911.11134, section 3): a density proportional to (in + out) / (in out), so
        that small projections, which have fewer paths to lose, keep more; never above the budget.
        Or densities by name, "qkv:0.25,mlp_in:0.0625", or what multiplies the model's own,
        "qkv:0.5x,mlp_in:1.5x"; the others keep it.

    Raises:
      UserError: an unknown budget or projection, or a density that the pattern has no layout for;
        names the legal ones.
    """
    if budget == "uniform" or not model.sparse_projections:
        return model
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
    spec = model.linear(name)
    rows, columns = model.projection_shape(name)
    found = []
    for density in legal_densities(rows, columns, spec.block):
        try:
            make_layout(spec.pattern, rows, columns, spec.block, density)
        except UserError:
            continue
        found.append(density)
    return found


def _named(model, budget):
    densities = {}
    for part in budget.split(","):
        name, colon, text = part.partition(":")
        if not colon or name not in PROJECTIONS:
            raise UserError(
                f"--density_budget={budget} is not legal: {part!r} names no projection; legal: "
                f"{', '.join(BUDGETS)}, or densities such as {PROJECTIONS[0]}:0.25,"
                f"{PROJECTIONS[2]}:0.125 of {', '.join(model.sparse_projections)}."
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


def allocation_table(model: ModelConfig, flops: Mapping[str, float]) -> str:
    """What each projection of every block stores, as lines of text.

    Args:
      model: its specs.
      flops: projection -> training FLOPs a token over all layers, as `planning.cost` counts.
    """
    total = sum(flops[name] for name in PROJECTIONS)
    lines = [f"{'projection':<11}{'grid':>11}{'density':>9}{'blocks a layer':>16}{'FLOPs':>8}"]
    for name in PROJECTIONS:
        spec = model.linear(name)
        sides = model.projection_shape(name)
        share = f"{flops[name] / total:>8.1%}"
        if spec.kind == "dense":
            lines.append(f"{name:<11}{f'{sides[0]}x{sides[1]}':>11}{'dense':>9}{'':>16}{share}")
            continue
        blocks = sides[0] * sides[1] // spec.block**2
        stored = f"{round(spec.density * blocks):,} of {blocks:,}"
        grid = "x".join(str(side // spec.block) for side in sides)
        lines.append(f"{name:<11}{grid:>11}{spec.density:>9.4g}{stored:>16}{share}")
    return "\n".join(lines)
