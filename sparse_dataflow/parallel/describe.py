"""What a layout puts on each chip: every array of a training with its shape, sharding and bytes."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import NamedSharding

from sparse_dataflow.parallel import sharding


@dataclasses.dataclass(frozen=True)
class Row:
    """One array.

    Attributes:
      group: of `Executor.arrays`.
      name: dotted path.
      shape: of the whole.
      dtype: its name.
      cut: the axes of each dimension, as text; "whole" where every chip has all.
      bytes: on one chip.
    """

    group: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    cut: str
    bytes: int


def row(group: str, name: str, leaf: Any) -> Row:
    """Of one array, concrete or abstract; without a sharding, one chip has all."""
    found = getattr(leaf, "sharding", None)
    shape: tuple[int, ...] = leaf.shape
    spec: list[list[str]] = []
    if isinstance(found, NamedSharding):
        shape = found.shard_shape(leaf.shape)
        longer = [axis for axis, size in found.mesh.shape.items() if size > 1]
        spec = [[a for a in sharding.names(entry) if a in longer] for entry in found.spec]
    cut = ", ".join("+".join(axes) or "-" for axes in spec) if any(spec) else "whole"
    size = math.prod(shape) * leaf.dtype.itemsize
    return Row(group, name, tuple(leaf.shape), str(leaf.dtype), cut, size)


def rows(arrays: dict[str, Any]) -> list[Row]:
    """Every array of `Executor.arrays` that has more than one element."""
    return [
        row(group, sharding.dotted(path), leaf)
        for group, tree in arrays.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if leaf.ndim
    ]


def bytes_a_chip(arrays: dict[str, Any]) -> int:
    """Of all of them."""
    return sum(row.bytes for row in rows(arrays))


def table(found: list[Row], title: str) -> str:
    """A text table, with the sums of each group and of all."""
    lines = [title]
    for group in dict.fromkeys(row.group for row in found):
        mine = [row for row in found if row.group == group]
        lines.append(f"{group}: {sum(row.bytes for row in mine):,} bytes a chip")
        for each in mine:
            shape = "x".join(map(str, each.shape))
            lines.append(
                f"  {each.name:<34} {shape:<22} {each.dtype:<9} {each.cut:<28} {each.bytes:>16,}"
            )
    lines.append(f"in all: {sum(row.bytes for row in found):,} bytes a chip")
    return "\n".join(lines)
