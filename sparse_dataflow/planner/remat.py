"""Chooses which blocks keep, recompute or offload their activations under a memory limit.

After KARMA (arXiv 2008.11421), which overlaps the transfers of some layers with the computation of
others and recomputes where a transfer would stall.  A plan is a pattern of blocks, repeated, and
then blocks of one kind.  `executors.whole` runs a pattern as one iteration of a loop, and an
iteration ends with its copies.  So a transfer overlaps with the blocks of its own iteration, and
the rest of it is exposed:

  forward:  max(compute of the pattern's blocks, transfers of its offloaded blocks)
  backward: max(compute with recomputation, transfers of its offloaded blocks)

All seconds are estimates.  Pure Python: importing this module loads no jax.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from sparse_dataflow.core.config import remat
from sparse_dataflow.core.config.model import REMATS, ModelConfig
from sparse_dataflow.core.training import cost
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import GIB, Chip, Network
from sparse_dataflow.planner import plan_memory
from sparse_dataflow.planner.efficiency import for_family
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.planner.step_time import step_time

STEP_TERMS = ("head", "sends", "state", "optimizer", "waits")
"""Terms of a step's time that are not those of blocks."""

NAMES = {"none": "keep all", "keep": "keep outputs", "full": "recompute", "offload": "offload"}
"""Kind of remat -> its name in the table."""


@dataclasses.dataclass(frozen=True)
class BlockCosts:
    """Costs of one model on one device, or arrays of many plans; seconds are of a whole step.

    Attributes:
      layers: number of blocks.
      forward: seconds of a block's forward pass.
      backward: seconds of its backward pass, without recomputation.
      recompute: kind of remat -> seconds that a block recomputes.
      fixed: bytes of all that does not depend on the plan.
      saved: kind of remat -> bytes that a block keeps on the device.
      offloaded: bytes that an offloaded block copies to host memory and back, per micro-batch.
      transfer: seconds of that copy in one direction; None where no link is known, and no block can
        be offloaded.
      copied: bytes of the blocks' parameters, which two loops over parts of the depth copy.
    """

    layers: int
    forward: np.ndarray | float
    backward: np.ndarray | float
    recompute: Mapping[str, np.ndarray | float]
    fixed: np.ndarray | float
    saved: Mapping[str, np.ndarray | float]
    offloaded: np.ndarray | float
    transfer: np.ndarray | float | None
    copied: np.ndarray | float


@dataclasses.dataclass(frozen=True)
class RematPlan:
    """A pattern of blocks, repeated, and then blocks of one kind.

    Attributes:
      text: for `ModelConfig.remat`.
      device_bytes: estimated bytes on a device.
      host_bytes: estimated bytes of activations in host memory for each device.
      seconds: estimated seconds of a step that remat adds.
    """

    text: str
    kinds: tuple[str, ...]
    device_bytes: float
    host_bytes: float
    seconds: float


