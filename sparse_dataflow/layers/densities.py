"""Densities of a model's layers, and of a schedule from dense to sparse."""

import math

from flax import nnx

from sparse_dataflow.core.layouts.patterns import legal_densities
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.layers.block_sparse_linear import filled_up
from sparse_dataflow.layers.general import Contraction
from sparse_dataflow.layers.paths import dotted
from sparse_dataflow.layers.registered import is_linear, is_registered, read_linear
from sparse_dataflow.layers.replace import Where


def erk_densities(
    model: nnx.Module, density: float, *, block: int = 64, where: Where | None = None
) -> dict[str, float]:
    """Returns a density for each linear of a model, larger for smaller weights: for `sd.sparsify`.

    The Erdős-Rényi rule (arXiv 1707.04780, section 2; arXiv 1911.11134, section 3): the density of
    a weight is proportional to (inputs + outputs) / (inputs x outputs) and at most 1.  Each is
    rounded down to a legal density of its layer; blocks that remain go to the layers that were
    rounded down most.  So the whole stores at most `density` of the weights, unless a layer's
    smallest legal density is more.

    Args:
      model: any nnx model.
      density: fraction of all weights of the linears that is stored, in (0, 1].
      block: side of a block, in features.
      where: (path, linear) -> whether it is one of them; None for all.

    Raises:
      UserError: the density is not legal, no linear is selected, or the block is too large for one.

    Examples:
        >>> model = nnx.Sequential(nnx.Linear(64, 256, rngs=nnx.Rngs(0)),
        ...                        nnx.Linear(256, 256, rngs=nnx.Rngs(1)))
        >>> densities = sd.erk_densities(model, 0.25, block=16)
        >>> densities
        {'layers.0': 0.5, 'layers.1': 0.1875}
        >>> sparse = sd.sparsify(model, density=densities, block=16)
    """
    if not 0 < density <= 1:
        raise UserError(f"The density {density} is not legal; legal: above 0 and at most 1.")
    sizes, legal = {}, {}
    for path, node in nnx.iter_modules(model):
        name = dotted(path)
        if not is_linear(node) or (where is not None and not where(name, node)):
            continue
        try:
            # Every layer of another class is a product with one matrix, and is measured as such.
            linear = read_linear(node)[1] if is_registered(node) else node
            if not isinstance(linear, nnx.Linear):
                linear = Contraction.of(node).linear(node)
            layers = math.prod(linear.kernel.shape[:-2])
            sides = filled_up((linear.in_features, linear.out_features), block, density)
            sizes[name] = layers, *sides
            legal[name] = legal_densities(*sides, block)
        except UserError as error:
            raise UserError(f"{name}: {error} Or leave it out with `where`.") from None
    if not sizes:
        raise UserError("The model has no linear that `where` selects.")
    weights = {name: math.prod(size) for name, size in sizes.items()}
    budget = density * sum(weights.values())
    wanted = _proportional(sizes, weights, budget)
    # The rule gives any number, a layout has few densities.  Rounding keeps the total, or the
    # model would cost more than was asked for.
    return _rounded(wanted, legal, weights, budget)


def _proportional(sizes, weights, budget):
    """Returns densities in proportion to the rule, at most 1, that store `budget` weights."""
    full: set[str] = set()
    while True:
        left = budget - sum(weights[name] for name in full)
        rest = {n: layers * (i + o) for n, (layers, i, o) in sizes.items() if n not in full}
        scale = left / sum(rest.values()) if rest else 0.0
        # layers (i + o) scale weights are stored of layers i o.
        wanted = {name: share * scale / weights[name] for name, share in rest.items()}
        above = {name for name, value in wanted.items() if value > 1}
        if not above:
            return dict.fromkeys(full, 1.0) | wanted
        full |= above


def _rounded(wanted, legal, weights, budget):
    """Returns the legal densities below, or above where most is missing and there is room."""
    below = {
        name: max((d for d in legal[name] if d <= value + 1e-9), default=legal[name][0])
        for name, value in wanted.items()
    }
    room = budget - sum(below[name] * weights[name] for name in below)
    missing = sorted(below, key=lambda name: (below[name] - wanted[name]) * weights[name])
    for name in missing:
        above = next((d for d in legal[name] if d > below[name]), None)
        if above is not None and below[name] < wanted[name]:
            more = (above - below[name]) * weights[name]
            if more <= room + 1e-9:
                below[name], room = above, room - more
    return {name: below[name] for name in weights}


def cubic_density(
    step: int, *, first: int, last: int, end: float, start: float = 1.0, parts: int = 0
) -> float:
    """Returns the density at a step of a training that prunes, for `sd.evolve(..., "gradual")`.

    The cubic schedule of arXiv 1710.01878, equation 1: it prunes fast while many blocks are
    redundant, and slowly at the end.

    Args:
      step: number of steps done.
      first: step at which pruning begins; `start` before.
      last: step from which the density is `end`.
      end: last density, in (0, 1].
      start: density at the beginning.
      parts: if not 0, the result is rounded up to a multiple of 1 / parts, as a layer's densities
        are; see `sd.legal_densities`.

    Raises:
      UserError: the steps or densities are out of order.

    Examples:
        >>> [sd.cubic_density(n, first=0, last=100, end=0.25, parts=8) for n in (0, 10, 50, 100)]
        [1.0, 0.875, 0.375, 0.25]
    """
    if parts < 0:
        raise UserError(f"parts={parts} is not legal; legal: 0 or more.")
    if not first < last:
        raise UserError(f"last={last} is not after first={first}; legal: {first + 1} or more.")
    if not 0 < end <= start <= 1:
        raise UserError(
            f"end={end} and start={start} are out of order; legal: 0 < end <= start <= 1."
        )
    done = min(1.0, max(0.0, (step - first) / (last - first)))
    density = end + (start - end) * (1 - done) ** 3
    # Rounded up to a density that the layout has, so the last step alone reaches the end.
    return min(1.0, math.ceil(density * parts - 1e-9) / parts) if parts else density
