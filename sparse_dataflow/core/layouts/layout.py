"""Block layouts: the stored blocks of a weight, checked and immutable, with their index tables."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sparse_dataflow.files.errors import UserError, needed_module

if TYPE_CHECKING:
    from sparse_dataflow.core.batch import Array


@dataclasses.dataclass(frozen=True)
class Groups:
    """Structure of a layout whose stored blocks form equal dense groups.

    Group g stores every block of its input blocks times its output blocks, and no block belongs to
    two groups, so the product is a batch of dense products.  Input block i lies in part
    `(i // in_run) % in_parts`; output blocks lie in parts alike.  Group g joins input part g to
    output part g.  In a shard of a layout, one side may have parts of other shards besides: there,
    group g has part `first + g`, where the tables tell `first`.

    A jax program has it as a constant (`ops.block_sparse_matmul.grouped`).

    Attributes:
      in_run: consecutive input blocks of one part before those of the next.
      out_run: consecutive output blocks of one part before those of the next.
      in_parts: parts of the input blocks; more than `count` only in a shard.  0 means `count`.
      out_parts: the same for the output blocks.
    """

    count: int
    in_run: int
    out_run: int
    in_parts: int = 0
    out_parts: int = 0

    def __post_init__(self):
        # A frozen dataclass; with 0 stored, equal groups would compare unequal.
        object.__setattr__(self, "in_parts", self.in_parts or self.count)
        object.__setattr__(self, "out_parts", self.out_parts or self.count)

    def join(self, values: Any, in_blocks: int, out_blocks: int) -> Any:
        """Returns the dense weight of each group, whose inputs and outputs ascend.

        Args:
          values: numpy or jax [..., nnz, block, block], stored blocks as `BlockLayout` orders them.
          in_blocks: input blocks of the layout.
          out_blocks: output blocks of the layout.

        Returns:
          [..., count, inputs of a group, outputs of a group], in features.
        """
        inputs, outputs = self._sides(in_blocks, out_blocks)
        lead, block, outer = values.shape[:-3], values.shape[-1], outputs // self.out_run
        # Slots ascend by output, then input block, and every stored output block has `inputs` of
        # them.  So the axis of slots is a grid (outer, group, run, input), and no index table is
        # needed.
        rows = _in_tiles(block)
        x = values.reshape(*lead, outer, self.count, self.out_run, inputs, *rows, block)
        # (outer, group, run, input, rows as two, column) -> (group, input, rows, outer, run,
        # column).
        x = _transposed_last(x, (1, 3, 4, 5, 0, 2, 6))
        return x.reshape(*lead, self.count, inputs * block, outputs * block)

    def split(self, weights: Any, in_blocks: int, out_blocks: int) -> Any:
        """Returns the stored blocks [..., nnz, block, block] of `join`'s result; its inverse."""
        inputs, outputs = self._sides(in_blocks, out_blocks)
        lead, block = weights.shape[:-3], weights.shape[-2] // inputs
        outer = outputs // self.out_run
        rows = _in_tiles(block)
        x = weights.reshape(*lead, self.count, inputs, *rows, outer, self.out_run, block)
        # (group, input, rows as two, outer, run, column) -> (outer, group, run, input, rows,
        # column).
        x = _transposed_last(x, (4, 0, 5, 1, 2, 3, 6))
        return x.reshape(*lead, self.count * inputs * outputs, block, block)

    def _sides(self, in_blocks, out_blocks):
        """Returns the numbers of input and output blocks of a group."""
        return in_blocks // self.in_parts, out_blocks // self.out_parts


