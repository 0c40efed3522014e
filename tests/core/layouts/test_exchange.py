"""Exchanges of blocks: constant fan-in, bounded fan-out, and most of RigL's gradient norm."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.layouts.evolution import exchange
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.layouts.model_layouts import with_room
from sparse_dataflow.core.layouts.patterns import make_layout

ROOM = EvolutionConfig().max_fan_out


@st.composite
def problems(draw):
    """(layout with room, shards that divide its input blocks, random generator)."""
    in_blocks, out_blocks, density = draw(
        st.sampled_from([(8, 8, 0.25), (4, 16, 0.5), (16, 4, 0.25), (12, 18, 1 / 3), (6, 6, 5 / 6)])
    )
    layout = make_layout(
        draw(st.sampled_from(["random", "cyclic"])),
        in_blocks * 4,
        out_blocks * 4,
        4,
        density,
        draw(st.integers(0, 20)),
    )
    spec = LinearSpec("block_sparse", max_fan_out=draw(st.sampled_from([1.5, 2.0, 99.0])))
    shards = draw(st.sampled_from([n for n in (1, 2, 3, 4) if in_blocks % n == 0]))
    return with_room(layout, spec), shards, np.random.default_rng(draw(st.integers(0, 99)))


@settings(max_examples=60)
@given(problems(), st.sampled_from([0.1, 0.3, 0.9]), st.sampled_from([0.0, 1.0]))
def test_fans_and_shards_keep_their_sizes(problem, share, gain):
    layout, shards, rng = problem
    norms, growth = rng.random(layout.nnz), rng.random(layout.mask.shape)
    new = exchange(layout, norms, growth, share, shards, gain)
    np.testing.assert_array_equal(new.fan_in, layout.fan_in)
    assert new.fan_out.max() <= layout.max_fan_out
    in_shards = lambda lay: lay.mask.reshape(shards, -1, lay.out_blocks).sum(axis=1)  # noqa: E731
    np.testing.assert_array_equal(in_shards(new), in_shards(layout))
    assert [t.shape for t in new.tables().arrays] == [t.shape for t in layout.tables().arrays]
    dropped = layout.mask & ~new.mask
    assert dropped.sum() <= round(share * layout.nnz)
    if gain == 0 and shards == 1:
        assert dropped.sum() == min(round(share * layout.nnz), (~layout.mask).sum()) or share > 0.1
    # In each output block of each shard the smallest blocks are dropped.
    sizes = np.zeros(layout.mask.shape)
    sizes[layout.rows, layout.cols] = norms
    for col, rows in itertools.product(
        range(layout.out_blocks), np.split(np.arange(layout.in_blocks), shards)
    ):
        gone, stays = (rows[m[rows, col]] for m in (dropped, layout.mask & new.mask))
        assert sizes[gone, col].max(initial=0) <= sizes[stays, col].min(initial=math.inf)


@settings(max_examples=40)
@given(st.integers(0, 999), st.integers(1, 4))
def test_without_a_bound_the_exchanges_are_the_best_of_all(seed, count):
    """Compared with every choice of as many drops and growths on a grid of 4 x 3 blocks."""
    rng = np.random.default_rng(seed)
    layout = BlockLayout.from_mask(rng.permuted(np.tile([[1], [1], [0], [0]], 3) == 1, axis=0), 2)
    norms, growth = rng.random(layout.nnz), rng.random(layout.mask.shape)
    lost, gained = np.sort(norms)[:count].sum(), np.sort(growth[~layout.mask])[-count:].sum()

    def score(new):
        dropped = norms[~new[layout.rows, layout.cols]].sum()
        return growth[new & ~layout.mask].sum() / gained - dropped / lost

    columns = [np.isin(np.arange(4), pair) for pair in itertools.combinations(range(4), 2)]
    masks = (np.stack(chosen, axis=1) for chosen in itertools.product(columns, repeat=3))
    legal = [mask for mask in masks if (layout.mask & ~mask).sum() == count]
    new = exchange(layout, norms, growth, count / layout.nnz)
    assert (layout.mask & ~new.mask).sum() == count
    assert score(new.mask) == pytest.approx(max(map(score, legal)))


@pytest.mark.parametrize(
    ("shape", "share"), [((16, 48), 0.1), ((16, 48), 0.3), ((64, 16), 0.1), ((64, 16), 0.3)]
)
def test_growth_captures_nine_tenths_of_the_gradient_norm_of_unconstrained_rigl(shape, share):
    """Block norms as measured in trained `pico` models: spread over inputs, outputs and blocks.

    Growth under constant fan-in and fan-out captures little more than random growth.
    """
    captured, random, lost = [], [], []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        spread = lambda sigma, *size, rng=rng: sigma * rng.normal(size=size)  # noqa: E731
        gradients = np.exp(spread(0.35, shape[0], 1) + spread(0.35, shape[1]) + spread(0.2, *shape))
        layout = make_layout("random", shape[0] * 8, shape[1] * 8, 8, 1 / 8, seed)
        layout = with_room(layout, LinearSpec("block_sparse", max_fan_out=ROOM))
        norms = np.exp(spread(0.1, layout.nnz))
        count = round(share * layout.nnz)
        smallest = np.argsort(norms)[:count]
        free = ~layout.mask
        free[layout.rows[smallest], layout.cols[smallest]] = True
        unconstrained = np.linalg.norm(np.sort(gradients[free])[-count:])

        def grown(gain, growth):
            new = exchange(layout, norms, growth, share, gain=gain)  # noqa: B023
            assert (new.mask & ~layout.mask).sum() == count  # noqa: B023
            return new.mask & ~layout.mask, layout.mask & ~new.mask  # noqa: B023

        blocks, dropped = grown(1.0, gradients)
        captured.append(np.linalg.norm(gradients[blocks]) / unconstrained)
        random.append(np.linalg.norm(gradients[grown(0.0, rng.random(shape))[0]]) / unconstrained)
        lost.append(np.linalg.norm(norms[dropped[layout.rows, layout.cols]]))
        lost[-1] /= np.linalg.norm(norms[smallest])
    assert np.mean(captured) > 0.9 > 1.25 * np.mean(random)
    assert np.mean(lost) < 1.2


def test_random_growth_drops_the_smallest_blocks_and_restores_none():
    layout = make_layout("random", 128, 128, 8, 0.25, 3)
    norms = np.random.default_rng(0).random(layout.nnz)
    new = exchange(layout, norms, np.random.default_rng(1).random((16, 16)), 0.25, gain=0.0)
    dropped = np.argsort(norms)[: round(0.25 * layout.nnz)]
    expected = np.zeros(layout.nnz, bool)
    expected[dropped] = True
    np.testing.assert_array_equal(~new.mask[layout.rows, layout.cols], expected)


@pytest.mark.parametrize("seed", range(3))
def test_room_that_a_drop_made_is_used(seed):
    """Input 1 has room for one more block, which output 0 takes; then output 1 drops its own."""
    outputs = np.random.default_rng(seed).permutation(3)
    stored, growth = np.zeros((4, 3), bool), np.full((4, 3), 0.1)
    stored[[0, 1, 2], outputs] = True
    growth[[1, 3, 1], outputs] = 10, 8, 6
    expected = np.zeros((4, 3), bool)
    expected[[1, 3, 1], outputs] = True
    layout = BlockLayout.from_mask(stored, 2, max_fan_out=2)
    np.testing.assert_array_equal(exchange(layout, np.ones(3), growth, 1.0).mask, expected)
