"""Whether a training state is good: all of its numbers are finite.

Checked when a training saves and in `Checkpoints.restore`, for every reader. A memory fault may
break a value after the step that computed it, and a second moment of infinity only stops its
weight.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sparse_dataflow.core.optim.optimizers import group_of

_WORDS = {"params": "parameters", "frozen": "other weights", "rest": "other weights"}
"""Part of a state -> its name for users, where they differ."""

_HOST_VALUES = 2**24
"""Values of a host array that are checked at once, so that temporary arrays stay small."""


def non_finite(state: object) -> list[str]:
    """Returns what of a state is not finite, such as "moments of blocks.qkv"; [] for a good state.

    Trained weights so large that their norm is not finite are named too. Of arrays over several
    processes all must call it, and get the same answer.

    Args:
      state: a `TrainState`, the arrays of its checkpoint, or any tree of named parts.
    """
    arrays = [
        (jax.tree_util.keystr(path[:1], simple=True), group_of(path[1:]), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.size
    ]
    flags = _flags([leaf for *_, leaf in arrays], [field == "params" for field, *_ in arrays])
    broken: dict[str, dict[str, None]] = {}
    for (field, group, _), is_finite in zip(arrays, flags, strict=True):
        if not is_finite:
            group = group or ("the optimizer" if field == "moments" else "the state")
            broken.setdefault(_WORDS.get(field, field), {})[group] = None
    return [f"{words} of {', '.join(groups)}" for words, groups in broken.items()]


def _flags(leaves: Sequence[Any], by_norm: Sequence[bool]) -> list[bool]:
    """Returns whether each array is finite, or its norm; reads each device's arrays once."""
    flags = [True] * len(leaves)
    on_devices: dict[frozenset, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array) and not _is_on_host(leaf):
            # Arrays of other devices need a program of their own.
            on_devices.setdefault(frozenset(leaf.sharding.device_set), []).append(i)
        else:
            flags[i] = _is_finite_on_host(leaf, by_norm[i])
    for indices in on_devices.values():
        arrays = [leaves[i] for i in indices]
        norms = tuple(by_norm[i] for i in indices)
        with jax.transfer_guard("allow"):
            values = jax.device_get(_program(norms, _replicated(arrays))(arrays))
        for i, value in zip(indices, values, strict=True):
            flags[i] = bool(value)
    return flags


def _is_on_host(leaf: jax.Array) -> bool:
    """Returns whether numpy reads an array in place: a check of it then compiles no program."""
    return leaf.is_fully_addressable and [d.platform for d in leaf.devices()] == ["cpu"]


@functools.lru_cache(8)
def _program(by_norm: tuple[bool, ...], sharding: NamedSharding | None) -> Callable:
    def flags(arrays):
        each = [
            jnp.isfinite(jnp.sum(jnp.square(x))) if norm else jnp.all(jnp.isfinite(x))
            for x, norm in zip(arrays, by_norm, strict=True)
        ]
        return jnp.stack(each)

    return jax.jit(flags, out_shardings=sharding)


def _replicated(arrays: Sequence[jax.Array]) -> NamedSharding | None:
    shardings = [x.sharding for x in arrays if isinstance(x.sharding, NamedSharding)]
    return NamedSharding(shardings[0].mesh, PartitionSpec()) if shardings else None


def _is_finite_on_host(array: np.ndarray, by_norm: bool) -> bool:
    with jax.transfer_guard("allow"):
        values = np.asarray(array).reshape(-1)
    chunks = (values[i : i + _HOST_VALUES] for i in range(0, values.size, _HOST_VALUES))
    with np.errstate(over="ignore", invalid="ignore"):
        if by_norm:
            return bool(np.isfinite(sum(np.sum(np.square(chunk)) for chunk in chunks)))
        return all(bool(np.isfinite(chunk).all()) for chunk in chunks)
