"""Layouts sharded over the tensor axis keep their shapes when updates exchange blocks."""

import numpy as np
import pytest

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.executors import cuts
from sparse_dataflow.core.executors.sharding import COLUMN_PARALLEL
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.layouts.evolution import phase_specs, rigl_blocks
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.training import programs
from sparse_dataflow.files.errors import UserError

SPEC = LinearSpec("block_sparse", "random", 0.25, 8)
MODEL = ModelConfig(2, 64, 4, 128, vocab_size=40, max_len=8).with_linears(SPEC)
SHARDS = 4


def exchanged(layouts, row_shards):
    rng = np.random.default_rng(0)
    return {
        name: [
            rigl_blocks(
                layout,
                rng.random(layout.nnz),
                rng.lognormal(size=layout.mask.shape),
                0.5,
                1 if name in COLUMN_PARALLEL else row_shards,
                rng,
            )
            for layout in layers
        ]
        for name, layers in layouts.items()
    }


def cut(layouts):
    placed = stacks.layouts_by_place(stacks.stored_layouts(MODEL, layouts))
    return {
        place.projection: cuts.cut(place.projection, layout, SHARDS, changing=True).layout
        for place, layout in placed.items()
    }


def test_shards_of_exchanged_layouts_have_the_same_shapes():
    evolution = EvolutionConfig("rigl", row_shards=SHARDS)
    (phase,) = phase_specs(MODEL, evolution)
    before = model_layouts.layouts(phase.model)
    after = exchanged(before, SHARDS)
    sharded = [cut(layouts) for layouts in (before, after)]
    for name in before:
        assert before[name] != after[name]
        first, second = (each[name].arrays for each in sharded)
        assert [table.shape for table in first] == [table.shape for table in second]


def test_blocks_that_move_between_shards_are_refused_before_the_first_step():
    (phase,) = phase_specs(MODEL, EvolutionConfig("rigl"))
    layouts = exchanged(model_layouts.layouts(phase.model), row_shards=1)
    with pytest.raises(UserError, match="Shards would store from"):
        cut(layouts)

    class Executor:
        tensor_shards = SHARDS

    with pytest.raises(UserError, match=r"row_shards=2 .* 4 tensor shards.*legal: multiples of 4"):
        programs.refuse_row_shards(EvolutionConfig("rigl", row_shards=2), Executor())


def test_blocks_in_the_order_of_shards_come_back():
    rng = np.random.default_rng(0)
    order = np.stack([rng.permutation(9) for _ in range(3)])
    values = rng.normal(size=(3, 9))
    by_shard = np.take_along_axis(values, order, axis=1)
    back = np.take_along_axis(by_shard, cuts.inverse(order), axis=1)
    np.testing.assert_array_equal(back, values)
