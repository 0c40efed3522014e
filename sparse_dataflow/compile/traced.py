"""FLOPs and saved activations of a traced program, before compilation.

A `scan` counts by its length; other loops count by the named scope around them.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import jax.numpy as jnp

from sparse_dataflow.pipeline.pipeline import TICKS


@dataclasses.dataclass(frozen=True)
class FlopCount:
    """FLOPs of one device.

    Attributes:
      flops: of products, and of kernels with a known count.
      uncounted: names of kernels without one.
    """

    flops: float
    uncounted: tuple[str, ...]


def count(jaxpr: object, rounds: Mapping[str, float], devices: int = 1) -> FlopCount:
    """Counts the FLOPs of a program on one device; outside `shard_map` its share of all.

    Args:
      jaxpr: jaxpr of `jax.jit(...).trace(...)`.
      rounds: name of a `jax.named_scope` -> iterations per step of the loops in it whose length the
        program does not contain.
      devices: number of devices of the program.
    """
    uncounted: set[str] = set()

    def flops_of(jaxpr, times):
        total = 0.0
        for equation in jaxpr.eqns:
            name, params = equation.primitive.name, equation.params
            if name == "dot_general":
                (contracted, _), _ = params["dimension_numbers"]
                left = equation.invars[0].aval.shape
                width = math.prod(left[axis] for axis in contracted)
                total += times * 2 * equation.outvars[0].aval.size * width
            elif "cost_estimate" in params:  # Pallas kernels
                estimate, kernel = params["cost_estimate"], _kernel(params)
                if estimate is not None:
                    total += times * estimate.flops
                elif _products(kernel):
                    total += times * _products(kernel) * _scores(equation)
                else:
                    uncounted.add(kernel)
            elif name.startswith("dot_product_attention"):
                total += times * _products(name) * _scores(equation)
            elif name == "scan":
                total += flops_of(_open(params["jaxpr"]), times * params["length"])
            elif name == "while":
                body = _open(params["body_jaxpr"])
                total += flops_of(body, _rounds_of(equation, rounds, times))
            elif name == "cond":
                # One branch runs: the largest is the bound.
                total += max(flops_of(_open(branch), times) for branch in params["branches"])
            else:
                share = times * devices if name == "shard_map" else times
                for inside in _inside(equation):
                    total += flops_of(inside, share)
        return total

    flops = flops_of(_open(jaxpr), 1 / devices)
    return FlopCount(flops, tuple(sorted(uncounted)))


ATTENTION = {"fwd": 2, "dkv": 4, "dq": 3, "bwd": 5}
"""Substring of an attention kernel's name -> number of its products of the size of the scores.

Forward: q k and p v.  Backward: scores, dp, dq, dk and dv; two of them twice if dq has its own
kernel (arXiv 2205.14135, algorithm 4).
"""


def _products(kernel):
    attends = "splash" in kernel or "attention" in kernel
    return next((n for key, n in ATTENTION.items() if key in kernel), 0) if attends else 0


def _scores(equation):
    """Returns the FLOPs of the causal half of one product of the size of the scores."""
    arrays = [v.aval for v in equation.invars if len(v.aval.shape) >= 3]
    query = next(a.shape for a in arrays if jnp.issubdtype(a.dtype, jnp.floating))
    # Pallas kernels order axes as (heads, tokens), cuDNN as (tokens, heads).
    tokens = query[-2 if "cost_estimate" in equation.params else -3]
    return math.prod(query) * tokens


def saved_bytes(jaxpr: object, gradients: int) -> tuple[int, int | None]:
    """Returns the bytes of saved activations, and of the gradients that a pipeline accumulates.

    Saved activations are the stacked outputs of the scans over layers, or the buffers of a
    pipeline.  The second number is None without a pipeline.

    Args:
      jaxpr: jaxpr of a training step.
      gradients: number of arrays in a tree of gradients.
    """
    ticks = next((e for e in _equations(_open(jaxpr)) if _is_scan(e, TICKS)), None)
    if ticks is not None:
        # The carry has the loss, the gradients, then the buffers.
        carried = [_bytes(v.aval) for v in ticks.outvars]
        return sum(carried[1 + gradients :]), sum(carried[1 : 1 + gradients])
    saved = 0
    for equation in _equations(_open(jaxpr), into=lambda e: not _forward(e)):
        if _forward(equation):
            saved += sum(_bytes(variable.aval) for variable in _stacked(equation))
    return saved, None


def _forward(equation):
    """Returns whether it is a scan of the forward pass with stacked outputs."""
    stack = str(equation.source_info.name_stack)
    forward = equation.primitive.name == "scan" and "jvp" in stack and "transpose" not in stack
    return forward and bool(_stacked(equation))


def _stacked(scan):
    """Returns the stacked outputs; the carry has equal shapes inside and outside."""
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


def _rounds_of(equation, rounds, default):
    """Returns the rounds of the innermost named scope of an equation that has them."""
    scopes = str(equation.source_info.name_stack).split("/")
    return next((rounds[scope] for scope in reversed(scopes) if scope in rounds), default)


def _kernel(params):
    info = params.get("name_and_src_info") or params.get("name")
    return str(getattr(info, "name", info))


def _bytes(aval):
    return math.prod(aval.shape) * aval.dtype.itemsize
