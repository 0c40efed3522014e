"""Table of the training arrays on each chip, with shape, sharding and bytes."""

import dataclasses
import math

import jax
from jax.sharding import NamedSharding

from sparse_dataflow.core.executors import sharding
from sparse_dataflow.core.ops.dispatch import Shaped


@dataclasses.dataclass(frozen=True)
class Row:
    """One array.

    Attributes:
      group: key in `Executor.arrays`.
      name: dotted path.
      shape: global shape.
      cut: mesh axes that shard each dimension, as text; "whole" if replicated.
      bytes: bytes on one chip.
    """

    group: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    cut: str
    bytes: int


def row(group: str, name: str, leaf: Shaped) -> Row:
    """Returns the row of a concrete or abstract array; one chip has all without a sharding."""
    placement = getattr(leaf, "sharding", None)
    shape: tuple[int, ...] = leaf.shape
    spec: list[list[str]] = []
    if isinstance(placement, NamedSharding):
        shape = placement.shard_shape(leaf.shape)
        # An axis of one device cuts nothing, and would only fill the column.
        longer = [axis for axis, size in placement.mesh.shape.items() if size > 1]
        spec = [[a for a in sharding.entry_axes(entry) if a in longer] for entry in placement.spec]
    cut = ", ".join("+".join(axes) or "-" for axes in spec) if any(spec) else "whole"
    size = math.prod(shape) * leaf.dtype.itemsize
    return Row(group, name, tuple(leaf.shape), str(leaf.dtype), cut, size)


def rows(arrays: dict[str, object]) -> list[Row]:
    """Returns the rows of `Executor.arrays`, without scalars."""
    return [
        row(group, sharding.dotted_path(path), leaf)
        for group, tree in arrays.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if leaf.ndim
    ]


def bytes_per_chip(arrays: dict[str, object]) -> int:
    """Returns the bytes of all arrays on one chip."""
    return sum(row.bytes for row in rows(arrays))


def table(rows: list[Row], title: str) -> str:
    """Returns a text table with the sum of each group and of all."""
    lines = [title]
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group]
        lines.append(f"{group}: {sum(row.bytes for row in members):,} bytes a chip")
        for each in members:
            shape = "x".join(map(str, each.shape))
            lines.append(
                f"  {each.name:<34} {shape:<22} {each.dtype:<9} {each.cut:<28} {each.bytes:>16,}"
            )
    lines.append(f"in all: {sum(row.bytes for row in rows):,} bytes a chip")
    return "\n".join(lines)
