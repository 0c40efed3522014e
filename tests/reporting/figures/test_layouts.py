"""Pictures of layouts that change: exact where they are small, of bounded size where large."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed import paths

from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.reporting.figures import layouts as layout_figures


def cells(picture, colour):
    """Returns the (row, column) of the filled cells; cells are 8 units wide."""
    return {tuple(int(n) for n in corners.mean(axis=0)[::-1] // 8)
            for corners in paths(picture, colour)}  # fmt: skip


@settings(max_examples=20)
@given(shape=st.tuples(st.integers(1, 20), st.integers(1, 20)), seed=st.integers(0, 99))
def test_every_block_has_the_colour_of_what_happened_to_it(shape, seed):
    random = np.random.default_rng(seed)
    old, new = (random.random(shape) < 0.4 for _ in range(2))
    old[0, 0] = new[0, 0] = True
    before, after = (BlockLayout.from_mask(mask, 4) for mask in (old, new))
    picture = layout_figures.layout_picture(after, before, "key", "Layout")
    for colour, expected in (
        (layout_figures.KEPT, old & new),
        (layout_figures.NEW, new & ~old),
        (layout_figures.DROPPED, old & ~new),
    ):
        assert cells(picture, colour) == set(map(tuple, np.argwhere(expected)))
    assert f"{(new & ~old).sum()} of them are new" in picture


def test_a_large_layout_is_drawn_in_few_cells_as_dark_as_they_are_full():
    mask = np.zeros((640, 200), bool)
    mask[:10, :10], mask[100:110, 150:155] = True, True
    layout = BlockLayout.from_mask(mask, 8)
    assert layout_figures.cell_side(layout) == 10
    picture = layout_figures.layout_picture(layout, None, "key", "Layout")
    assert len(paths(picture, layout_figures.KEPT)) == 2
    assert not paths(picture, layout_figures.NEW) and "opacity: 0.5" in picture

    random = np.random.default_rng(0).random((2000, 3000)) < 0.125
    large = BlockLayout.from_mask(random, 8)
    other = BlockLayout.from_mask(~random, 8)
    assert len(layout_figures.layout_picture(large, other, "key", "Layout")) < 400_000
    sums = layout_figures._cell_means(random, layout_figures.cell_side(large))
    assert sums.shape == (43, 64) and sums.mean() == pytest.approx(0.125, abs=0.01)


def test_the_curve_has_a_line_for_each_projection_that_exchanged_blocks():
    rows = [
        {"kind": "evolution", "step": step, "changed/qkv": 0.3 / step, "changed/<b>": 1.0}
        for step in (101, 201)
    ]
    picture = layout_figures.exchange_curves(rows, "key")
    assert "qkv" in picture and "<b>" not in picture and "mlp_in" not in picture
    assert "qkv: last 0.1%" in picture
    assert layout_figures.exchange_curves([{"kind": "evolution", "step": 1}], "key") is None
