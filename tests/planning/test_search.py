"""The search prices a grid as each layout by itself, keeps constraints, answers what cannot be."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.config.model import LinearSpec, ModelConfig
from sparse_dataflow.config.presets import SIZES
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import chips
from sparse_dataflow.planning import search, sensitivity
from sparse_dataflow.planning.memory import USABLE
from sparse_dataflow.planning.search import Request, Space

SMALL = ModelConfig(8, 1024, 16, 4096, 32768, 1024, compute_dtype="bfloat16")
LARGE = dataclasses.replace(SIZES["175b"], compute_dtype="bfloat16")


def priced(config=SMALL, batch=64, hardware="h100", count=16):
    request = Request(config, config.max_len, batch, chips.lookup(hardware), count)
    return search.price(request, search.space(request))


@pytest.mark.parametrize(
    ("scale", "batch", "count", "tensor", "stage"),
    [("175b", 10240, 1024, 4, 16), ("1t", 9600, 3072, 8, 64)],
)
def test_frontier_would_have_been_told_its_own_layouts(scale, batch, count, tensor, stage):
    """arXiv 2312.12705 found these by search on the machine (recalled): ZeRO 1, all recomputed."""
    config = dataclasses.replace(SIZES[scale], compute_dtype="bfloat16")
    request = Request(config, 2048, batch, chips.lookup("mi250x"), count)
    levels = {**search.space(request).levels, "zero": (1,), "remat": ("full",)}
    found = search.price(request, Space(levels))
    (_, best) = found.ranked(1)[0]
    assert (best["tensor"], best["stage"]) == (tensor, stage)
    assert found.space.size > 10_000 and found.legal.any()


@settings(max_examples=25)
@given(st.data())
def test_the_grid_has_the_price_of_each_layout_by_itself(data):
    found = GRID
    index = data.draw(st.integers(0, found.space.size - 1))
    choice = found.choice(index)
    layout = search.single(found.request.layout(choice))
    alone = search.explain(found.request, choice).total
    assert found.seconds.reshape(-1)[index] == pytest.approx(float(alone))
    held = float(search.held_bytes(found.request, layout))
    assert found.memory.reshape(-1)[index] == pytest.approx(held)
    if found.legal.reshape(-1)[index]:
        assert layout.chips == found.request.chips and layout.batch == found.request.batch
        assert SMALL.num_layers % (layout.stage * layout.chunks) == 0
        assert SMALL.num_heads % layout.tensor == 0
        assert held <= USABLE * found.request.chip.memory_bytes


GRID = priced()


def test_ranked_are_the_fastest_legal_layouts_each_once():
    ranked = GRID.ranked(50)
    speeds = [GRID.throughput.reshape(-1)[index] for index, _ in ranked]
    assert speeds == sorted(speeds, reverse=True) and speeds[0] == GRID.throughput.max()
    layouts = [search.single(GRID.request.layout(choice)) for _, choice in ranked]
    assert len({str(layout) for layout in layouts}) == len(layouts)
    everything = GRID.ranked(GRID.space.size)
    assert len(everything) == GRID.legal.sum()


def test_one_stage_has_one_schedule_and_chunks_are_interleaved():
    for _, choice in GRID.ranked(GRID.space.size):
        assert (choice["chunks"] > 1) == (choice["schedule"] == "interleaved")
        assert choice["stage"] > 1 or choice["schedule"] == "gpipe"


def test_sparse_blocks_are_not_cut():
    spec = LinearSpec("block_sparse", density=1 / 8, block=256)
    found = priced(SMALL.with_linears(spec))
    tensors = {choice["tensor"] for _, choice in found.ranked(found.space.size)}
    assert tensors and max(tensors) == 4  # 1024 features are 4 blocks
    assert max(c["tensor"] for _, c in GRID.ranked(GRID.space.size)) == 16


def test_a_batch_that_nothing_divides_is_answered_with_the_closest():
    # 48 chips are 3 times a power of two, and so is every number of rows that they compute.
    with pytest.raises(UserError, match=r"divides a batch of 7 .* closest .* --batch=6\."):
        search.refuse(priced(batch=7, count=48))
    search.refuse(priced(batch=6, count=48))


def test_a_model_too_large_is_answered_with_enough_chips():
    with pytest.raises(UserError, match=r"smallest needs .* GiB on each of 64") as refused:
        search.refuse(priced(LARGE, 512, "tpu-v5e", 64))
    words = str(refused.value)
    more = int(words.split("--chips=")[1].split()[0])
    batch = int(words.split("--batch=")[1].rstrip("."))
    assert more > 64
    search.refuse(priced(LARGE, batch, "tpu-v5e", more))
    assert not priced(LARGE, batch, "tpu-v5e", more // 2).legal.any()


def test_one_chip_that_is_too_small_is_told_of_the_relay():
    config = dataclasses.replace(SIZES["13b"], compute_dtype="bfloat16")
    with pytest.raises(UserError, match=r"--executor=relay --set training.micro_batches="):
        search.refuse(priced(config, 8, "h100", 1))


def test_a_legal_request_is_not_refused():
    search.refuse(GRID)


def test_shapley_effects_of_a_sum_are_the_shares_of_its_parts():
    a, b, c = np.arange(4.0), 3 * np.arange(3.0), np.zeros(2)
    values = a[:, None, None] + b[None, :, None] + c[None, None, :]
    effects = sensitivity.shapley_effects(values, ["a", "b", "c"])
    total = a.var() + b.var()
    assert effects == pytest.approx({"b": b.var() / total, "a": a.var() / total, "c": 0.0})
    assert list(effects) == ["b", "a", "c"]


@given(st.integers(0, 2**32 - 1))
def test_shapley_effects_add_up_and_are_those_of_all_orders(seed):
    values = np.random.default_rng(seed).normal(size=(2, 3, 4))
    effects = sensitivity.shapley_effects(values, ["a", "b", "c"])
    assert sum(effects.values()) == pytest.approx(1)
    # By its definition: the mean over all orders of what a choice adds when it becomes known.
    expected = dict.fromkeys("abc", 0.0)
    for order in itertools.permutations(range(3)):
        known = ()
        for axis in order:
            before = values.mean(axis=tuple(a for a in range(3) if a not in known)).var()
            known = (*known, axis)
            after = values.mean(axis=tuple(a for a in range(3) if a not in known)).var()
            expected["abc"[axis]] += (after - before) / values.var() / 6
    assert effects == pytest.approx(expected)


def test_a_choice_without_effect_gets_nothing():
    assert sensitivity.shapley_effects(np.ones((2, 2)), ["a", "b"]) == {"a": 0.0, "b": 0.0}


def test_decisions_keep_the_best_and_best_by_level_names_it():
    values, levels = sensitivity.decisions(GRID)
    assert values.shape == tuple(len(v) for v in levels.values())
    assert values.max() == GRID.throughput.max()
    assert "interleaved" not in levels["schedule"]
    best = sensitivity.best_by_level(values, levels)
    (_, choice) = GRID.ranked(1)[0]
    for name in ("tensor", "stage", "micro_batch", "zero", "remat"):
        assert best[name][choice[name]] == pytest.approx(GRID.throughput.max())
    effects = sensitivity.shapley_effects(values, list(levels))
    assert sum(effects.values()) == pytest.approx(1)
    assert all(-1e-9 < effect < 1 for effect in effects.values())


def test_sampling_finds_a_good_legal_layout_and_goes_on(tmp_path):
    pytest.importorskip("optuna")
    from sparse_dataflow.planning import sampling

    request = GRID.request
    levels = {**GRID.space.levels, "chunks": (1,), "schedule": ("gpipe", "1f1b"), "data": (1,)}
    choices = Space(levels)
    journal = tmp_path / "trials.journal"
    first = sampling.sample(request, choices, 30, journal)
    again = sampling.sample(request, choices, 30, journal)
    assert first == again
    more = sampling.sample(request, choices, 60, journal)
    assert len(more) >= len(first) and more[0][1] >= first[0][1]
    for choice, speed in more:
        layout = search.single(request.layout(choice))
        assert layout.chips == request.chips and layout.batch == request.batch
        assert speed <= GRID.throughput.max() * (1 + 1e-9)
    assert more[0][1] > 0.5 * GRID.throughput.max()
    with pytest.raises(UserError, match="another request"):
        sampling.sample(dataclasses.replace(request, batch=128), choices, 30, journal)
