"""Entries of a state that say which blocks a layer stores, so another layout's state is refused.

Users save, average and send parameters alone, and linen keeps them in a collection of its own.  In
every container, from an nnx.State to a file of orbax, an entry has a key, a shape and numbers.

- A static layout is named by the key of an entry of zeros.  Its numbers say nothing.
- An evolving layout may not change keys or shapes, which would recompile.  So its identity is in
  numbers, and in floats of an `nnx.Param`: a variable of its own kind is not in a state of
  parameters alone, metadata is lost in files and stays at its old value after a compiled step, and
  `jax.grad` refuses integers.

Every rule that a user has for parameters moves these numbers.  So a mark is a codeword: its last
numbers are fixed mixtures of its first, and all are near 1e-30.  Scaling and averaging keep that;
a mark of which it is true is compared with the tables.  Noise, clipping, thresholds and rounding
break it; a mark of which it is not true is ignored until `sd.evolve` writes it anew.  The tiny
numbers add nothing to a norm, a penalty or a sum, and their gradient is 0.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.layouts.layout import (
    AnyLayout,
    BlockLayout,
    LayoutTables,
    index_tables,
    stack_layouts,
)
from sparse_dataflow.core.layouts.model_layouts import with_room

TABLES = ("in_index", "in_slot", "out_index", "out_slot")
"""Attributes of the index tables of an evolving layer, as in `LayoutTables`."""

MARK = "table_mark"
"""Attribute of the mark of an evolving layer."""

LAYOUT_PREFIX = "layout_"
"""Start of the keys that name a static layout."""

MARK_SIZE = 8
"""Entries of a mark, and zeros of a name."""

_UNIT = np.float32(2.0**-100)
"""Unit of a mark: its square is 0 in float32, and bfloat16 has it."""

_LARGEST = 2.0**-90
"""Entries of a mark that something other than scaling and averaging changed are larger."""

_MIXTURES = np.array([(5, -3, 2, 7, -2), (-2, 7, 5, -3, 3), (3, 2, -5, 6, 7)], np.float32) / 32
"""The last entries of a mark by its first.  The mixtures are positive, exact in bfloat16, and not
averages: a vector of equal numbers is no mark."""

_DIGITS = _MIXTURES.shape[1]
"""Entries of a mark that say what its tables are, 3 bits each."""

_EXACT = 3e-5
"""Largest error of a mixture, relative to the mean of the mark; thousands of steps of weight decay
stay below it."""

_TOLERANCE = 1e-2
"""Largest relative difference of entries of equal marks; far larger than `_EXACT`, so that small
noise is no mark before it differs from the old one."""

_ROOM = LinearSpec(max_fan_out=EvolutionConfig.max_fan_out)
"""Width of the tables of an evolving layer."""


class LayoutTable(nnx.Variable):
    """One int32 index table of an evolving layer; `sd.evolve` changes it, no optimizer does."""

    def __setitem__(self, key, value) -> None:
        """Rounds floats, as of an average, to the nearest index."""
        value = jnp.asarray(value)
        if jnp.issubdtype(value.dtype, jnp.floating):
            value = jnp.round(value).astype(jnp.int32)
        super().__setitem__(key, value)


def layout_variables(
    layouts: Sequence[BlockLayout], evolving: bool, stack: tuple[int, ...], dtype: DTypeLike
) -> dict[str, nnx.Variable]:
    """Returns name -> variable of all that a layer holds of its layout.

    Of a static layout that is an entry of zeros [*stack, 8] under its name.  The name is metadata
    too, because `nnx.merge` compares no keys.

    Args:
      layouts: one for all layers of a stack, or one for each.
      evolving: whether the layout is a variable.
      stack: leading axes of the values.
      dtype: dtype of the parameters.
    """
    if not evolving:
        name = layout_name(layouts[0])
        return {name: nnx.Param(jnp.zeros((*stack, MARK_SIZE), dtype), layout=name)}
    # In numpy, which compiles nothing.
    arrays: list[Any] = [
        np.broadcast_to(table, (math.prod(stack), *table.shape[1:])).reshape(
            *stack, *table.shape[1:]
        )
        for table in stack_layouts(with_room(each, _ROOM) for each in layouts).arrays
    ]
    indices = {name: LayoutTable(jnp.asarray(array)) for name, array in zip(TABLES, arrays)}
    # Types of 16 bits round averages of marks, so these have float32.
    mark = jnp.asarray(table_mark(LayoutTables(*arrays)), jnp.promote_types(dtype, jnp.float32))
    return {**indices, MARK: nnx.Param(mark)}


def is_layout_variable(name: str) -> bool:
    """Returns whether an attribute of a layer is a part of its layout."""
    return name in (*TABLES, MARK) or name.startswith(LAYOUT_PREFIX)


def layout_names(attributes: dict) -> set[str]:
    """Returns the names of static layouts among the attributes of a layer."""
    keys = {key for key in attributes if key.startswith(LAYOUT_PREFIX)}
    variables = [attributes[key] for key in keys if isinstance(attributes[key], nnx.Variable)]
    return keys | {each.get_metadata("layout", None) or "" for each in variables} - {""}


def layout_name(layout: BlockLayout) -> str:
    """Returns the key that names a layout."""
    return LAYOUT_PREFIX + layout.content_hash[:16]


def table_mark(layout: AnyLayout) -> jax.Array | np.ndarray:
    """Returns the mark, float32 [..., 8], of a layout, by its tables [..., lines, positions].

    Its entries, of 0.1 to 2 units, are exact in bfloat16.  Numpy tables give numpy.
    """
    in_index, in_slot, *_ = index_tables(layout)
    numpy = np if isinstance(in_index, np.ndarray) else jnp
    lines, positions = in_index.shape[-2:]
    # The primes of xxHash: each entry, its line and its position reach all bits.
    line = np.arange(lines, dtype=np.uint32)[:, None] * np.uint32(0x85EBCA77)
    position = np.arange(positions, dtype=np.uint32) * np.uint32(0xC2B2AE3D)
    entries = numpy.where(in_slot >= 0, in_index + 1, 0).astype(np.uint32)
    mixed = entries * np.uint32(0x9E3779B1) + (line + position) * (entries > 0).astype(np.uint32)
    for shift in (15, 13):
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(0x2C1B3C6D)
    # Integers wrap around: the sum has the same bits on every backend and over any shards.
    total = numpy.sum(mixed, axis=(-2, -1), dtype=np.uint32)[..., None]
    shifts = np.arange(0, 3 * _DIGITS, 3, dtype=np.uint32)
    # Three bits each, as numbers from 1 to 15/8.
    first = 1 + ((total >> shifts) & np.uint32(7)).astype(np.float32) / 8
    code = np.vstack([np.eye(_DIGITS, dtype=np.float32), _MIXTURES])
    return _mixed(first, code) * _UNIT


def _mixed(entries, coefficients):
    """Returns a mixture [..., n] of entries for each row of coefficients."""
    # Not a product of matrices, which a TPU rounds; no slices, which sharded axes do not have.
    return (entries[..., None, :] * coefficients).sum(axis=-1)


def is_mark(mark: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """Returns which marks [..., 8] scaling and averaging alone have changed, bool [...]."""
    mark = mark.astype(np.float32)
    checks = np.hstack([_MIXTURES, -np.eye(len(_MIXTURES), dtype=np.float32)])
    residuals = _mixed(mark, checks)
    tiny = ((mark > 0) & (mark < _LARGEST)).all(axis=-1)  # False for NaN.
    return tiny & (abs(residuals).max(axis=-1) < _EXACT * mark.mean(axis=-1))


def contradicts(mark: jax.Array | np.ndarray, layout: AnyLayout) -> jax.Array | np.ndarray:
    """Returns whether a mark is of another layout, bool []; traced for traced arrays.

    An array that is no mark any more is of no layout: something moved all parameters.
    """
    both = mark, index_tables(layout)
    if not any(isinstance(array, jax.core.Tracer) for array in jax.tree.leaves(both)):
        both = jax.tree.map(np.asarray, both)
    mark, layout = both
    numpy = np if isinstance(mark, np.ndarray) else jnp
    expected, mark = table_mark(layout), mark.astype(np.float32)
    mean = mark.mean(axis=-1, keepdims=True)
    same = expected * (mean / expected.mean(axis=-1, keepdims=True))
    differs = (abs(mark - same) > _TOLERANCE * mean).any(axis=-1)
    return numpy.any(is_mark(mark) & differs)
