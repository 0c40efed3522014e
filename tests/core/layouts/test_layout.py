"""A layout: order of its blocks, its tables, its dense form, and what it refuses."""

import re
import sys

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparse_dataflow.core.layouts.layout import BlockLayout, Groups, pad_tables, stack_tables
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.files.errors import UserError

masks = hnp.arrays(bool, hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=7)).filter(
    np.any
)
blocks = st.integers(1, 5)


def eye(n, block=2):
    return BlockLayout.from_mask(np.eye(n, dtype=bool), block)


@given(masks, blocks)
def test_a_mask_comes_back(mask, block):
    layout = BlockLayout.from_mask(mask, block)
    np.testing.assert_array_equal(layout.mask, mask)
    assert layout.nnz == mask.sum()
    assert layout.density == mask.mean()
    assert (layout.in_features, layout.out_features) == (
        mask.shape[0] * block,
        mask.shape[1] * block,
    )
    np.testing.assert_array_equal(layout.fan_in, mask.sum(0))
    np.testing.assert_array_equal(layout.fan_out, mask.sum(1))
    assert layout.balanced == (len(set(mask.sum(0))) == 1 and len(set(mask.sum(1))) == 1)


@given(masks, blocks)
def test_blocks_are_stored_by_output_then_input(mask, block):
    layout = BlockLayout.from_mask(mask, block)
    stored = [(c, r) for c in range(mask.shape[1]) for r in range(mask.shape[0]) if mask[r, c]]
    assert list(zip(layout.cols.tolist(), layout.rows.tolist())) == stored
    for slot, (col, row) in enumerate(stored):
        assert layout.slots[row, col] == slot
    np.testing.assert_array_equal(layout.slots == -1, ~mask)


@given(masks, blocks, st.integers(0, 9))
def test_dense_form_element_by_element(mask, block, seed):
    layout = BlockLayout.from_mask(mask, block)
    values = np.random.default_rng(seed).normal(size=(layout.nnz, block, block))
    dense = layout.to_dense(values)
    assert dense.shape == (layout.in_features, layout.out_features)
    for i in range(layout.in_features):
        for j in range(layout.out_features):
            slot = layout.slots[i // block, j // block]
            expected = values[slot, i % block, j % block] if slot >= 0 else 0
            assert dense[i, j] == expected
    np.testing.assert_array_equal(layout.from_dense(dense), values)


@given(masks)
def test_tables_list_what_each_line_reads_and_feeds(mask):
    layout = BlockLayout.from_mask(mask, 1)
    tables = layout.tables()
    lines = (
        (tables.in_index, tables.in_slot, layout.mask.T, layout.slots.T),
        (tables.out_index, tables.out_slot, layout.mask, layout.slots),
    )
    for index, slot, line_masks, line_slots in lines:
        assert index.dtype == slot.dtype == np.int32
        width = max(line.sum() for line in line_masks)
        assert index.shape == slot.shape == (len(line_masks), width)
        for line in range(len(line_masks)):
            stored = np.flatnonzero(line_masks[line])
            padding = width - len(stored)
            assert index[line].tolist() == [*stored, *[0] * padding]
            assert slot[line].tolist() == [*line_slots[line, stored], *[-1] * padding]


@given(masks, blocks)
def test_tables_give_the_layout_back(mask, block):
    layout = BlockLayout.from_mask(mask, block)
    assert BlockLayout.from_tables(layout.tables(), block) == layout


@given(masks, masks, blocks, blocks)
def test_layouts_are_equal_by_content(mask, other_mask, block, other_block):
    layout, other = (
        BlockLayout.from_mask(mask, block),
        BlockLayout.from_mask(other_mask, other_block),
    )
    same = block == other_block and np.array_equal(mask, other_mask)
    assert (layout == other) == same
    assert (layout.content_hash == other.content_hash) == same
    twin = BlockLayout(
        block, *mask.shape, layout.rows.astype(np.int64), layout.cols.astype(np.int64)
    )
    assert twin == layout and hash(twin) == hash(layout) and len({twin, layout}) == 1


@pytest.mark.parametrize("side", ["in_blocks", "out_blocks", "block"])
def test_equal_blocks_of_another_grid_are_another_layout(side):
    fields = {"block": 2, "in_blocks": 3, "out_blocks": 3, "rows": np.arange(3)}
    one, other = (
        BlockLayout(**fields | {"cols": np.arange(3), side: size}) for size in (fields[side], 9)
    )
    assert one != other and one.content_hash != other.content_hash


def test_equal_layouts_share_a_compiled_program():
    traces = []

    def double(x, layout):
        traces.append(layout)
        return 2 * x

    jitted = jax.jit(double, static_argnums=1)
    jitted(1.0, eye(3))
    jitted(1.0, eye(3))
    assert len(traces) == 1
    jitted(1.0, eye(4))
    assert len(traces) == 2


def test_a_layout_cannot_be_changed():
    rows, cols = np.array([0, 1]), np.array([0, 1])
    layout = BlockLayout(2, 2, 2, rows, cols)
    rows[0] = 1
    assert layout == eye(2)
    for array in (layout.rows, layout.cols, layout.mask, layout.slots):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(AttributeError):
        layout.block = 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((0, 2, 2, [0], [0]), "legal: integers from 1"),
        ((2.0, 2, 2, [0], [0]), r"are \(2.0, 2, 2\); legal: integers"),
        ((2, float("nan"), 2, [0], [0]), "legal: integers"),
        ((2, 0, 2, [0], [0]), "legal: integers from 1"),
        ((2, 2, 2, [], []), "at least one block"),
        ((2, 2, 2, [[0]], [[0]]), "must be a list"),
        ((2, 2, 2, [0.0], [0]), "rows have dtype float64; legal: integers"),
        ((2, 2, 2, [0], [float("nan")]), "cols have dtype float64; legal: integers"),
        ((2, 2, 2, [0, 2], [0, 1]), "rows range from 0 to 2; legal: 0 to 1"),
        ((2, 2, 3, [0, 1], [0, 3]), "cols range from 0 to 3; legal: 0 to 2"),
        ((2, 2, 2, [-1], [0]), "rows range from -1 to -1; legal: 0 to 1"),
        ((2, 2, 2, [0, 1], [0]), "2 rows but 1 cols"),
        ((2, 2, 2, [0, 1], [1, 0]), "sorted by output"),
        ((2, 2, 2, [1, 0], [0, 0]), "sorted by output"),
        ((2, 2, 2, [1, 1], [0, 0]), "without duplicates"),
    ],
)
def test_an_illegal_layout_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        BlockLayout(*fields)


