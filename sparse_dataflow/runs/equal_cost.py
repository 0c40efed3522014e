"""Models of equal cost: the width at which a dense or block-sparse GPT costs what another one does.

Widths are whole numbers of heads and of blocks, so a mismatch of cost remains; `mismatch` gives it.
The depth and the ratio d_ff / d_model stay.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP, LinearSpec
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.training import cost
from sparse_dataflow.files.errors import UserError

TOLERANCE = 0.025
"""Largest mismatch of cost, as a fraction."""

DENSITY_RATIO = 1.2
"""Largest ratio of a stored density to the requested one, or of the requested to the stored."""

HEAD_RATIO = 1.5
"""Largest ratio of a head's width to that of the model's heads, or the reverse."""

_DENSITY_WEIGHT = 0.1
_ALIGNMENT_WEIGHT = 0.005
_ALIGNED = 64
"""Weights of the tie-breaks: the stored density, and powers of 2 up to 64 that divide a width."""

_WIDEST = 256
"""Bound of the search, in widths of the given model."""

Cost = Callable[[ModelConfig], float]


def stored_parameters(model: ModelConfig) -> int:
    """Returns the stored weights of all projections.

    Embeddings do not count, as they stay dense (arXiv 2001.08361, section 2.1).
    """
    flops = cost.flops_per_token(model, 1, training=False).sections
    weights = 0.0
    for name in model.projections:
        active = model.active_experts if name in MLP else 1
        # A weight has two FLOPs in the forward pass of a token.
        weights += flops[name] / 2 / active * model.stored_copies(name)
    return round(weights)


def mismatch(model: ModelConfig, cost_of: Cost, target: float) -> float:
    """Returns the model's cost relative to `target`, minus 1."""
    return cost_of(model) / target - 1


def equal_cost_model(
    model: ModelConfig, cost_of: Cost, target: float, density: float = 1.0, multiple: int = 2
) -> ModelConfig:
    """Returns `model` at the width and density at which it costs `target`.

    Among the widths within TOLERANCE it prefers those whose stored density is near `density`.

    Args:
      model: depth, head width and d_ff / d_model; its block-sparse projections give block, pattern
        and low-rank terms.
      cost_of: a cost that grows with the width, such as FLOPs per token.
      target: the cost to reach.
      density: requested fraction of the blocks stored; 1 gives a dense model.
      multiple: what the width of a dense model is a multiple of.

    Raises:
      UserError: no width within TOLERANCE has a balanced layout and legal heads.
    """
    if density < 1:
        model.require("widths", "a width of equal cost")
    matches = []
    for candidate in _candidates(model, cost_of, target, density, multiple):
        error = abs(mismatch(candidate, cost_of, target))
        if error <= TOLERANCE:
            width = candidate.d_model
            # `width & -width` is the largest power of 2 that divides the width.
            aligned = min(_ALIGNED, width & -width) / _ALIGNED
            score = error + _DENSITY_WEIGHT * _density_error(candidate, density)
            matches.append((score - _ALIGNMENT_WEIGHT * aligned, width, candidate))
    # Layouts are made last and only until one succeeds: they are the slow part of the search.
    for _, _, candidate in sorted(matches, key=lambda match: match[:2]):
        if _has_layouts(candidate):
            return candidate
    block = max((model.linear(name).block for name in model.sparse_projections), default=0)
    blocks, smaller = "", ""
    if density < 1:
        blocks = f", density within {DENSITY_RATIO:g}x, blocks of {block}"
        smaller = ", or a smaller --block"
    raise UserError(
        f"No width gives a model of density {density:g} with {target:.4g} FLOPs or parameters "
        f"(within {TOLERANCE:.1%}{blocks}); legal: a larger budget or another density{smaller}."
    )


def whole_blocks(model: ModelConfig) -> int:
    """Returns what a width must be a multiple of, so that block-sparse projections fit."""
    return math.lcm(*(model.linear(name).block for name in model.sparse_projections))


def resized(model: ModelConfig, width: int, density: float) -> ModelConfig | None:
    """Returns the model at another width and density; None where heads or layouts do not fit.

    Heads are as wide as they were, up to HEAD_RATIO.  Density 1 gives a dense model.
    """
    heads = _heads(width, model)
    d_ff, rest = divmod(width * model.d_ff, model.d_model)
    if not heads or rest:
        return None
    specs = {name: model.linear(name) for name in model.sparse_projections}
    linears: dict[str, LinearSpec] = {}
    if density < 1:
        linears = {n: dataclasses.replace(spec, density=density) for n, spec in specs.items()}
    try:
        return dataclasses.replace(
            model,
            d_model=width,
            num_heads=heads,
            num_kv_heads=model.num_kv_heads and heads * model.kv_heads // model.num_heads,
            d_ff=d_ff,
            linears=linears,
        )
    except UserError:  # For example a Hadamard transform that does not divide the width.
        return None


def _candidates(model, cost_of, target, density, multiple) -> Iterator[ModelConfig]:
    """Yields the models to choose from, up to those that are too large."""
    step = whole_blocks(model) if density < 1 else multiple
    for width in range(step, _WIDEST * model.d_model, step):
        sized = [resized(model, width, each) for each in _densities(density, width // step)]
        legal = [each for each in sized if each]
        yield from legal
        # Costs grow with the width, so all later candidates are too large as well.
        if legal and mismatch(legal[0], cost_of, target) > TOLERANCE:
            return


def _densities(density, ring):
    """Returns the densities near the requested one on a ring of blocks, ascending."""
    if density == 1:
        return [1.0]
    least, most = density / DENSITY_RATIO, density * DENSITY_RATIO
    counts = range(math.ceil(least * ring), math.floor(most * ring) + 1)
    # Balanced layouts store whole cells of a ring; see `layouts.patterns`.
    return [count / ring for count in counts if 0 < count < ring]


def _heads(width, model):
    """Returns the number of heads whose width is nearest to the model's; 0 if none is near.

    As many query heads share a key/value head as in the model.  A given head_dim stays.
    """
    group = model.num_heads // model.kv_heads
    if model.head_dim:
        heads, rest = divmod(width * model.num_heads, model.d_model)
        return 0 if rest or heads % group else heads
    head_width = model.head_width
    # Rotations pair the features of a head.
    multiple = 2 if model.positions == "rotary" else 1
    fewest = max(1, math.ceil(width / head_width / HEAD_RATIO))
    most = math.floor(width / head_width * HEAD_RATIO)
    legal = [h for h in range(fewest, most + 1) if width % h == 0 and width // h % multiple == 0]
    legal = [h for h in legal if h % group == 0]
    return min(legal, key=lambda h: abs(math.log(width / h / head_width)), default=0)


def _density_error(model, density):
    """Returns |log| of the stored density over the requested one."""
    stored = {model.linear(name).density for name in model.sparse_projections}
    return max((abs(math.log(each / density)) for each in stored), default=0.0)


def _has_layouts(model):
    try:
        make_layouts(model)
    except UserError:
        return False
    return True


def make_layouts(model: ModelConfig) -> None:
    """Makes the layout of each block-sparse projection; raises UserError where there is none."""
    for name in model.sparse_projections:
        spec = model.linear(name)
        rows, columns = model.projection_shape(name)
        make_layout(spec.pattern, rows, columns, spec.block, spec.density)
