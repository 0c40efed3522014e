"""How the layouts of a model change while it trains: a registry of methods.

A method may do two things.  Its `update` chooses new layouts of the same degrees every `every`
steps: shapes stay, tables are data, so nothing is compiled again.  Its `stages` say which model is
trained from which fraction of the steps on: where one ends, shapes change, and the programs of the
next are compiled before the training starts.  Values and moments follow by one rule, the same for
every method (`training.transitions`): a block that stays keeps them bit by bit, a new one starts at
zero.

A method of your own, which swaps the smallest eighth for random blocks:

    register("mine", Method(update=lambda layout, norms, gradients, share, rng:
                            set_blocks(layout, norms, gradients, 1 / 8, rng)))
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.models.groups import groups
from sparse_dataflow.models.sizes import LinearSpec, ModelConfig
from sparse_dataflow.sparsity.balance import balanced_top
from sparse_dataflow.sparsity.layout import BlockLayout


@dataclasses.dataclass(frozen=True)
class EvolutionConfig:
    """Which method, and when.

    Attributes:
      method: a name in METHODS.
      every: steps between two updates (set, rigl).
      at: fraction of the steps after which the last update is made (set, rigl), the last stage
        begins (gradual, sparse_to_dense, low_rank_tail); 0 is the method's own.
      share: stored blocks that the first update exchanges, as a fraction; it falls to 0 along a
        cosine (arXiv 1911.11134, section 3).
      first: projections that sparse_to_dense makes dense at `at`, the others halfway from there to
        the end; none for all at once.
      plateau: evaluations without progress after which the next stage of sparse_to_dense begins,
        before its time; 0 for never.
      given_layouts: whether the first layouts come with the weights that a training begins with,
        and so are data, in place of the pattern's.
    """

    method: str = "static"
    every: int = 100
    at: float = 0.0
    share: float = 0.3
    first: tuple[str, ...] = ()
    plateau: int = 0
    given_layouts: bool = False

    def __post_init__(self):
        object.__setattr__(self, "first", tuple(self.first))
        if self.method not in METHODS:
            raise UserError(
                f"Evolution {self.method!r} is unknown; legal: {', '.join(sorted(METHODS))}."
            )
        if self.every < 1 or not 0 <= self.at < 1 or not 0 < self.share < 1:
            raise UserError(
                f"Evolution every {self.every} steps until {self.at} of them, exchanging "
                f"{self.share} of the blocks; legal: 1 or more, [0, 1), (0, 1)."
            )
        if self.plateau < 0:
            raise UserError(f"A plateau of {self.plateau} evaluations; legal: 0 or more.")

    @property
    def until(self) -> float:
        """`at`, or the method's own where that is 0."""
        return self.at or METHODS[self.method].at


@dataclasses.dataclass(frozen=True)
class Stage:
    """The model that is trained from a fraction of the steps on.

    Attributes:
      start: fraction of the steps, in [0, 1).
      model: what is trained.
      runtime_layouts: whether the layouts are known only while training, and so are data.
    """

    start: float
    model: ModelConfig
    runtime_layouts: bool = False


Update = Callable[
    [BlockLayout, np.ndarray, np.ndarray | None, float, np.random.Generator], BlockLayout
]
"""(layout, float [nnz] norms of its blocks, float [in_blocks, out_blocks] norms of the dense
gradient's blocks or None, share to exchange, random numbers) -> layout of the same degrees."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A way for layouts to change.

    Attributes:
      update: chooses the next layout of the same degrees, or None where layouts stay.
      reads_gradients: whether `update` is given the dense gradient's block norms.
      stages: (final or initial model, config) -> the models in the order of training.
      at: see `EvolutionConfig`.
    """

    update: Update | None = None
    reads_gradients: bool = False
    stages: Callable[[ModelConfig, EvolutionConfig], tuple[Stage, ...]] | None = None
    at: float = 0.75


METHODS: dict[str, Method] = {}


def register(name: str, method: Method) -> None:
    """Makes a method known under `name`; raises ValueError if it is taken."""
    if name in METHODS:
        raise ValueError(f"evolution {name!r} is already registered")
    METHODS[name] = method