@pytest.mark.parametrize("mask", [np.ones(4, bool), np.ones((2, 2)), np.zeros((2, 2), bool)])
def test_an_illegal_mask_is_refused(mask):
    with pytest.raises(UserError, match=r"bool matrix|at least one block"):
        BlockLayout.from_mask(mask, 2)


RIGHT = BlockLayout.from_mask(np.array([[1, 0, 1], [1, 1, 0]], bool), 2).tables()


def changed(table, at, value):
    """RIGHT with one entry changed."""
    array = getattr(RIGHT, table).copy()
    array[at] = value
    return RIGHT._replace(**{table: array})


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (RIGHT._replace(in_index=RIGHT.in_index.astype(np.float32)), "in_index is float32"),
        (RIGHT._replace(in_index=np.full((3, 2), np.nan)), "in_index is float64.*legal: int32"),
        (RIGHT._replace(out_slot=RIGHT.out_slot.astype(np.int64)), "out_slot is int64"),
        (RIGHT._replace(out_slot=RIGHT.out_slot[0]), r"shape \(2,\); legal: int32 \[lines, fan\]"),
        (RIGHT._replace(in_slot=RIGHT.in_slot[:2]), r"in_index has shape \(3, 2\) and in_slot"),
        (changed("in_index", (0, 1), 2), "in_index ranges from 0 to 2; legal: 0 to 1"),
        (changed("in_index", (0, 1), -1), "in_index ranges from -1"),
        (changed("out_index", (1, 0), 3), "out_index ranges from 0 to 3; legal: 0 to 2"),
        (changed("in_slot", (0, 1), 0), "in_slot must have each slot from 0 to 3 once"),
        (changed("in_slot", (0, 1), 9), "in_slot must have each"),
        (changed("in_index", (0, 1), 0), "without duplicates"),
        (RIGHT._replace(in_slot=RIGHT.in_slot[[1, 0, 2]]), "in_slot must|sorted by output"),
        (changed("out_slot", (0, 0), 1), "out_slot must have each slot from 0 to 3 once"),
        (changed("out_slot", (0, 0), -1), "out_slot must have each"),
        (changed("out_index", (0, 0), 1), "describe other blocks"),
    ],
)
def test_inconsistent_tables_are_refused(tables, message):
    with pytest.raises(UserError, match=message):
        BlockLayout.from_tables(tables, 2)