def block_costs(
    model: ModelConfig,
    sequence: int,
    plan: ParallelPlan,
    chip: Chip,
    adapters: bool = False,
    other_bytes: float = 0,
) -> BlockCosts:
    """Returns the costs of one model; broadcasts over the counts of a plan.

    Args:
      model: its remat is ignored, as that of `plan`.
      sequence: tokens per sequence.
      chip: must have rates.
      adapters: whether everything but low-rank terms is frozen.
      other_bytes: of a device, which belong to other models.
    """
    layers, passes = model.num_layers, np.asarray(plan.accumulation) / plan.stage
    if chip.network is None:  # The differences between kinds of remat are then without links.
        chip = dataclasses.replace(chip, network=Network(2**20, math.inf, math.inf))
    sizes, block, sections = {}, {}, {}
    for kind in REMATS:
        plan = dataclasses.replace(plan, remat=kind)
        sizes[kind] = plan_memory.run_bytes(model, sequence, plan, adapters)
        # The optimizer is no part of a block, and Muon's needs rates that a CPU's chip lacks.
        timed = dataclasses.replace(plan, optimizer="adamw")
        time = step_time(model, sequence, timed, chip, for_family(chip.family))
        # A stage idles for longer where blocks recompute, so its bubble counts.
        block[kind] = sum(s for name, s in time.terms.items() if name not in STEP_TERMS) / layers
        sections[kind] = {name: each.seconds * passes for name, each in time.sections.items()}
    # Rounding of the estimates may make a difference of two kinds slightly negative.
    recompute = {kind: np.maximum(seconds - block["none"], 0) for kind, seconds in block.items()}
    forward = sum(seconds for name, seconds in sections["none"].items() if name != "head")
    # What a block keeps: its activations, and with "none" its weights in the compute dtype.
    # The working copy that every kind needs is fixed; what "none" holds beyond it belongs to the
    # blocks.
    least = functools.reduce(np.minimum, (each.working_copy for each in sizes.values()))
    ends = np.asarray(plan.micro_batch) * sequence * plan_memory.gathered_residual(model, plan)
    saved = {
        kind: (each.activations - ends + each.working_copy - least) / layers
        for kind, each in sizes.items()
    }
    rest = (each.total - each.activations - each.working_copy for each in sizes.values())
    blocks = 1 - cost.embeddings(model) / cost.parameter_count(model)
    transfer = plan.accumulation * saved["keep"] / plan_memory.in_flight(plan)
    return BlockCosts(
        layers=layers,
        forward=forward,
        backward=np.maximum(block["none"] - forward, 0),
        recompute=recompute | {"offload": recompute["keep"] + sections["none"]["attention"]},
        fixed=other_bytes + functools.reduce(np.maximum, rest) + ends + least,
        saved=saved | {"offload": 0.0},
        offloaded=saved["keep"],
        transfer=transfer / chip.host_bandwidth if chip.host_bandwidth else None,
        copied=sizes["none"].parameters * blocks,
    )


def estimate(costs: Sequence[BlockCosts], terms: remat.Terms) -> RematPlan:
    """Estimates a plan of (pattern, repeats) for models that train in turn on the same device.

    Bytes are those of the largest model, seconds are summed.
    """
    kinds = tuple(kind for pattern, repeats in terms for kind in pattern * repeats)
    device = max(_bytes(each, terms) for each in costs)
    host = max(kinds.count("offload") * each.offloaded for each in costs)
    seconds = sum(added_seconds(each, terms) for each in costs)
    return RematPlan(remat.text(terms), kinds, float(device), float(host), float(seconds))


def uniform(costs: Sequence[BlockCosts], kind: str) -> RematPlan:
    """Estimates the plan in which all blocks have one kind."""
    return estimate(costs, (((kind,), costs[0].layers),))


def choose(costs: Sequence[BlockCosts], limit: float, host_limit: float = math.inf) -> RematPlan:
    """Returns the fastest plan within the limits; of equally fast plans the first, a simple one.

    Args:
      costs: of the models that train in turn, all with the same number of layers.
      limit: bytes of a device.
      host_limit: bytes of host memory for the activations of a device.

    Raises:
      UserError: no plan is within the limits; names the lowest limit that has one.
    """
    best, least = None, math.inf
    layers = costs[0].layers
    for pattern, tail in _families(costs):
        repeats = _repeats(layers, pattern, tail)
        # All numbers of repeats at once, as an array; the models train in turn, so the largest
        # counts.
        device = np.max([_bytes(c, _terms(layers, pattern, repeats, tail)) for c in costs], axis=0)
        offloaded = pattern.count("offload") * repeats
        offloaded = offloaded + (tail == "offload") * (layers - len(pattern) * repeats)
        possible = offloaded * max(c.offloaded for c in costs) <= host_limit
        # For the message, if no plan fits.
        least = min(least, np.min(device[possible], initial=math.inf))
        fits = possible & (device <= limit)
        if not fits.any():
            continue
        seconds = sum(added_seconds(c, _terms(layers, pattern, repeats, tail)) for c in costs)
        seconds = np.where(fits, seconds, math.inf)
        index = int(np.argmin(seconds))
        if best is None or seconds[index] < best[0]:
            best = seconds[index], pattern, int(repeats[index]), tail
    if best is None:
        lowest = math.ceil(100 * least / GIB) / 100
        raise UserError(
            f"parallel.memory_limit is {limit / GIB:.4g}GiB, and no choice of blocks that keep, "
            "recompute or offload their activations fits by the estimate; legal: the nearest "
            f"feasible limit, {lowest:.2f}GiB, or more, or more training.micro_batches."
        )
    _, pattern, count, tail = best
    terms = _terms(layers, pattern, count, tail)
    return estimate(costs, tuple((p, int(n)) for p, n in terms if n))