def stages(model: ModelConfig, config: EvolutionConfig) -> tuple[Stage, ...]:
    """The models that `config` trains in turn, the first from the first step.

    Raises:
      UserError: the method can do nothing with this model.
    """
    method = METHODS[config.method]
    if config.method != "static":
        _refuse_nothing_to_do(model, config.method)
    found: tuple[Stage, ...] = (Stage(0.0, model, runtime_layouts=method.update is not None),)
    if method.stages is not None:
        found = method.stages(model, config)
    if config.given_layouts:
        found = tuple(map(_with_runtime_layouts, found))
    return found


def _with_runtime_layouts(stage):
    runtime = stage.runtime_layouts or bool(stage.model.sparse_projections)
    return dataclasses.replace(stage, runtime_layouts=runtime)


def exchanged_share(config: EvolutionConfig, step: int, steps: int) -> float:
    """Fraction of stored blocks that the update before step `step` (from 0) of `steps` exchanges;
    0 where none is due."""
    last = config.until * steps
    if METHODS[config.method].update is None or step == 0 or step % config.every or step > last:
        return 0.0
    return config.share / 2 * (1 + math.cos(math.pi * step / last))


def sources_of(old: BlockLayout, new: BlockLayout) -> np.ndarray:
    """Int32 [new.nnz]: where each block of `new` lies in the values of `old`, -1 where nowhere."""
    return old.slots[new.rows, new.cols].astype(np.int32)


def set_blocks(
    layout: BlockLayout,
    norms: np.ndarray,
    gradient_norms: np.ndarray | None,
    share: float,
    rng: np.random.Generator,
) -> BlockLayout:
    """SET at block level (arXiv 1707.04780): the smallest blocks give way to random ones.

    A dropped block returns only where the balance leaves no other.
    """
    kept, dropped = _without_smallest(layout, norms, share)
    scores = rng.random(kept.shape) - (dropped.sum() + 1) * dropped
    return _filled_up(layout, kept, scores)


def rigl_blocks(
    layout: BlockLayout,
    norms: np.ndarray,
    gradient_norms: np.ndarray | None,
    share: float,
    rng: np.random.Generator,
) -> BlockLayout:
    """RigL at block level (arXiv 1911.11134): the smallest blocks give way to those whose dense
    gradient is largest, which may be some of themselves."""
    assert gradient_norms is not None  # Registered as one that reads them.
    kept, _ = _without_smallest(layout, norms, share)
    return _filled_up(layout, kept, gradient_norms)


def largest_blocks(
    norms: np.ndarray, block: int, degree: int, stored: np.ndarray | None = None
) -> BlockLayout:
    """The balanced layout of the largest blocks (one-shot pruning by magnitude).

    Args:
      norms: float [in_blocks, out_blocks], Euclidean; their squares are what is kept most of.
      block: side of a block.
      degree: cells of the ring (gcd of the grid) that every cell reads; see `patterns`.
      stored: bool [in_blocks, out_blocks], the blocks to choose among; None for all.
    """
    ring = math.gcd(*norms.shape)
    fan_in, fan_out = degree * norms.shape[0] // ring, degree * norms.shape[1] // ring
    forbidden = None if stored is None else ~stored
    mask = balanced_top(np.square(norms), fan_in, fan_out, forbidden=forbidden)
    return BlockLayout.from_mask(mask, block)


def _without_smallest(layout, norms, share):
    """(mask of the blocks that stay, of those that are dropped)."""
    smallest = np.argsort(norms, kind="stable")[: round(share * layout.nnz)]
    dropped = np.zeros(layout.mask.shape, bool)
    dropped[layout.rows[smallest], layout.cols[smallest]] = True
    return layout.mask & ~dropped, dropped


def _filled_up(layout, kept, scores):
    fan_in, fan_out = int(layout.fan_in.max()), int(layout.fan_out.max())
    return BlockLayout.from_mask(balanced_top(scores, fan_in, fan_out, kept), layout.block)


def _refuse_nothing_to_do(model, method):
    if not model.sparse_projections:
        raise UserError(f"--evolution={method} needs a block-sparse projection.")
    for group in groups(model):
        for name in model.sparse_projections:
            if group.model.linear(name).density == 1:
                raise UserError(
                    f"--evolution={method} has no block to add or remove in {name}: density 1 "
                    "stores every block; legal: a density below 1."
                )


