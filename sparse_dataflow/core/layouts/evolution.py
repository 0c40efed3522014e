"""How block layouts change during training: a registry of evolution methods.

A method has up to two parts:
- `update` chooses a new layout of equal fan-in every `every` steps.  Shapes stay and index tables
  are arrays, so nothing recompiles.
- `phase_specs` lists the model of each phase and the fraction of the steps at which it starts.
  Shapes change between phases; the programs of all phases are compiled before training starts.

Values and optimizer moments follow one rule for every method (`training.transitions`): a block that
stays keeps them bit by bit, a new block starts at zero.

Example of a new method, which replaces the smallest eighth of the blocks by random blocks:

    register("mine", Method(update=lambda layout, norms, gradients, share, shards, rng:
                            set_blocks(layout, norms, gradients, 1 / 8, shards, rng)))

Drops and growth are chosen together.  The fan-in of every output block stays constant (SRigL, arXiv
2305.02299), so the tables by output block keep their shape and no product has padding in the
forward pass.  The fan-out varies up to `BlockLayout.max_fan_out`.

RigL drops the smallest blocks of a layer and then grows the blocks of largest gradient anywhere.
With constant fan-in an output block must grow as many blocks as it drops.  If magnitude alone chose
the drops, growth would follow them to the wrong outputs and capture about 80% of the gradient norm
that RigL captures without a constraint.  So every exchange is a pair of blocks of one output: it
gains the gradient of the absent block and loses the norm of the stored one.  The best pairs of the
layer are chosen.  They capture 96% where nothing bounds the fan-out, and drop blocks whose norm is
6% larger than that of the smallest.
"""

import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sparse_dataflow.core.config.layer_groups import layer_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP, LinearSpec
from sparse_dataflow.core.config.sparsity import METHOD_NAMES, RUNTIME_PATTERN, EvolutionConfig
from sparse_dataflow.core.layouts.balance import balanced_top
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.files.errors import UserError


def exchange(
    layout: BlockLayout,
    norms: np.ndarray,
    growth: np.ndarray,
    share: float,
    shards: int = 1,
    gain: float = 1.0,
) -> BlockLayout:
    """Returns the layout after the best exchanges of a stored for an absent block.

    A pair's score is `gain` times the growth score of the absent block minus the norm of the stored
    one.  Both are in units of the best sum that the layer has for as many blocks, so that neither
    scale matters.  Pairs are chosen greedily: each output offers its smallest stored block against
    its best absent block whose input has room.

    Args:
      layout: of constant fan-in.
      norms: float [nnz], norms of the stored blocks.
      growth: float [in_blocks, out_blocks], scores of absent blocks, at least 0.
      share: fraction of the stored blocks to exchange; fewer where too few blocks are absent.
      shards: equal ranges of input blocks, between which no block moves.
      gain: weight of growth against norms; 0 drops the smallest blocks of the layer.

    Returns:
      A layout of the same fan-in and the same number of blocks in every shard, whose fan-out is at
      most `layout.max_fan_out`.
    """
    mask, count = layout.mask.copy(), round(share * layout.nnz)
    # Without a limit an input block may have every output.
    limit = layout.max_fan_out or layout.out_blocks
    absent = growth[~mask]
    # [in_blocks, out_blocks], as `growth`.
    loss = np.zeros(mask.shape)
    loss[layout.rows, layout.cols] = norms / (np.sort(norms)[:count].sum() or 1.0)
    profit = gain * growth / (np.sort(absent)[max(0, len(absent) - count) :].sum() or 1.0)
    fan_out = layout.fan_out.copy()
    # As a mesh cuts rows: in equal consecutive ranges.
    shard_of_row = np.arange(layout.in_blocks) * shards // layout.in_blocks
    stacks: list[tuple[int, list[int], list[int]]] = []
    offers: list[tuple[float, int]] = []

    def offer(cell):
        col, drops, grows = stacks[cell]
        while grows and fan_out[grows[-1]] >= limit:
            grows.pop()
        if drops and grows:
            heapq.heappush(offers, (loss[drops[-1], col] - profit[grows[-1], col], cell))

    for col in range(layout.out_blocks):
        # Best candidates last.  Growth scores order them even where `gain` is 0.
        by_loss = np.argsort(-loss[:, col], kind="stable")
        by_growth = np.argsort(growth[:, col], kind="stable")
        for shard in range(shards):
            drops, grows = (
                [row for row in order[shard_of_row[order] == shard] if mask[row, col] == stored]
                for order, stored in ((by_loss, True), (by_growth, False))
            )
            stacks.append((col, drops, grows))
            offer(len(stacks) - 1)
    # A cell offers losses that rise and profits that fall, so no pair gets better later.  The best
    # offer of the heap is thus the best of all.  An offer is stale if its input block filled up
    # meanwhile; `offer` then replaces it.  An input block without room is not offered again, even
    # if a later drop makes room: each block is tried once.
    while count and offers:
        _, cell = heapq.heappop(offers)
        col, drops, grows = stacks[cell]
        if fan_out[grows[-1]] < limit:  # Else another output took the room since the offer.
            dropped, grown = drops.pop(), grows.pop()
            mask[dropped, col], mask[grown, col] = False, True
            fan_out[dropped] -= 1
            fan_out[grown] += 1
            count -= 1
        offer(cell)
    return BlockLayout.from_mask(mask, layout.block, layout.max_fan_out)