def _possible_kinds(costs):
    return tuple(k for k in remat.KINDS if k != "offload" or all(c.transfer for c in costs))


def _families(costs):
    """Returns all (pattern, kind of the tail)."""
    possible, longest = _possible_kinds(costs), min(remat.MOST_PATTERN, costs[0].layers)
    return itertools.product(_patterns(possible, longest), possible)


@functools.cache
def _patterns(kinds, longest):
    """Returns all patterns of up to `longest` blocks, the shortest first, that repeat none."""
    result = []
    for period in range(1, longest + 1):
        # Combinations suffice, because `_spread` sets the order within a pattern.
        for chosen in itertools.combinations_with_replacement(kinds, period):
            counts = [chosen.count(kind) for kind in kinds]
            # A pattern that repeats a shorter one is the shorter one.
            if math.gcd(*counts) == 1 or period == 1:
                result.append(_spread(chosen))
    return result


def _spread(chosen):
    """Returns the pattern with its offloaded blocks first and evenly among the others."""
    count = chosen.count("offload")
    others = tuple(kind for kind in chosen if kind != "offload")
    # An iteration ends with its copies, so a block that is offloaded early leaves the most blocks
    # for its transfer to overlap with.
    spread = [("offload", *others[i::count]) for i in range(count)] or [others]
    return tuple(itertools.chain.from_iterable(spread))


def _repeats(layers, pattern, tail):
    # All blocks are alike: one loop, however the depth is divided.
    if pattern == (tail,):
        return np.array([layers])
    return np.arange(1, layers // len(pattern) + 1)


def _terms(layers, pattern, repeats, tail):
    return (pattern, repeats), ((tail,), layers - len(pattern) * repeats)


def _bytes(costs: BlockCosts, terms):
    """Returns the bytes on a device; repeats may be arrays."""
    size, buffers = costs.fixed, 0.0
    for pattern, repeats in terms:
        size = size + repeats * sum(costs.saved[kind] for kind in pattern)
        # Copies of an iteration are on the device until they end.
        buffer = pattern.count("offload") * costs.offloaded * (np.asarray(repeats) > 0)
        buffers = np.maximum(buffers, buffer)
    loops = sum((np.asarray(repeats) > 0).astype(int) for _, repeats in terms)
    # Two loops slice the stacked parameters, which copies them.
    return size + buffers + np.where(loops > 1, costs.copied, 0)


def added_seconds(costs: BlockCosts, terms):
    """Returns the seconds of a step beyond those of blocks that keep all; repeats may be arrays."""
    seconds = 0.0
    for pattern, repeats in terms:
        transfers = pattern.count("offload") * (0 if costs.transfer is None else costs.transfer)
        again = sum(costs.recompute[kind] for kind in pattern)
        # What the blocks of an iteration do not hide of its copies, in the forward pass and in the
        # backward pass.
        exposed = np.maximum(transfers - len(pattern) * costs.forward, 0)
        exposed = exposed + np.maximum(transfers - len(pattern) * costs.backward - again, 0)
        seconds = seconds + repeats * (again + exposed)
    return seconds


def table(plan: RematPlan, costs: Sequence[BlockCosts]) -> str:
    """Returns the plan, and the plans in which all blocks do the same, as text; all estimates."""
    lines = [f"{'blocks':>8}  {'activations':<14}{'MiB freed':>11}{'MiB to host':>13}"]
    largest = max(costs, key=lambda each: each.saved["none"])
    for kind in dict.fromkeys(plan.kinds):
        count = plan.kinds.count(kind)
        freed = count * (largest.saved["none"] - largest.saved[kind]) / 2**20
        host = count * largest.offloaded / 2**20 if kind == "offload" else 0
        lines.append(f"{count:>8}  {NAMES[kind]:<14}{freed:>11,.1f}{host:>13,.1f}")
    lines.append(f"{'estimates':<24}{'GiB a device':>13}{'extra ms a step':>17}")
    rows = [("this plan", plan)]
    rows += [(f"all {NAMES[kind]}", uniform(costs, kind)) for kind in _possible_kinds(costs)]
    for name, each in rows:
        size, seconds = each.device_bytes / GIB, 1e3 * each.seconds
        lines.append(f"{name:<24}{size:>13,.3f}{seconds:>17,.2f}")
    return "\n".join(lines)
