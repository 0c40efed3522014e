"""Entries of a state that say which blocks a layer stores, so another layout's state is refused.

Users save, average and send parameters alone, and linen keeps them in a collection of its own.  So
these entries are plain `nnx.Param`s, and every rule that a user has for parameters is applied to
them.  Neither entry depends on its numbers staying as they are:

- A static layout is named by the key of an entry of zeros.  Its numbers say nothing.
- An evolving layout has a mark of numbers near 1e-30.  They add nothing to a norm, a penalty or a
  sum.  Scaling and averaging keep them tiny, and a tiny mark is compared with the tables.  Noise,
  clipping from below and thresholds replace them, and a mark that is not tiny is not compared.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_dataflow.core.layouts.layout import BlockLayout

TABLES = ("in_index", "in_slot", "out_index", "out_slot")
"""Attributes of the index tables of an evolving layer, as in `LayoutTables`."""

MARK = "table_mark"
"""Attribute of the mark of an evolving layer."""

LAYOUT_PREFIX = "layout_"
"""Start of the keys that name a static layout."""

MARK_SIZE = 8
"""Entries of a mark, and zeros of a name."""

_UNIT = 2.0**-100
"""Unit of a mark: its square is 0 in float32, and bfloat16 has it."""

_LARGEST = 2.0**-90
"""Entries of a mark that something other than scaling and averaging changed are larger."""

_TOLERANCE = 1e-2
"""Largest relative difference of entries of equal marks; bfloat16 and weight decay stay below it,
and the average of two marks does not."""


class LayoutTable(nnx.Variable):
    """One int32 index table of an evolving layer; `sd.evolve` changes it, no optimizer does."""

    def __setitem__(self, key, value) -> None:
        """Rounds floats, as of an average, to the nearest index."""
        value = jnp.asarray(value)
        if jnp.issubdtype(value.dtype, jnp.floating):
            value = jnp.round(value).astype(jnp.int32)
        super().__setitem__(key, value)


def named_entry(layout: BlockLayout, stack: tuple[int, ...]) -> tuple[str, nnx.Param]:
    """Returns the key and the entry of a static layout: zeros [*stack, 8].

    The key is metadata too, because `nnx.merge` compares no keys.
    """
    name = layout_name(layout)
    return name, nnx.Param(jnp.zeros((*stack, MARK_SIZE)), layout=name)


def layout_names(attributes: dict) -> set[str]:
    """Returns the names of static layouts among the attributes of a layer."""
    keys = {key for key in attributes if key.startswith(LAYOUT_PREFIX)}
    variables = [attributes[key] for key in keys if isinstance(attributes[key], nnx.Variable)]
    return keys | {each.get_metadata("layout", None) or "" for each in variables} - {""}


def layout_name(layout: BlockLayout) -> str:
    """Returns the key that names a layout."""
    return LAYOUT_PREFIX + layout.content_hash[:16]


def table_mark(in_index: jax.Array | np.ndarray, in_slot: jax.Array | np.ndarray):
    """Returns the mark, float32 [..., 8] from 1 to 2 units, of tables [..., lines, positions].

    Its entries are exact in every float dtype of 8 bits or more.  Numpy tables give numpy.
    """
    numpy = np if isinstance(in_index, np.ndarray) else jnp
    lines, positions = in_index.shape[-2:]
    line = np.arange(lines, dtype=np.uint32)[:, None] * np.uint32(0x85EBCA77)
    position = np.arange(positions, dtype=np.uint32) * np.uint32(0xC2B2AE3D)
    entries = numpy.where(in_slot >= 0, in_index + 1, 0).astype(np.uint32)
    mixed = entries * np.uint32(0x9E3779B1) + (line + position) * (entries > 0).astype(np.uint32)
    for shift in (15, 13):
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(0x2C1B3C6D)
    total = numpy.sum(mixed, axis=(-2, -1), dtype=np.uint32)[..., None]
    digits = (total >> np.arange(0, 3 * MARK_SIZE, 3, dtype=np.uint32)) & np.uint32(7)
    return (1 + digits.astype(np.float32) / 8) * np.float32(_UNIT)


def is_mark(mark: Any) -> Any:
    """Returns which marks [..., 8] scaling and averaging alone have changed, bool [...]."""
    size = abs(mark)
    return (size < _LARGEST).all(axis=-1) & (size > 0).all(axis=-1)  # False for NaN.


def contradicts(mark: jax.Array | np.ndarray, in_index, in_slot) -> jax.Array | np.ndarray:
    """Returns whether a mark is of other tables, bool []; traced for traced arrays.

    A mark that is not tiny any more, or 0, is of no tables: something moved all parameters.
    """
    arrays = (mark, in_index, in_slot)
    if not any(isinstance(array, jax.core.Tracer) for array in arrays):
        mark, in_index, in_slot = map(np.asarray, arrays)
    numpy = np if isinstance(mark, np.ndarray) else jnp
    expected, mark = table_mark(in_index, in_slot), mark.astype(np.float32)
    scale = mark.mean(axis=-1, keepdims=True) / expected.mean(axis=-1, keepdims=True)
    differs = (abs(mark - expected * scale) > _TOLERANCE * abs(scale) * _UNIT).any(axis=-1)
    return numpy.any(is_mark(mark) & differs)