@dataclasses.dataclass(frozen=True)
class PhaseSpec:
    """A model and the fraction of the steps at which its training starts.

    `training.phases.Phase` is the same with step numbers.

    Attributes:
      start: fraction of the steps, in [0, 1).
      runtime_layouts: whether layouts are known only at run time, so that their tables are
        arguments of the compiled programs.
    """

    start: float
    model: ModelConfig
    runtime_layouts: bool = False

    @property
    def priced_model(self) -> ModelConfig:
        """The model for the planner: layouts of run time are tables, whatever their pattern."""
        if not self.runtime_layouts:
            return self.model
        irregular = functools.partial(dataclasses.replace, pattern=RUNTIME_PATTERN)
        return _with_sparse_specs(self.model, irregular)


Update = Callable[
    [BlockLayout, np.ndarray, np.ndarray | None, float, int, np.random.Generator], BlockLayout
]
"""(layout, float [nnz] block norms, float [in_blocks, out_blocks] block norms of the dense gradient
or None, share of blocks to exchange, row shards, random generator) -> layout with the same fan-in,
`max_fan_out` and number of blocks in every row shard (`EvolutionConfig.row_shards`)."""


@dataclasses.dataclass(frozen=True)
class Method:
    """An evolution method.

    Attributes:
      update: chooses the next layout; None if layouts are fixed.
      reads_gradients: whether `update` receives the block norms of the dense gradient.
      reads_activations: whether a phase is chosen by activations on training batches.
      phase_specs: (model from the flags, config) -> specs of the phases in order; None for one
        phase.
      at: default of `EvolutionConfig.at`.
      changes_blocks: whether the stored blocks of a weight change, so that a model needs some.
      mask_gain: weight of growth in an update of masks, see `Masked.exchanged`; None for a method
        that has no such update.
    """

    update: Update | None = None
    reads_gradients: bool = False
    reads_activations: bool = False
    phase_specs: Callable[[ModelConfig, EvolutionConfig], tuple[PhaseSpec, ...]] | None = None
    at: float = 0.75
    changes_blocks: bool = True
    mask_gain: float | None = None


METHODS: dict[str, Method] = {}


def register(name: str, method: Method) -> None:
    """Registers a method.

    Raises:
      ValueError: `name` is already registered.
    """
    if name in METHODS:
        raise ValueError(f"evolution {name!r} is already registered")
    METHODS[name] = method
    METHOD_NAMES.append(name)


def until(config: EvolutionConfig) -> float:
    """`EvolutionConfig.at`, or the method's own fraction where that is 0."""
    return config.at or METHODS[config.method].at


def phase_specs(model: ModelConfig, config: EvolutionConfig) -> tuple[PhaseSpec, ...]:
    """Returns the phases that `config` trains in order; the first starts at step 0.

    Raises:
      UserError: the method cannot change this model.
    """
    method = METHODS[config.method]
    specs: tuple[PhaseSpec, ...]
    if method.changes_blocks:
        model.refuse_experts(f"--evolution={config.method}", "static")
        _refuse_unchangeable(model, config.method)
    if method.update is not None:
        for name, spec in dict(model.linears).items():
            if spec.weight.has_mask and method.mask_gain is None:
                raise UserError(
                    f"--evolution={config.method} has no update of masks, and {name} has one; "
                    "legal: set, rigl, static, gradual, sparse_to_dense."
                )
        _refuse_row_shards(model, config.row_shards)
        # Tables get their widest lines from the start: a layout that later needs more room would
        # recompile.
        widen = functools.partial(dataclasses.replace, max_fan_out=config.max_fan_out)
        specs = (PhaseSpec(0.0, _with_sparse_specs(model, widen), runtime_layouts=True),)
    elif method.phase_specs is None:
        specs = (PhaseSpec(0.0, model),)
    else:
        specs = method.phase_specs(model, config)
    if config.given_layouts:
        specs = tuple(map(_with_runtime_layouts, specs))
    return specs


