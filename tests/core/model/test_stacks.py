"""Layouts are taken from a tree of weights, put back, and mapped in it, by their places."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.layouts.layout import BlockLayout, FixedTables, index_tables
from sparse_dataflow.core.model import stacks

MODEL = ModelConfig(4, 64, 4, 128, vocab_size=40, max_len=8)
RANDOM, MONARCH = (LinearSpec("block_sparse", p, 0.25, 8) for p in ("random", "monarch"))
MODELS = {
    "dense": MODEL,
    "all": MODEL.with_linears(RANDOM),
    "two": dataclasses.replace(MODEL, linears={"qkv": MONARCH, "mlp_out": RANDOM}),
    "groups": dataclasses.replace(
        MODEL.with_linears(RANDOM), density_by_depth=(0.5, 0.5, 1.5, 1.5)
    ),
    "experts": dataclasses.replace(
        MODEL.with_linears(MONARCH), experts=4, top_k=2, shared_expert=True
    ),
}


def assert_equal(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_fixed", [False, True])
def test_layouts_are_taken_by_name_and_put_back(name, is_fixed):
    model = MODELS[name]
    stored = stacks.stored_layouts(model)
    tree = stacks.map_layouts(FixedTables, stored) if is_fixed else stored
    assert stacks.layouts_of(model, tree) == model_layouts.layouts(model)
    assert_equal(stacks.layout_tree(model, stacks.layouts_by_name(tree)), stored)


@pytest.mark.parametrize("name", MODELS)
def test_each_layout_is_mapped_at_its_place(name):
    stored, placed = stacks.stored_layouts(MODELS[name]), {}
    result = stacks.map_placed_layouts(placed.setdefault, stored)
    assert placed == stacks.layouts_by_place(stored)
    assert_equal(result, stored)
    groups = 2 if name == "groups" else 1
    sparse = MODELS[name].sparse_projections
    assert set(placed) == {stacks.Place(i, each) for i in range(groups) for each in sparse}


@pytest.mark.parametrize(
    ("name", "parents", "group"),
    [("all", ["blocks"], 0), ("groups", ["blocks", 1], 1), ("experts", ["blocks", "experts"], 0)],
)
def test_stored_blocks_alone_have_a_layout(name, parents, group):
    def layout_of(*names):
        keys = jax.tree_util.DictKey, jax.tree_util.SequenceKey
        path = tuple(keys[isinstance(each, int)](each) for each in (*parents, *names))
        return stacks.layout_of_leaf(MODELS[name], path, placed)

    placed = stacks.layouts_by_place(stacks.stored_layouts(MODELS[name]))
    assert layout_of("mlp_in", "values") is placed[stacks.Place(group, "mlp_in")]
    assert layout_of("mlp_in", "bias") is None
    assert layout_of("mlp_in", "a_kernel") is None
    assert layout_of("norm1", "scale") is None


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=5))
def test_the_forms_of_a_layout_have_one_grid_and_one_set_of_tables(rows):
    mask = np.array(rows)
    mask[0, 0] = True
    layout = BlockLayout.from_mask(mask, 4)
    tables = index_tables(layout)
    assert index_tables(FixedTables(tables)) is tables is index_tables(tables)
    assert layout.grid == tables.grid == mask.shape
    assert tables.groups == layout.groups
    assert tables.layouts(4) == [layout]