class LayoutTables(NamedTuple):
    """Index tables of a layout, as arrays, so that changing a layout does not recompile.

    The values of a weight are [nnz, block, block], sorted by (output block, input block).  A slot
    is an index into them.  Lines of an unbalanced layout are padded to the longest with slot -1 and
    index 0.

    Attributes:
      in_index: int32 [out_blocks, fan_in], input block of each position.
      in_slot: int32 [out_blocks, fan_in], its slot; without padding the slots in order.
      out_index: int32 [in_blocks, fan_out], output block of each position.
      out_slot: int32 [in_blocks, fan_out], its slot.
      groups: structure that a program may be specialised to; None if there is none, or the layout
        may change.
    """

    in_index: "Array"
    in_slot: "Array"
    out_index: "Array"
    out_slot: "Array"
    groups: Groups | None = None

    def __repr__(self):
        shapes = (f"{name}={tuple(array.shape)}" for name, array in zip(self._fields, self[:4]))
        return f"LayoutTables({', '.join(shapes)})"

    @property
    def arrays(self) -> "tuple[Array, Array, Array, Array]":
        """The four index tables."""
        return self[:4]

    @property
    def grid(self) -> tuple[int, ...]:
        """Shape [..., in_blocks, out_blocks] of a number for each block, stored or not."""
        return (*self.out_index.shape[:-1], self.in_index.shape[-2])

    def layouts(self, block: int) -> "list[BlockLayout]":
        """Returns the layout of each layer of concrete tables [..., lines, fan]."""
        return [BlockLayout.from_tables(layer, block) for layer in self._layers()]

    def with_groups(self) -> "LayoutTables":
        """Adds the groups of concrete tables [..., lines, fan], if all their layouts share them."""
        if any(not isinstance(table, np.ndarray) for table in self.arrays):
            return self
        # Layers of one pattern often have equal tables: each layout is analysed once.
        layers = {tuple(map(np.ndarray.tobytes, layer.arrays)): layer for layer in self._layers()}
        groups = {BlockLayout.from_tables(layer, 1).groups for layer in layers.values()}
        return self._replace(groups=groups.pop() if len(groups) == 1 else None)

    def _layers(self):
        arrays = [np.asarray(table) for table in self.arrays]
        stacked = [a.reshape(math.prod(a.shape[:-2]), *a.shape[-2:]) for a in arrays]
        return map(LayoutTables, *stacked)


class FixedTables:
    """Tables of layouts that cannot change: a static node of a tree, so programs are specialised.

    Compares and hashes by content, once.

    Attributes:
      tables: `LayoutTables` in numpy, also stacked over layers.
    """

    def __init__(self, tables: LayoutTables):
        self.tables = tables

    @functools.cached_property
    def content_hash(self) -> str:
        """SHA-256 of the tables, in hex."""
        content = hashlib.sha256()
        for table in self.tables.arrays:
            content.update(str(table.shape).encode() + np.asarray(table).tobytes())
        return content.hexdigest()

    def __eq__(self, other):
        if self is other:
            return True
        return isinstance(other, FixedTables) and self.content_hash == other.content_hash

    def __hash__(self):
        return hash(self.content_hash)

    def __repr__(self):
        return f"FixedTables({self.tables})"