def _with_runtime_layouts(spec):
    runtime = spec.runtime_layouts or bool(spec.model.partial_projections)
    return dataclasses.replace(spec, runtime_layouts=runtime)


def exchanged_share(
    config: EvolutionConfig, step: int, steps: int, stored: int | None = None
) -> float:
    """Returns the fraction of stored blocks that the update before step `step` (from 0) exchanges.

    0 where no update is due.

    Args:
      stored: number of blocks of one weight; the first update exchanges at least one of them, and
        the share falls from there as that of larger weights.  None for the share of large weights.
    """
    last = until(config) * steps
    if METHODS[config.method].update is None or step == 0 or step % config.every or step > last:
        return 0.0
    # The cosine of RigL (arXiv 1911.11134, section 3): fewer exchanges towards the end.
    share = config.share / 2 * (1 + math.cos(math.pi * step / last))
    if stored is None or not share:
        return share
    # Scaled from the first update, so that a small weight exchanges one block at first and fewer,
    # in the end none, later; rounding alone would stop small weights early.
    first = exchanged_share(config, config.every, steps)
    return max(share, share / first / stored)


def block_sources(old: BlockLayout, new: BlockLayout) -> np.ndarray:
    """Returns int32 [new.nnz]: slot of each new block in the values of `old`, -1 if absent."""
    return old.slots[new.rows, new.cols].astype(np.int32)


def new_shares(
    old: Mapping[str, Sequence[BlockLayout]], new: Mapping[str, Sequence[BlockLayout]]
) -> dict[str, float]:
    """Returns the fraction of stored blocks that `old` does not store, over all layers.

    Args:
      old: projection -> layout of each layer.
      new: as `old`, on the same grids.

    Returns:
      One fraction for each projection that both have.
    """

    def share(before, after):
        common = sum(int(a.mask[b.rows, b.cols].sum()) for a, b in zip(before, after, strict=True))
        return 1 - common / sum(layout.nnz for layout in after)

    return {name: share(old[name], layers) for name, layers in new.items() if name in old}


def set_blocks(
    layout: BlockLayout,
    norms: np.ndarray,
    gradient_norms: np.ndarray | None,
    share: float,
    shards: int,
    rng: np.random.Generator,
) -> BlockLayout:
    """SET at block level (arXiv 1707.04780): replaces the smallest blocks by random blocks."""
    return exchange(layout, norms, rng.random(layout.mask.shape), share, shards, gain=0.0)


def rigl_blocks(
    layout: BlockLayout,
    norms: np.ndarray,
    gradient_norms: np.ndarray | None,
    share: float,
    shards: int,
    rng: np.random.Generator,
) -> BlockLayout:
    """RigL at block level (arXiv 1911.11134): replaces small blocks by blocks of large gradient."""
    assert gradient_norms is not None  # `reads_gradients` is True for this method.
    return exchange(layout, norms, gradient_norms, share, shards, gain=1.0)


def largest_blocks(
    norms: np.ndarray, block: int, degree: int, stored: np.ndarray | None = None
) -> BlockLayout:
    """Returns the balanced layout with the largest sum of squared block norms (one-shot magnitude
    pruning).

    Args:
      norms: float [in_blocks, out_blocks], Euclidean block norms.
      block: side of a block, in features.
      degree: cells of the ring (gcd of the grid) that every cell reads; see `patterns`.
      stored: bool [in_blocks, out_blocks], the blocks to choose among; None for all.
    """
    ring = math.gcd(*norms.shape)
    fan_in, fan_out = degree * norms.shape[0] // ring, degree * norms.shape[1] // ring
    # Without `stored` every block may be kept; with it, one-shot pruning never revives a block.
    forbidden = None if stored is None else ~stored
    mask = balanced_top(np.square(norms), fan_in, fan_out, forbidden=forbidden)
    return BlockLayout.from_mask(mask, block)


