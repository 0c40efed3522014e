"""What a traced program says before it is compiled: its FLOPs, and what it keeps for its gradient.

Loops are counted: `scan` by its length, other loops by the named scope that they are in.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from sparse_dataflow.parallel.pipeline.pipeline import TICKS


@dataclasses.dataclass(frozen=True)
class Counted:
    """FLOPs of one device.

    Attributes:
      flops: of products and of kernels that say theirs.
      silent: names of kernels that do not.
    """

    flops: float
    silent: tuple[str, ...]


def count(jaxpr: Any, rounds: Mapping[str, float]) -> Counted:
    """The FLOPs of a program; inside `shard_map` those of one device.

    Args:
      jaxpr: as `jax.jit(...).trace(...)` has it.
      rounds: name of a `jax.named_scope` -> how often a step goes through a loop in it whose
        length is not part of the program.
    """
    silent: set[str] = set()
    flops = _flops(_open(jaxpr), 1.0, rounds, silent)
    return Counted(flops, tuple(sorted(silent)))


def _flops(jaxpr, times, rounds, silent):
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            width = math.prod(left[axis] for axis in contracted)
            total += times * 2 * equation.outvars[0].aval.size * width
        elif "cost_estimate" in params:  # a Pallas kernel, on a TPU or a GPU
            estimate = params["cost_estimate"]
            kernel = _kernel(params)
            if estimate is not None:
                total += times * estimate.flops
            elif _products(kernel):
                total += times * _products(kernel) * _scores(equation)
            else:
                silent.add(kernel)
        elif name.startswith("dot_product_attention"):
            total += times * _products(name) * _scores(equation)
        elif name == "scan":
            inside = _open(params["jaxpr"])
            total += _flops(inside, times * params["length"], rounds, silent)
        elif name == "while":
            told = _told(equation, rounds)
            inside = _open(params["body_jaxpr"])
            total += _flops(inside, times if told is None else told, rounds, silent)
        elif name == "cond":
            branches = [_open(branch) for branch in params["branches"]]
            total += max(_flops(branch, times, rounds, silent) for branch in branches)
        else:
            total += sum(_flops(inside, times, rounds, silent) for inside in _inside(equation))
    return total


ATTENTION = {"fwd": 2, "dkv": 4, "dq": 3, "bwd": 5}
"""Part of an attention kernel's name -> products of the size of the scores that it makes: q k and
p v forward; the scores again, dp, dq, dk and dv backward, two of them twice where dq is apart
(arXiv 2205.14135, algorithm 4)."""


def _products(kernel):
    attends = "splash" in kernel or "attention" in kernel
    return next((n for part, n in ATTENTION.items() if part in kernel), 0) if attends else 0


def _scores(equation):
    """FLOPs of one product of the size of the scores, the causal half of it."""
    arrays = [v.aval for v in equation.invars if len(v.aval.shape) >= 3]
    query = next(a.shape for a in arrays if jnp.issubdtype(a.dtype, jnp.floating))
    # Pallas kernels have the heads before the tokens, cuDNN after them.
    tokens = query[-2 if "cost_estimate" in equation.params else -3]
    return math.prod(query) * tokens


def kept_bytes(jaxpr: Any, gradients: int) -> tuple[int, int | None]:
    """(bytes of activations that one device keeps from the forward for the backward pass, bytes of
    gradients that a pipeline accumulates or None without one).

    Outside a pipeline these are what the scans over the layers leave stacked; in one, the buffers
    of its ticks.

    Args:
      jaxpr: of a training step.
      gradients: how many arrays a tree of gradients has.
    """
    ticks = next((e for e in _equations(_open(jaxpr)) if _is(e, TICKS)), None)
    if ticks is not None:
        # The loss, the gradients, then the buffers.
        carried = [_bytes(v.aval) for v in ticks.outvars]
        return sum(carried[1 + gradients :]), sum(carried[1 : 1 + gradients])
    kept = 0
    for equation in _equations(_open(jaxpr), into=lambda e: not _forward(e)):
        if _forward(equation):
            kept += sum(_bytes(variable.aval) for variable in _stacked(equation))
    return kept, None


def _forward(equation):
    """Whether it is a scan of the forward pass that keeps something of each round."""
    stack = str(equation.source_info.name_stack)
    forward = equation.primitive.name == "scan" and "jvp" in stack and "transpose" not in stack
    return forward and bool(_stacked(equation))


def _stacked(scan):
    """What it leaves of each round; what it carries has the shape that it has inside."""
    inside = _open(scan.params["jaxpr"]).outvars
    return [out for out, one in zip(scan.outvars, inside) if out.aval.shape != one.aval.shape]


def _is(equation, scope):
    return equation.primitive.name == "scan" and scope in str(equation.source_info.name_stack)


def _equations(jaxpr, into=lambda equation: True) -> Iterator:
    for equation in jaxpr.eqns:
        yield equation
        if into(equation):
            for inside in _inside(equation):
                yield from _equations(inside, into)


def _inside(equation):
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            inside = _open(one)
            if hasattr(inside, "eqns"):
                yield inside


def _open(jaxpr):
    return getattr(jaxpr, "jaxpr", jaxpr)


def _told(equation, rounds):
    parts = str(equation.source_info.name_stack).split("/")
    return next((rounds[part] for part in reversed(parts) if part in rounds), None)


def _kernel(params):
    info = params.get("name_and_src_info") or params.get("name")
    return str(getattr(info, "name", info))


def _bytes(aval):
    return math.prod(aval.shape) * aval.dtype.itemsize
