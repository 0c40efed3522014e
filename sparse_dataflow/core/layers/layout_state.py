"""Variables that say which blocks a layer stores, so that the state of another layout is refused.

Both kinds are in the parameters too, because users save and average parameters alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_dataflow.core.layouts.layout import BlockLayout

TABLES = ("in_index", "in_slot", "out_index", "out_slot")
"""Attributes of the index tables of an evolving layer, as in `LayoutTables`."""

LAYOUT_PREFIX = "layout_"
"""Start of the keys of `LayoutName`s."""

MARK_SIZE = 8
"""Entries of a mark."""

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


class LayoutName(nnx.Param):
    """Zeros [..., 8] of a static layer, whose key in the state names the layout.

    So the state of another layout is another tree, which orbax and `jax.tree.map` refuse.

    Attributes:
      layout: the key, kept as metadata: `nnx.merge` checks no keys.
    """


class LayoutMark(nnx.Param):
    """Fingerprint [..., 8] of the tables of an evolving layer, whose blocks `values` are.

    Nothing depends on it, so its gradient is zero.  Its entries up to a common factor count, which
    weight decay may change.
    """


def layout_name(layout: BlockLayout) -> str:
    """Returns the key of a layout's `LayoutName`."""
    return LAYOUT_PREFIX + layout.content_hash[:16]


def table_mark(in_index: jax.Array | np.ndarray, in_slot: jax.Array | np.ndarray):
    """Returns the mark, float32 [..., 8] in [1, 2), of tables [..., lines, positions].

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
    return 1 + digits.astype(np.float32) / 8


def is_marked(mark: jax.Array | np.ndarray, in_index, in_slot) -> jax.Array | np.ndarray:
    """Returns whether tables have a mark, bool []; traced for traced arrays."""
    arrays = (mark, in_index, in_slot)
    if not any(isinstance(array, jax.core.Tracer) for array in arrays):
        mark, in_index, in_slot = map(np.asarray, arrays)
    numpy = np if isinstance(mark, np.ndarray) else jnp
    expected, mark = table_mark(in_index, in_slot), mark.astype(np.float32)
    scale = expected.mean(axis=-1, keepdims=True)
    with np.errstate(all="ignore"):
        mark = mark * (scale / mark.mean(axis=-1, keepdims=True))
        return numpy.all(abs(mark - expected) <= _TOLERANCE)  # False for NaN.