def blocks_text(in_blocks: int, out_blocks: int, stored: int, block: int) -> str:
    """Returns how reprs show a layout: its shape in features, its blocks and their density."""
    total = in_blocks * out_blocks
    shape = f"{in_blocks * block} x {out_blocks * block}"
    return f"{shape}, {stored} of {total} blocks of {block}, density {stored / total:.3g}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockLayout:
    """Stored blocks of one weight of shape [in_features, out_features].

    Layouts compare and hash by content.  `sd.make_layout` makes one from a named pattern,
    `BlockLayout.from_mask` from a mask of blocks.

    Attributes:
      block: side of a square block, in features.
      in_blocks: input blocks of the grid.
      out_blocks: output blocks of the grid.
      rows: int32 [nnz], input block of each stored block.
      cols: int32 [nnz], output block of each stored block; (cols, rows) ascend strictly.
      max_fan_out: width of the tables by input block, which bounds the fan-out; None for the
        longest line.  A fixed width lets a layout change without recompiling.  No part of the
        content.

    Raises:
      UserError: an index or a size is outside its bounds, or the blocks do not ascend strictly.

    Examples:
        >>> mask = np.array([[True, False, True], [False, True, False]])
        >>> layout = sd.BlockLayout.from_mask(mask, block=8)
        >>> layout.in_features, layout.out_features, layout.nnz, layout.density
        (16, 24, 3, 0.5)
        >>> layout
        BlockLayout(16 x 24, 3 of 6 blocks of 8, density 0.5)
        >>> layout.to_dense(np.ones((3, 8, 8))).shape
        (16, 24)
    """

    block: int
    in_blocks: int
    out_blocks: int
    rows: np.ndarray
    cols: np.ndarray
    max_fan_out: int | None = None

    def __post_init__(self):
        sides = (self.block, self.in_blocks, self.out_blocks)
        whole = all(isinstance(side, int | np.integer) for side in sides)
        if not whole or not 1 <= min(sides) <= max(sides) < 2**31:
            raise UserError(
                f"block, in_blocks and out_blocks are {sides}; legal: integers from 1 to 2**31 - 1."
            )
        for name, bound in (("rows", self.in_blocks), ("cols", self.out_blocks)):
            index = np.asarray(getattr(self, name))
            if index.ndim != 1 or index.size == 0:
                raise UserError(f"Layout {name} must be a list of at least one block index.")
            if not np.issubdtype(index.dtype, np.integer):
                raise UserError(f"Layout {name} have dtype {index.dtype}; legal: integers.")
            if index.min() < 0 or index.max() >= bound:
                raise UserError(
                    f"Layout {name} range from {index.min()} to {index.max()}; "
                    f"legal: 0 to {bound - 1}."
                )
            index = index.astype(np.int32)
            # A layout is a static part of programs, hashed once: it must not change.
            index.setflags(write=False)
            object.__setattr__(self, name, index)
        if self.rows.shape != self.cols.shape:
            raise UserError(f"Layout has {self.rows.size} rows but {self.cols.size} cols.")
        # Sorted, so that equal layouts have equal arrays, and the order of slots is known.
        order = self.cols.astype(np.int64) * self.in_blocks + self.rows
        if np.any(np.diff(order) <= 0):
            raise UserError(
                "Stored blocks must be sorted by output, then input block, without duplicates."
            )
        if self.max_fan_out is not None and not isinstance(self.max_fan_out, int | np.integer):
            raise UserError(f"max_fan_out is {self.max_fan_out!r}; legal: None, or an integer.")
        if self.max_fan_out is not None and self.max_fan_out < self.fan_out.max():
            raise UserError(
                f"Fan-out {self.fan_out.max()} is above the layout's {self.max_fan_out}; legal: "
                f"at most {self.max_fan_out}."
            )

    @classmethod
    def from_mask(
        cls, mask: np.ndarray, block: int, max_fan_out: int | None = None
    ) -> "BlockLayout":
        """Builds the layout of the True blocks of a bool [in_blocks, out_blocks] mask.

        Raises:
          UserError: the mask is no bool matrix.
        """
        mask = np.asarray(mask)
        if mask.ndim != 2 or mask.dtype != np.bool_:
            raise UserError(f"Mask is {mask.dtype} of rank {mask.ndim}; legal: a bool matrix.")
        cols, rows = np.nonzero(mask.T)
        in_blocks, out_blocks = mask.shape
        return cls(block, in_blocks, out_blocks, rows, cols, max_fan_out)

    @classmethod
    def from_tables(cls, tables: LayoutTables, block: int) -> "BlockLayout":
        """Builds the layout of concrete tables; inverse of `tables`, also for padded tables.

        `max_fan_out` is the width of the tables by input block.

        Raises:
          UserError: a dtype, rank or index is not legal, or the four tables do not describe one
            layout.
        """
        check_shapes(tables)
        in_index, in_slot, out_index, out_slot = map(np.asarray, tables.arrays)
        grid = len(out_index), len(in_index)
        cols, rows, slot = _entries(in_index, in_slot, "in", grid[0])
        # Slots number the stored blocks by output block; entries come by table place.
        by_slot = np.argsort(slot)
        if not np.array_equal(slot[by_slot], np.arange(slot.size)):
            raise UserError(f"in_slot must have each slot from 0 to {slot.size - 1} once.")
        layout = cls(block, *grid, rows[by_slot], cols[by_slot], out_index.shape[1])
        rows, cols, slot = _entries(out_index, out_slot, "out", grid[1])
        if slot.size != layout.nnz or not np.array_equal(np.sort(slot), np.arange(slot.size)):
            raise UserError(f"out_slot must have each slot from 0 to {layout.nnz - 1} once.")
        if np.any(layout.slots[rows, cols] != slot):
            raise UserError("out_index and out_slot describe other blocks than the in tables.")
        return layout

    @property
    def grid(self) -> tuple[int, int]:
        """Shape (in_blocks, out_blocks) of a number for each block, stored or not."""
        return self.in_blocks, self.out_blocks

    @property
    def nnz(self) -> int:
        """Number of stored blocks."""
        return int(self.rows.size)

    @property
    def density(self) -> float:
        """Fraction of blocks stored."""
        return self.nnz / (self.in_blocks * self.out_blocks)

    @property
    def in_features(self) -> int:
        """Rows of the weight."""
        return self.in_blocks * self.block

    @property
    def out_features(self) -> int:
        """Columns of the weight."""
        return self.out_blocks * self.block

    @functools.cached_property
    def fan_in(self) -> np.ndarray:
        """Int [out_blocks], number of input blocks that each output block reads."""
        return np.bincount(self.cols, minlength=self.out_blocks)

    @functools.cached_property
    def fan_out(self) -> np.ndarray:
        """Int [in_blocks], number of output blocks that each input block feeds."""
        return np.bincount(self.rows, minlength=self.in_blocks)

    @property
    def balanced(self) -> bool:
        """Whether fan-in and fan-out are constant."""
        return bool(np.ptp(self.fan_in) == 0 and np.ptp(self.fan_out) == 0)

    @functools.cached_property
    def mask(self) -> np.ndarray:
        """Bool [in_blocks, out_blocks], True where a block is stored."""
        mask = np.zeros((self.in_blocks, self.out_blocks), bool)
        mask[self.rows, self.cols] = True
        mask.setflags(write=False)
        return mask

    @functools.cached_property
    def slots(self) -> np.ndarray:
        """Int [in_blocks, out_blocks], slot of each block, -1 where not stored."""
        slots = np.full((self.in_blocks, self.out_blocks), -1)
        slots[self.rows, self.cols] = np.arange(self.nnz)
        slots.setflags(write=False)
        return slots

    @functools.cached_property
    def groups(self) -> Groups | None:
        """The equal groups that the stored blocks form; None if they form none.

        Any single dense rectangle is one group.
        """
        inputs = np.flatnonzero(self.mask[:, self.cols[0]])
        outputs = np.flatnonzero(self.mask[inputs[0]])
        count, rest = divmod(self.nnz, len(inputs) * len(outputs))
        if rest:
            return None
        # The first stored column and row propose the runs and parts of both sides.  The comparison
        # with the whole mask below decides: a wrong proposal is None, never a wrong product.
        runs, parts, group_of_block = [], [], []
        for blocks, total in zip((inputs, outputs), self.mask.shape):
            run, side_parts = _first_run(blocks), total // len(blocks)
            if total % len(blocks) or len(blocks) % run:
                return None
            # A shard with groups 2 and 3 of 4 has all 4 parts on its side that is not cut.  Its own
            # groups are numbered from 0 all the same.
            first = blocks[0] // run % side_parts if side_parts > count else 0
            runs.append(run)
            parts.append(side_parts)
            group_of_block.append(np.arange(total) // run % side_parts - first)
        in_group, out_group = group_of_block
        stored = (in_group >= 0) & (in_group < count)
        expected = (in_group[:, None] == out_group) & stored[:, None]
        is_grouped = count in parts and np.array_equal(self.mask, expected)
        return Groups(count, *runs, *parts) if is_grouped else None

    @functools.cached_property
    def content_hash(self) -> str:
        """SHA-256 of the grid, block side and stored blocks, in hex."""
        head = np.array([self.block, self.in_blocks, self.out_blocks], np.int64).tobytes()
        return hashlib.sha256(head + self.rows.tobytes() + self.cols.tobytes()).hexdigest()

    def __eq__(self, other):
        return isinstance(other, BlockLayout) and self.content_hash == other.content_hash

    def __hash__(self):
        return hash(self.content_hash)

    def __repr__(self):
        return f"BlockLayout({self._title})"

    @property
    def _title(self):
        return blocks_text(self.in_blocks, self.out_blocks, self.nnz, self.block)

    def _repr_html_(self):
        """Returns a picture of the grid for notebooks, as SVG: one path of all stored blocks."""
        blocks = zip(self.cols.tolist(), self.rows.tolist())
        path = "".join(f"M{col} {row}h1v1h-1z" for col, row in blocks)
        width = round(max(64, min(480, 240 * self.out_blocks / self.in_blocks)))
        return (
            f"<figure style='margin:0'><svg width='{width}' preserveAspectRatio='none' "
            f"viewBox='0 0 {self.out_blocks} {self.in_blocks}' "
            f"style='border:1px solid #888;max-height:480px'><path d='{path}' fill='#247'/></svg>"
            f"<figcaption>{self._title}; inputs run down, outputs to the right</figcaption>"
            "</figure>"
        )

    def tables(self) -> LayoutTables:
        """Returns the index tables as int32 numpy arrays."""
        # Slots are in order of output blocks.  The tables by input block list the same slots in
        # the other order.
        by_row = np.lexsort((self.cols, self.rows))
        in_index, in_slot = _padded(self.cols, self.rows, np.arange(self.nnz), self.fan_in)
        out_index, out_slot = _padded(
            self.rows[by_row], self.cols[by_row], by_row, self.fan_out, self.max_fan_out
        )
        return LayoutTables(in_index, in_slot, out_index, out_slot)

    def to_dense(self, values: object) -> np.ndarray:
        """Returns dense matrices [..., in_features, out_features] of [..., nnz, block, block]."""
        values = np.asarray(values)
        lead, block = values.shape[:-3], self.block
        dense = np.zeros((*lead, self.in_blocks, self.out_blocks, block, block), values.dtype)
        dense[..., self.rows, self.cols, :, :] = values
        return dense.swapaxes(-3, -2).reshape(*lead, self.in_features, self.out_features)

    def from_dense(self, dense: object) -> np.ndarray:
        """Returns the values [nnz, block, block] of a dense [in_features, out_features] matrix."""
        grid = (self.in_blocks, self.block, self.out_blocks, self.block)
        return np.asarray(dense).reshape(grid).transpose(0, 2, 1, 3)[self.rows, self.cols]

    def plot(self, axes: Any = None) -> Any:
        """Draws the grid of blocks, stored ones dark; inputs run down, outputs to the right.

        Args:
          axes: matplotlib Axes to draw on; None for a new figure.

        Returns:
          The Axes.

        Raises:
          UserError: matplotlib is not installed.

        Examples:
            >>> axes = sd.make_layout("monarch", 256, 512, block=32, density=0.25).plot()
            >>> axes.get_title()
            '256 x 512, 32 of 128 blocks of 32, density 0.25'
        """
        if axes is None:
            # Without pyplot: no window, no global state.
            figure = needed_module("matplotlib.figure", "BlockLayout.plot")
            width = 4 * max(0.25, min(4, self.out_blocks / self.in_blocks))
            axes = figure.Figure(figsize=(1 + width, 5), layout="constrained").subplots()
        axes.imshow(~self.mask, cmap="gray", vmin=0, vmax=1.2, interpolation="nearest")
        axes.set_xlabel("output block")
        axes.set_ylabel("input block")
        axes.set_title(self._title)
        return axes


def _in_tiles(rows, tile=8):
    """Returns (tiles, rows of a tile): a TPU permutes blocks that are cut so in one copy."""
    return (rows // tile, tile) if rows % tile == 0 else (1, rows)


def _transposed_last(x, order):
    """Permutes the last axes of an array, as many as `order` has."""
    first = x.ndim - len(order)
    return x.transpose(*range(first), *(first + axis for axis in order))


AnyLayout = BlockLayout | LayoutTables | FixedTables
"""A layout in any of its forms: as a value, as arrays of a tree, or as a static node of one."""


def index_tables(layout: AnyLayout) -> LayoutTables:
    """Returns the index tables of a layout in any form, with the groups that the form knows."""
    if isinstance(layout, BlockLayout):
        return layout.tables()._replace(groups=layout.groups)
    return layout.tables if isinstance(layout, FixedTables) else layout


def check_shapes(tables: LayoutTables) -> None:
    """Checks dtypes and shapes of concrete or traced tables.

    Raises:
      UserError: a table is not an int32 matrix, or an index and its slots differ in shape.
    """
    for name, table in zip(LayoutTables._fields, tables.arrays):
        if table.dtype != np.int32 or table.ndim != 2:
            raise UserError(
                f"{name} is {table.dtype} of shape {table.shape}; legal: int32 [lines, fan]."
            )
    for side in ("in", "out"):
        index, slot = (getattr(tables, f"{side}_{kind}").shape for kind in ("index", "slot"))
        if index != slot:
            raise UserError(f"{side}_index has shape {index} and {side}_slot {slot}; legal: equal.")


def stack_layouts(layouts: Iterable[BlockLayout]) -> LayoutTables:
    """Returns the index tables of layouts, stacked along a new first axis, without groups."""
    return stack_tables([layout.tables() for layout in layouts])


def stack_tables(tables: Sequence[LayoutTables]) -> LayoutTables:
    """Stacks numpy tables of equal shapes along a new first axis, without their groups."""
    arrays: list[Any] = [np.stack(each) for each in zip(*(layer.arrays for layer in tables))]
    return LayoutTables(*arrays)


def pad_tables(tables: LayoutTables, fan_in: int, fan_out: int) -> LayoutTables:
    """Pads numpy tables to the given fans, so that layouts of different fans share one program.

    Raises:
      UserError: a line is longer than its fan.
    """
    fans = (fan_in, fan_in, fan_out, fan_out)
    fills = (0, -1, 0, -1)
    padded: list[Any] = []
    for table, fan, fill in zip(tables.arrays, fans, fills):
        if fan < table.shape[1]:
            raise UserError(f"Fan {fan} is too small; legal: at least {table.shape[1]}.")
        extra = (0, 0), (0, fan - table.shape[1])
        padded.append(np.pad(table, extra, constant_values=fill))
    return LayoutTables(*padded)


def _first_run(blocks):
    """Length of the run of consecutive numbers that starts `blocks`."""
    breaks = np.flatnonzero(np.diff(blocks) != 1)
    return int(breaks[0]) + 1 if breaks.size else len(blocks)


def _entries(index, slot, side, bound):
    """Returns (line, index, slot) of each stored position; checks that index is below `bound`."""
    line, position = np.nonzero(slot >= 0)
    index, slot = index[line, position], slot[line, position]
    if index.size and (index.min() < 0 or index.max() >= bound):
        raise UserError(
            f"{side}_index ranges from {index.min()} to {index.max()}; legal: 0 to {bound - 1}."
        )
    return line, index, slot


def _padded(line, index, slot, counts, width=None):
    """Returns (index, slot) tables [len(counts), width] from entries sorted by line.

    `width` defaults to the longest line.
    """
    # The place of an entry minus the place of the first of its line.  Counts [2, 0, 3] give the
    # positions [0 1 0 1 2].
    position = np.arange(len(line)) - np.repeat(np.cumsum(counts) - counts, counts)
    indices = np.zeros((len(counts), width or counts.max()), np.int32)
    slots = np.full_like(indices, -1)
    indices[line, position], slots[line, position] = index, slot
    return indices, slots