def _refuse_unchangeable(model, method):
    if not model.partial_projections:
        raise UserError(f"--evolution={method} needs a sparse projection.")
    for group in layer_groups(model):
        for name in model.partial_projections:
            if group.model.linear(name).density == 1:
                raise UserError(
                    f"--evolution={method} cannot add or remove a block in {name}: density 1 "
                    "stores every block. Legal: a density below 1."
                )


def _refuse_row_shards(model, row_shards):
    for name in model.sparse_projections:
        in_blocks = model.projection_shape(name)[0] // model.linear(name).block
        if in_blocks % row_shards:
            legal = [n for n in range(1, in_blocks + 1) if in_blocks % n == 0]
            raise UserError(
                f"--set evolution.row_shards={row_shards} does not divide the {in_blocks} input "
                f"blocks of {name}; legal: {', '.join(map(str, legal))}."
            )


def _sparse_to_dense(model, config):
    """SPDF (arXiv 2303.10464): trains the sparse model, then the dense one.

    Blocks that start at zero have fewer steps to learn in, so they get a higher learning rate
    (`TURNED_DENSE_RATE` of `optim.optimizers`).  Low-rank terms and Hadamard transforms are
    merged into the dense weight.
    """
    to_dense = lambda spec: LinearSpec(turned_dense=True)  # noqa: E731
    dense = _with_sparse_specs(model, to_dense)
    if not config.first:
        return PhaseSpec(0.0, model), PhaseSpec(until(config), dense)
    sparse = model.partial_projections
    if not set(config.first) < set(sparse):
        raise UserError(
            f"--set evolution.first={','.join(config.first)} must name some of the sparse "
            f"projections, but not all of them; legal: {', '.join(sparse)}."
        )
    partly = _with_sparse_specs(model, to_dense, config.first)
    return (
        PhaseSpec(0.0, model),
        PhaseSpec(until(config), partly),
        PhaseSpec((1 + until(config)) / 2, dense),
    )


def _gradual(model, config):
    """Block-magnitude pruning along the cubic schedule of arXiv 1710.01878, in halvings.

    Each phase stores twice the density of the next.  It starts where the cubic is halfway from the
    density before it, so the mean density of the ramp is about the cubic's.  The cubic ends at
    `until(config)`.  With per-layer densities, a layer stores every block until the phase in which
    its doubled density is below 1.
    """
    lowest = min(
        group.model.linear(name).density
        for group in layer_groups(model)
        for name in model.partial_projections
    )
    # Rounding must not add a halving to a power of 2.
    halvings = math.ceil(math.log2(1 / lowest) - 1e-9)
    specs = []
    for power in range(halvings, -1, -1):
        before, density = (min(1.0, lowest * 2**p) for p in (power + 1, power))
        # The cubic is lowest + (1 - lowest) (1 - t)^3; solved for t at the middle of both
        # densities.
        excess = ((before + density) / 2 - lowest) / (1 - lowest)
        specs.append(
            PhaseSpec(
                start=until(config) * (1 - excess ** (1 / 3)),
                model=_doubled(model, power) if power else model,
                runtime_layouts=power < halvings,
            )
        )
    return tuple(specs)


def _doubled(model, power):
    """Returns the model with every density times 2^power, at most 1.

    A projection that stores every block in every layer becomes dense.
    """
    least = min(model.density_by_depth, default=1.0)
    by_depth: set[tuple[float, ...]] = set()

    def doubled_spec(name):
        spec = model.linear(name)
        # Of the sparsest layer: once it stores every block, all do.
        density = spec.density * least * 2**power
        if density > 1 - 1e-9:
            return LinearSpec(rank=spec.rank)
        # Of each layer, over the density of the sparsest; no layer stores more than all blocks.
        by_depth.add(tuple(min(m / least, 1 / density) for m in model.density_by_depth))
        return dataclasses.replace(spec, pattern=RUNTIME_PATTERN, density=density)

    specs = {name: doubled_spec(name) for name in model.partial_projections}
    if len(by_depth) > 1:
        raise UserError(
            "--evolution=gradual with per-layer densities needs equal densities of all "
            "projections; legal: --set sparsity.budget=uniform, or another --evolution."
        )
    linears = {**dict(model.linears), **specs}
    return dataclasses.replace(model, linears=linears, density_by_depth=next(iter(by_depth), ()))


