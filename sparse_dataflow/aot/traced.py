"""FLOPs and saved activations of a traced program, before it is compiled.

Loops count with their trip counts: `scan` has a length, other loops are looked up by the named
scope that they are in.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from sparse_dataflow.parallel.pipeline.pipeline import TICKS


@dataclasses.dataclass(frozen=True)
class FlopCount:
    """FLOPs of one device.

    Attributes:
      flops: FLOPs of matrix products and of kernels with a known count.
      kernels_without_flops: names of kernels without one.
    """

    flops: float
    kernels_without_flops: tuple[str, ...]


def count_flops(jaxpr: Any, trip_counts: Mapping[str, float]) -> FlopCount:
    """Counts the FLOPs of a program; inside `shard_map` those of one device.

    Args:
      jaxpr: of `jax.jit(...).trace(...)`.
      trip_counts: name of a `jax.named_scope` -> iterations per step of a loop in that scope, for
        loops whose length is not part of the program.
    """
    uncounted: set[str] = set()
    flops = _flops(_open(jaxpr), 1.0, trip_counts, uncounted)
    return FlopCount(flops, tuple(sorted(uncounted)))


def _flops(jaxpr, times, trip_counts, uncounted):
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
                uncounted.add(kernel)
        elif name.startswith("dot_product_attention"):
            total += times * _products(name) * _scores(equation)
        elif name == "scan":
            inside = _open(params["jaxpr"])
            total += _flops(inside, times * params["length"], trip_counts, uncounted)
        elif name == "while":
            trips = _trip_count(equation, trip_counts)
            inside = _open(params["body_jaxpr"])
            total += _flops(inside, times if trips is None else trips, trip_counts, uncounted)
        elif name == "cond":
            branches = [_open(branch) for branch in params["branches"]]
            total += max(_flops(branch, times, trip_counts, uncounted) for branch in branches)
        else:
            total += sum(
                _flops(inside, times, trip_counts, uncounted) for inside in _inside(equation)
            )
    return total


ATTENTION_PRODUCTS = {"fwd": 2, "dkv": 4, "dq": 3, "bwd": 5}
"""Substring of an attention kernel's name -> its number of matrix products of scores size.

Forward: q k and p v.  Backward: the scores again, dp, dq, dk and dv; two of them twice if dq has a
kernel of its own (arXiv 2205.14135, algorithm 4).
"""


def _products(kernel):
    """Returns the number of products of an attention kernel; 0 for any other kernel."""
    if "splash" not in kernel and "attention" not in kernel:
        return 0
    return next((n for name, n in ATTENTION_PRODUCTS.items() if name in kernel), 0)


def _scores(equation):
    """Returns the FLOPs of one causal product of scores size."""
    arrays = [v.aval for v in equation.invars if len(v.aval.shape) >= 3]
    query = next(a.shape for a in arrays if jnp.issubdtype(a.dtype, jnp.floating))
    # The axis of tokens follows the heads in Pallas kernels and precedes them in cuDNN.
    tokens = query[-2 if "cost_estimate" in equation.params else -3]
    return math.prod(query) * tokens


def saved_bytes(jaxpr: Any, gradient_leaves: int) -> tuple[int, int | None]:
    """Returns the bytes that one device saves between passes of a training step.

    Without a pipeline, activations are the stacked outputs of the scans over layers.  In a
    pipeline, they are the buffers that its scan over ticks carries.

    Args:
      jaxpr: of a training step.
      gradient_leaves: number of arrays in a tree of gradients.

    Returns:
      (activations saved by the forward for the backward pass, gradients that a pipeline
      accumulates or None without a pipeline).
    """
    ticks = next((e for e in _equations(_open(jaxpr)) if _is_scan(e, TICKS)), None)
    if ticks is not None:
        # The scan carries the loss, the gradients, then the buffers.
        carry = [_bytes(v.aval) for v in ticks.outvars]
        return sum(carry[1 + gradient_leaves :]), sum(carry[1 : 1 + gradient_leaves])
    activations = 0
    for equation in _equations(_open(jaxpr), into=lambda e: not _is_forward_scan(e)):
        if _is_forward_scan(equation):
            activations += sum(_bytes(variable.aval) for variable in _stacked(equation))
    return activations, None


def _is_forward_scan(equation):
    """Whether the equation is a scan of the forward pass with stacked outputs."""
    stack = str(equation.source_info.name_stack)
    forward = equation.primitive.name == "scan" and "jvp" in stack and "transpose" not in stack
    return forward and bool(_stacked(equation))


def _stacked(scan):
    """Returns the stacked outputs of a scan; carried outputs have the same shape inside."""
    inside = _open(scan.params["jaxpr"]).outvars
    return [out for out, body in zip(scan.outvars, inside) if out.aval.shape != body.aval.shape]


def _is_scan(equation, scope):
    return equation.primitive.name == "scan" and scope in str(equation.source_info.name_stack)


def _equations(jaxpr, into=lambda equation: True) -> Iterator:
    for equation in jaxpr.eqns:
        yield equation
        if into(equation):
            for inside in _inside(equation):
                yield from _equations(inside, into)


def _inside(equation):
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inside = _open(item)
            if hasattr(inside, "eqns"):
                yield inside


def _open(jaxpr):
    return getattr(jaxpr, "jaxpr", jaxpr)


def _trip_count(equation, trip_counts):
    """Returns the trip count of the innermost named scope that has one, or None."""
    scopes = str(equation.source_info.name_stack).split("/")
    return next((trip_counts[s] for s in reversed(scopes) if s in trip_counts), None)


def _kernel(params):
    info = params.get("name_and_src_info") or params.get("name")
    return str(getattr(info, "name", info))


def _bytes(aval):
    return math.prod(aval.shape) * aval.dtype.itemsize