def _sparse_to_dense(model, config):
    """SPDF (arXiv 2303.10464): the sparse model, then the dense one; some projections earlier.

    What begins at zero has fewer steps to be learned in, and learns faster (see `TURNED_DENSE_RATE`
    of `optim.optimizers`).  A low-rank term and a Hadamard transform become part of their weight.
    """
    to_dense = lambda spec: LinearSpec(turned_dense=True)  # noqa: E731
    dense = _with_sparse_specs(model, to_dense)
    if not config.first:
        return Stage(0.0, model), Stage(config.until, dense)
    sparse = model.sparse_projections
    if not set(config.first) < set(sparse):
        raise UserError(
            f"--evolve_first={','.join(config.first)} makes some sparse projections dense before "
            f"the others; legal: some of {', '.join(sparse)}, but not all."
        )
    partly = _with_sparse_specs(model, to_dense, config.first)
    return (
        Stage(0.0, model),
        Stage(config.until, partly),
        Stage((1 + config.until) / 2, dense),
    )


def _low_rank_tail(model, config):
    """SLoPe (arXiv 2405.15960): adapters join for the last steps."""
    if not any(model.linear(name).rank for name in model.sparse_projections):
        raise UserError("--evolution=low_rank_tail adds a term of --rank; legal: 1 or more.")
    bare = _with_sparse_specs(model, lambda s: dataclasses.replace(s, rank=0))
    return Stage(0.0, bare), Stage(config.until, model)


def _gradual(model, config):
    """Block-magnitude pruning along the cubic schedule of arXiv 1710.01878, in halvings.

    Each stage stores only its blocks, at twice the density of the next: the schedule's staircase,
    entered where the cubic reaches the stage's density, so that the density is never below it.
    The last stage begins at `config.until`, the end of the cubic.  Where layers store unequally
    much, each is halved from the stage on in which it would store all.
    """
    lowest = min(
        group.model.linear(name).density
        for group in groups(model)
        for name in model.sparse_projections
    )
    halvings = math.ceil(math.log2(1 / lowest) - 1e-9)
    found = []
    for power in range(halvings, -1, -1):
        density = min(1.0, lowest * 2**power)
        left = (density - lowest) / (1 - lowest)
        found.append(
            Stage(
                start=config.until * (1 - left ** (1 / 3)),
                model=_doubled(model, power) if power else model,
                runtime_layouts=power < halvings,
            )
        )
    return tuple(found)


def _doubled(model, power):
    """The model with every density doubled so many times, up to 1; weights whole in all layers are
    dense ones."""
    least = min(model.density_by_depth, default=1.0)
    by_depth: set[tuple[float, ...]] = set()

    def spec(name):
        own = model.linear(name)
        density = own.density * least * 2**power
        if density > 1 - 1e-9:
            return LinearSpec(rank=own.rank)
        by_depth.add(tuple(min(m / least, 1 / density) for m in model.density_by_depth))
        # Any degree is legal for `cyclic`; the layout itself is chosen while training.
        return dataclasses.replace(own, pattern="cyclic", density=density)

    specs = {name: spec(name) for name in model.sparse_projections}
    if len(by_depth) > 1:
        raise UserError(
            "--evolution=gradual prunes layers that store unequally much where all projections "
            "have one density; legal: --density_budget=uniform, or another --evolution."
        )
    linears = {**dict(model.linears), **specs}
    return dataclasses.replace(model, linears=linears, density_by_depth=next(iter(by_depth), ()))


def _with_sparse_specs(model, change, names=None):
    specs = {name: change(model.linear(name)) for name in names or model.sparse_projections}
    return dataclasses.replace(model, linears={**dict(model.linears), **specs})


register("static", Method())
register("set", Method(update=set_blocks))
register("rigl", Method(update=rigl_blocks, reads_gradients=True))
register("gradual", Method(stages=_gradual, at=0.5))
register("sparse_to_dense", Method(stages=_sparse_to_dense, at=0.7))
register("low_rank_tail", Method(stages=_low_rank_tail, at=0.99))
