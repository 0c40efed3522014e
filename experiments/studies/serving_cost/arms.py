"""The arms of the study: shapes of equal served FLOPs, and when they are pruned.

Costs are the planner's.  A served model costs its forward pass, with attention and output layer.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.training import cost
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.equal_cost import stored_parameters

KEEP = ("norm", "activation", "saliency", "random")
"""Scores of a block: its norm; the norm with each weight times the root mean square of its input
(arXiv 2306.11695); the sum over steps of (weight . gradient)^2 (first-order saliency); chance."""

HIDDEN = ("mlp_in", "mlp_out")
ALL = ("qkv", "attn_out", *HIDDEN)
"""Projections of a layer; each reads what those before it give."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """A model of the comparison and how it is trained.

    A pruned model is cut to the served FLOPs of the narrow dense model, or to its stored weights.

    Attributes:
      width: d_model, relative to the narrow dense model's.
      hidden: d_ff, relative to the narrow dense model's.
      heads: number of heads, relative to the narrow dense model's.
      heads_width: width of all heads together, relative to the narrow dense model's; 0 is `width`.
      experts: number of experts of each MLP; 0 is one MLP.
      pruned: projections that are cut; the others stay dense.
      equal: what the served model shares with the narrow one: "flops" a token, or "stored" weights
        of the projections.
      density: stored fraction of the pruned projections instead; 0 is the one that `equal` gives.
      start: fraction of the training FLOPs at which pruning starts.
      end: fraction of the training FLOPs at which it ends; equal to `start` for a single cut.
      stages: cuts, equally far apart in FLOPs, along the cubic of arXiv 1710.01878.
      keep: score of the blocks that stay, see KEEP.
      block: side of a block, or its inputs where `block_outputs` is not 0.
      block_outputs: outputs of a block; 0 is `block`.
      across: whether blocks of all projections compete ("model"), or those of each projection.
      momentum: whether optimizer moments of the weights that stay are "kept" or "reset" at a cut.
      rewarm: steps of linear warm-up after each cut.
      teacher: weight of the divergence from the model before the first cut, which is its teacher
        from then on; its forward FLOPs count.
    """

    width: float = 1.0
    hidden: float = 1.0
    heads: float = 1.0
    heads_width: float = 0.0
    experts: int = 0
    pruned: tuple[str, ...] = ()
    equal: str = "flops"
    density: float = 0.0
    start: float = 0.25
    end: float = 0.75
    stages: int = 10
    keep: str = "norm"
    block: int = 4
    block_outputs: int = 0
    across: str = "projection"
    momentum: str = "kept"
    rewarm: int = 0
    teacher: float = 0.0

    @property
    def block_sides(self) -> tuple[int, int]:
        """Inputs and outputs of a block."""
        return self.block, self.block_outputs or self.block

    @property
    def static(self) -> bool:
        """Whether the model is sparse from the first step on."""
        return bool(self.pruned) and self.end == 0


_QUARTER = Arm(width=2, hidden=2, pruned=ALL)
_HALF = Arm(width=1.5, hidden=1.5, pruned=ALL)
_EIGHTH = Arm(width=8 / 3, hidden=8 / 3, pruned=ALL)
_change = dataclasses.replace
_HALF_HEADS = _change(_HALF, heads_width=1, start=0.1, end=0.5)
_QUARTER_HEADS = _change(_QUARTER, heads_width=1, start=0.1, end=0.5)

ARMS: Mapping[str, Arm] = {
    "narrow": Arm(),
    # Dense models of the served FLOPs of d_model 16 and d_ff 192, with more width.
    "narrow_wider": Arm(width=1.25, hidden=134 / 192),
    "narrow_widest": Arm(width=1.5, hidden=92 / 192),
    # The wide models without a cut, whose served cost is higher.
    "wide_2": Arm(width=1.5, hidden=1.5, heads_width=1),
    "wide_4": Arm(width=2, hidden=2, heads_width=1),
    "pruned_2": _HALF,
    "pruned_4": _QUARTER,
    "pruned_8": _EIGHTH,
    "static_2": _change(_HALF, start=0, end=0, stages=1, keep="random"),
    "static_4": _change(_QUARTER, start=0, end=0, stages=1, keep="random"),
    # Experts of the narrow model's MLP; block-sparse ones of the same active cost.
    "experts_4": Arm(experts=4),
    "experts_8": Arm(experts=8),
    "experts_8_static_2": Arm(
        hidden=2, experts=8, pruned=HIDDEN, start=0, end=0, stages=1, keep="random"
    ),
    "experts_8_pruned_2": _change(_HALF_HEADS, experts=8),
    # Equal stored weights in the projections instead of equal served FLOPs.
    "pruned_2_stored": _change(_HALF, equal="stored"),
    "pruned_4_stored": _change(_QUARTER, equal="stored"),
    # What is kept.
    "pruned_4_activation": _change(_QUARTER, keep="activation"),
    "pruned_4_saliency": _change(_QUARTER, keep="saliency"),
    "pruned_4_across": _change(_QUARTER, across="model"),
    "pruned_4_saliency_across": _change(_QUARTER, keep="saliency", across="model"),
    "pruned_4_random": _change(_QUARTER, keep="random"),
    # Blocks.
    "pruned_4_block_1": _change(_QUARTER, block=1),
    "pruned_4_block_2": _change(_QUARTER, block=2),
    "pruned_4_block_8": _change(_QUARTER, block=8),
    "pruned_4_block_16": _change(_QUARTER, block=16),
    # Schedule.
    "pruned_4_one_cut": _change(_QUARTER, start=0.5, end=0.5, stages=1),
    "pruned_4_40_cuts": _change(_QUARTER, stages=40),
    "pruned_4_early": _change(_QUARTER, start=0.1, end=0.5),
    "pruned_4_to_half": _change(_QUARTER, start=0.25, end=0.5),
    "pruned_4_earliest": _change(_QUARTER, start=0.05, end=0.3),
    "pruned_4_saliency_early": _change(_QUARTER, keep="saliency", start=0.1, end=0.5),
    "pruned_8_early": _change(_EIGHTH, start=0.1, end=0.5),
    "pruned_2_early": _change(_HALF, start=0.1, end=0.5),
    "pruned_2_earliest": _change(_HALF, start=0.05, end=0.3),
    "pruned_4_reset": _change(_QUARTER, momentum="reset"),
    "pruned_4_rewarm": _change(_QUARTER, rewarm=20),
    "pruned_4_taught": _change(_QUARTER, teacher=0.5),
    # Shapes.
    "pruned_4_mlp": Arm(hidden=4, pruned=HIDDEN),
    "pruned_2_mlp": Arm(hidden=2, pruned=HIDDEN),
    "pruned_4_narrow_heads": _change(_QUARTER, heads_width=1),
    "pruned_2_narrow_heads": _change(_HALF, heads_width=1),
    "pruned_4_narrow_heads_early": _QUARTER_HEADS,
    "pruned_2_narrow_heads_early": _HALF_HEADS,
    "pruned_2_narrow_heads_saliency": _change(_HALF_HEADS, keep="saliency"),
    "pruned_2_narrow_heads_block_1": _change(_HALF_HEADS, block=1),
    "pruned_2_narrow_heads_block_2": _change(_HALF_HEADS, block=2),
    "pruned_2_narrow_heads_late_block_1": _change(_HALF_HEADS, block=1, start=0.25, end=0.75),
    "pruned_4_narrow_heads_block_1": _change(_QUARTER_HEADS, block=1),
    "pruned_2_narrow_heads_latest": _change(_HALF_HEADS, start=0.5, end=0.75),
    "pruned_4_narrow_heads_block_2": _change(_QUARTER_HEADS, block=2),
    "pruned_2_narrow_heads_stored": _change(_HALF_HEADS, equal="stored"),
    "pruned_2_narrow_heads_taught": _change(_HALF_HEADS, teacher=0.5),
    "pruned_2_narrow_heads_across": _change(_HALF_HEADS, across="model"),
    "pruned_2_narrow_heads_rewarm": _change(_HALF_HEADS, rewarm=20),
    "pruned_2_narrow_heads_40_cuts": _change(_HALF_HEADS, stages=40),
    # Rows of 12.
    "pruned_2_narrow_heads_rows": _change(_HALF_HEADS, block=1, block_outputs=12),
    "pruned_4_narrow_heads_rows": _change(_QUARTER_HEADS, block=1, block_outputs=12),
    "static_2_narrow_heads": _change(_HALF_HEADS, start=0, end=0, stages=1, keep="random"),
}
"""Name -> arm."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """A change of the stored blocks.

    Attributes:
      step: of the training, before which it happens.
      density: stored fraction of the pruned projections from then on.
    """

    step: int
    density: float


@dataclasses.dataclass(frozen=True)
class Course:
    """What one training of an arm does.

    Attributes:
      steps: optimizer steps.
      cuts: in order.
      flops: training FLOPs by the planner, with the teacher's.
      mean_weights: weights of the projections, on average over the steps.
    """

    steps: int
    cuts: tuple[Cut, ...]
    flops: float
    mean_weights: float


def shape(narrow: ModelConfig, arm: Arm) -> ModelConfig:
    """Returns the dense model that an arm is cut from.

    Raises:
      UserError: blocks or heads do not divide its widths.
    """
    widths = [
        narrow.d_model * arm.width,
        narrow.d_ff * arm.hidden,
        narrow.d_model * (arm.heads_width or arm.width),
    ]
    num_heads = round(narrow.num_heads * arm.heads)
    multiple = math.lcm(*arm.block_sides, num_heads) if arm.pruned else num_heads
    for width in widths:
        if width % multiple > 1e-6 and multiple - width % multiple > 1e-6:
            raise UserError(
                f"A width of {width:g} is no multiple of {multiple}, which blocks of "
                f"{'x'.join(map(str, arm.block_sides))} and {num_heads} heads need; legal: other "
                "--width, --hidden or arms."
            )
    width, hidden, heads = map(round, widths)
    head_dim = heads // num_heads if heads != width else 0
    return dataclasses.replace(
        narrow,
        d_model=width,
        num_heads=num_heads,
        d_ff=hidden,
        head_dim=head_dim,
        experts=arm.experts,
    )


def served_model(narrow: ModelConfig, arm: Arm) -> ModelConfig:
    """Returns the model that an arm serves: `shape` with the stored fraction of its blocks."""
    return at_density(shape(narrow, arm), arm, served_density(narrow, arm))


def at_density(model: ModelConfig, arm: Arm, density: float) -> ModelConfig:
    """Returns the model with that fraction of the blocks of the pruned projections."""
    if density == 1 or not arm.pruned:
        return model
    spec = LinearSpec("block_sparse", "random", density=density, block=arm.block)
    return model.with_linears(spec, arm.pruned)


@functools.cache
def served_density(narrow: ModelConfig, arm: Arm) -> float:
    """Returns the stored fraction of the pruned projections that equals the narrow model's cost.

    Raises:
      UserError: the dense rest of the arm costs more than the narrow model.
    """
    if not arm.pruned:
        return 1.0
    if arm.density:
        return arm.density
    model = shape(narrow, arm)
    sections, target = served_sections(model), served_sections(narrow)
    if arm.equal == "stored":
        target = {name: flops for name, flops in target.items() if name in ALL}
        sections = {name: flops for name, flops in sections.items() if name in ALL}
    pruned = sum(sections[name] for name in arm.pruned)
    rest = sum(sections.values()) - pruned
    density = (sum(target.values()) - rest) / pruned
    if not 0 < density <= 1:
        raise UserError(
            f"No stored fraction of {', '.join(arm.pruned)} gives width {model.d_model} the cost "
            f"of width {narrow.d_model}; legal: a larger --width, or a smaller --vocabulary."
        )
    return density


def served_sections(model: ModelConfig) -> Mapping[str, float]:
    """Returns the forward FLOPs of a token by section."""
    return cost.flops_per_token(model, model.max_len, training=False).sections


def training_flops(model: ModelConfig) -> float:
    """Returns the training FLOPs of a token."""
    return cost.flops_per_token(model, model.max_len).total


def course(narrow: ModelConfig, arm: Arm, narrow_steps: float, chunk: int, batch: int) -> Course:
    """Returns the steps and cuts with the training FLOPs of `narrow_steps` of the narrow model.

    Args:
      narrow: the narrow dense model.
      arm: which model, and when it is pruned.
      narrow_steps: optimizer steps of the narrow model.
      chunk: cuts happen, and the training ends, at multiples of this many steps.
      batch: sequences in a step.
    """
    tokens = batch * narrow.max_len
    budget = narrow_steps * tokens * training_flops(narrow)
    dense, final = shape(narrow, arm), served_density(narrow, arm)
    cuts, density, spent, weights, step = [], 1.0, 0.0, 0.0, 0

    @functools.cache
    def costs(density, has_teacher):
        """Returns training FLOPs of a token and stored weights."""
        model = at_density(dense, arm, density)
        lessons = sum(served_sections(dense).values()) if has_teacher else 0.0
        return training_flops(model) + lessons, stored_parameters(model)

    while True:
        wanted = _density_at(arm, final, spent / budget)
        if wanted < density:
            density = wanted
            cuts.append(Cut(step, density))
        flops, stored = costs(density, bool(arm.teacher and cuts))
        flops *= chunk * tokens
        if spent + flops / 2 > budget:
            return Course(step, tuple(cuts), spent, weights / max(step, 1))
        spent += flops
        step += chunk
        weights += chunk * stored


def _density_at(arm, final, fraction):
    """Returns the stored fraction at a fraction of the training FLOPs."""
    if not arm.pruned or fraction < arm.start:
        return 1.0
    if arm.end == arm.start:
        return final
    passed = math.floor(arm.stages * (fraction - arm.start) / (arm.end - arm.start))
    return final + (1 - final) * (1 - min(1, passed / arm.stages)) ** 3