@given(masks, st.integers(0, 3), st.integers(0, 3))
def test_padded_tables_describe_the_same_layout(mask, more_in, more_out):
    layout = BlockLayout.from_mask(mask, 2)
    tables = layout.tables()
    fans = tables.in_index.shape[1] + more_in, tables.out_index.shape[1] + more_out
    wide = pad_tables(tables, *fans)
    assert (wide.in_slot.shape[1], wide.out_slot.shape[1]) == fans
    assert BlockLayout.from_tables(wide, 2) == layout


def test_a_fan_below_the_longest_line_is_refused():
    with pytest.raises(UserError, match="Fan 2 is too small; legal: at least 3"):
        pad_tables(eye(3).tables()._replace(out_index=np.zeros((3, 3), np.int32)), 2, 2)


@st.composite
def grouped_masks(draw):
    """(mask of equal groups, its Groups), where one side may have parts of no group."""
    count, spare = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    first = draw(st.integers(0, spare))
    on_inputs = draw(st.booleans())
    parts = (count + spare, count) if on_inputs else (count, count + spare)
    firsts = (first, 0) if on_inputs else (0, first)
    runs = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    outer = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    labels = [np.arange(o * p * r) // r % p - f for o, p, r, f in zip(outer, parts, runs, firsts)]
    mask = (labels[0][:, None] == labels[1]) & np.isin(labels[0], range(count))[:, None]
    # A run goes on into the next one where no other part lies between.
    runs = tuple(o * r if p == 1 else r for o, p, r in zip(outer, parts, runs))
    return mask, Groups(count, *runs, *parts)


@given(grouped_masks())
def test_equal_groups_are_found(drawn):
    mask, groups = drawn
    layout = BlockLayout.from_mask(mask, 4)
    assert layout.groups == groups
    assert layout.tables().with_groups().groups == groups


@given(grouped_masks(), st.data())
def test_a_mask_that_differs_in_one_block_has_other_groups_or_none(drawn, data):
    mask, groups = drawn
    at = data.draw(st.integers(0, mask.size - 1))
    changed = mask.copy()
    changed.flat[at] = not changed.flat[at]
    if changed.any():
        assert BlockLayout.from_mask(changed, 4).groups != groups


def test_layers_of_different_groups_share_none():
    both = [make_layout("monarch", 32, 32, 4, density).tables() for density in (1 / 2, 1 / 4)]
    padded = [pad_tables(tables, 4, 4) for tables in both]
    assert stack_tables(padded).with_groups().groups is None
    assert stack_tables(padded[:1] * 2).with_groups().groups == both[0].with_groups().groups


def test_a_drawing_shows_the_stored_blocks():
    layout = make_layout("random", 32, 64, 8, 0.5)
    axes = layout.plot()
    np.testing.assert_array_equal(axes.images[0].get_array() == 0, layout.mask)
    assert layout.plot(axes) is axes and len(axes.images) == 2


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    layout = make_layout("monarch", 64, 64, block=16, density=0.25)
    with pytest.raises(UserError, match=r"needs the package matplotlib: pip install .*\[train\]"):
        layout.plot()


def test_the_picture_of_a_layout_has_each_stored_block_once():
    layout = make_layout("random", 64, 96, 8, 0.25)
    picture = layout._repr_html_()
    corners = re.findall(r"M(\d+) (\d+)h1v1h-1z", picture)
    assert sorted((int(row), int(col)) for col, row in corners) == [
        tuple(place) for place in np.argwhere(layout.mask)
    ]
    assert "64 x 96, 24 of 96 blocks of 8" in picture and "64 x 96" in repr(layout)