def _shared_to_own(model, config):
    """Pseudo-to-Real (M6-10T, arXiv 2110.03888): trains one block as every layer, then copies it.

    The copies then learn apart.  `runs.variants` refuses layouts that differ between layers.
    """
    if model.density_by_depth:
        raise UserError(
            "--evolution=shared_to_own trains one block for all layers, and sparsity.budget=depth "
            "gives them different densities; legal: another sparsity.budget."
        )
    shared = dataclasses.replace(model, shared_layers=True)
    return PhaseSpec(0.0, shared), PhaseSpec(until(config), model)


def _with_sparse_specs(model, change, names=None):
    specs = {name: change(model.linear(name)) for name in names or model.partial_projections}
    return dataclasses.replace(model, linears={**dict(model.linears), **specs})


def _omit_features(model, config):
    """Sparsity-accelerated training (arXiv 2406.01392) of the hidden features of the MLPs.

    The whole model trains first, which gives its optimizer moments.  Then a ladder of models leaves
    out `config.omitted` of the features, and less from rung to rung.  The whole model ends the
    training, which removes the bias of the features that were chosen.
    """
    refuse_unequal_mlp(model)
    unit = feature_unit(model)
    models = [model]
    for rung in range(OMISSION_RUNGS):
        share = config.omitted * (1 - rung / OMISSION_RUNGS)
        # At least one unit stays.
        left_out = min(round(share * model.d_ff / unit), model.d_ff // unit - 1) * unit
        models.append(dataclasses.replace(model, d_ff=model.d_ff - left_out, left_out=left_out))
    rungs = [each for each in models[1:] if each.left_out]
    if not rungs:
        raise UserError(
            f"--set evolution.omitted={config.omitted:g} leaves out none of {model.d_ff} hidden "
            f"features, which are left out by {unit}; legal: {unit / model.d_ff:.4g} or more."
        )
    # The ladder ends before the whole model does, so that features that were left out learn again.
    stop = until(config)
    first = OMISSION_START * stop
    starts = [first + (stop - first) * i / len(rungs) for i in range(len(rungs))]
    ladder = [PhaseSpec(start, each) for start, each in zip(starts, rungs, strict=True)]
    return PhaseSpec(0.0, model), *ladder, PhaseSpec(stop, model)


OMISSION_RUNGS = 4
"""Models of omit_features, each with fewer features left out."""

OMISSION_START = 0.05
"""Share of the steps before `EvolutionConfig.at` in which omit_features trains the whole model."""

_MOST_FEATURE_UNIT, _FEATURE_UNITS = 128, 16


def feature_unit(model: ModelConfig) -> int:
    """Returns what the number of features left out is a multiple of, so that matrix tiles are full:
    128, or a power of 2 of which a narrow MLP has 16 or more."""
    most = min(_MOST_FEATURE_UNIT, max(1, model.d_ff // _FEATURE_UNITS))
    return math.gcd(model.d_ff, 2 ** (most.bit_length() - 1))


def refuse_unequal_mlp(model: ModelConfig) -> None:
    """Refuses to leave out features of an MLP whose weights are not plain matrices.

    Raises:
      UserError: naming the projection and what is legal.
    """
    model.refuse_experts("--evolution=omit_features", "static")
    for name in model.projections:
        spec = model.linear(name)
        if name in MLP and (spec.rank or spec.weight is not LinearSpec().weight):
            raise UserError(
                f"--evolution=omit_features leaves out hidden features of dense MLPs, and {name} "
                f"has {'a low-rank term' if spec.rank else spec.weight.words}; legal: "
                "sparsity.projections without those of the MLP."
            )


register("static", Method(changes_blocks=False))
register("set", Method(update=set_blocks, mask_gain=0.0))
register("rigl", Method(update=rigl_blocks, reads_gradients=True, mask_gain=1.0))
register("gradual", Method(phase_specs=_gradual, at=0.5))
register("sparse_to_dense", Method(phase_specs=_sparse_to_dense, at=0.7))
register(
    "omit_features",
    Method(phase_specs=_omit_features, changes_blocks=False, reads_activations=True),
)
register("shared_to_own", Method(phase_specs=_shared_to_own, at=0.3, changes_blocks=False))
