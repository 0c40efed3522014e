"""Search for a parallel plan: prices, constraints, illegal requests, Shapley effects."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import chips
from sparse_dataflow.planner import bands, search
from sparse_dataflow.planner.memory import USABLE
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.planner.search import Request
from sparse_dataflow.runs.run_config import SIZES

SMALL = ModelConfig(8, 1024, 16, 4096, 32768, 1024, compute_dtype="bfloat16")
LARGE = dataclasses.replace(SIZES["175b"], compute_dtype="bfloat16")


def priced(config=SMALL, batch=64, hardware="h100", count=16):
    request = Request(config, config.max_len, batch, chips.lookup(hardware), count)
    return search.price(request)


@pytest.mark.parametrize(
    ("scale", "batch", "count", "tensor", "stage"),
    [("175b", 10240, 1024, 4, 16), ("1t", 9600, 3072, 8, 64)],
)
def test_frontier_plans_are_found(scale, batch, count, tensor, stage):
    """The plans that arXiv 2312.12705 found by search on the machine (recalled), with ZeRO 1."""
    config = dataclasses.replace(SIZES[scale], compute_dtype="bfloat16")
    request = Request(config, 2048, batch, chips.lookup("mi250x"), count)
    prices = search.price(request, {**search.space(request), "zero": (1,), "remat": ("full",)})
    [(best, _)] = prices.ranked(1)
    assert (best.tensor, best.stage) == (tensor, stage)
    assert prices.legal.size > 10_000 and prices.legal.any()


@settings(max_examples=25)
@given(st.data())
def test_the_grid_equals_the_price_of_each_plan(data):
    index = data.draw(st.integers(0, GRID.legal.size - 1))
    plan = GRID.plan(index)
    seconds = GRID.request.time(plan).total
    assert GRID.seconds.reshape(-1)[index] == pytest.approx(float(seconds))
    size = float(GRID.request.chip_bytes(plan))
    assert GRID.memory.reshape(-1)[index] == pytest.approx(size)
    if GRID.legal.reshape(-1)[index]:
        assert plan.chips == GRID.request.chips and plan.batch == GRID.request.batch
        assert SMALL.num_layers % (plan.stage * plan.chunks) == 0
        assert SMALL.num_heads % plan.tensor == 0
        assert size <= USABLE * GRID.request.chip.memory_bytes


GRID = priced()


def test_ranked_plans_are_the_fastest_legal_ones_without_duplicates():
    plans, speeds = map(list, zip(*GRID.ranked(50)))
    assert speeds == sorted(speeds, reverse=True) and speeds[0] == GRID.throughput.max()
    assert len({str(plan) for plan in plans}) == len(plans)
    everything = GRID.ranked(GRID.legal.size)
    assert len(everything) == GRID.legal.sum()


def test_the_fastest_plan_with_room_is_recommended():
    ranked = GRID.ranked(200)
    index = GRID.recommended(ranked)
    limit = search.ROOMY * USABLE * GRID.request.chip.memory_bytes
    roomy = [float(GRID.request.chip_bytes(plan)) <= limit for plan, _ in ranked]
    assert index == roomy.index(True)
    full = dataclasses.replace(GRID.request.chip, memory_bytes=1)
    crowded = dataclasses.replace(GRID, request=dataclasses.replace(GRID.request, chip=full))
    assert crowded.recommended(ranked) == 0
    size = float(GRID.request.chip_bytes(ranked[0][0]))
    just = dataclasses.replace(full, memory_bytes=int(size / USABLE) + 1)
    tight = dataclasses.replace(GRID, request=dataclasses.replace(GRID.request, chip=just))
    chosen = ranked[tight.recommended(ranked)][0]
    assert float(GRID.request.chip_bytes(chosen)) <= search.ROOMY * size < size


def test_one_stage_has_one_schedule_and_chunks_are_interleaved():
    for plan, _ in GRID.ranked(GRID.legal.size):
        assert (plan.chunks > 1) == (plan.schedule == "interleaved")
        assert plan.stage > 1 or plan.schedule == "gpipe"


def test_tensor_parallelism_does_not_split_blocks():
    spec = LinearSpec("block_sparse", density=1 / 8, block=256)
    prices = priced(SMALL.with_linears(spec))
    tensors = {plan.tensor for plan, _ in prices.ranked(prices.legal.size)}
    assert tensors and max(tensors) == 4  # 1024 features are 4 blocks.
    assert max(plan.tensor for plan, _ in GRID.ranked(GRID.legal.size)) == 16


@pytest.mark.parametrize("fused", [False, True])
def test_a_tensor_axis_may_be_a_multiple_of_the_key_value_heads(fused):
    config = ModelConfig(2, 96, 12, 96, 64, 64, num_kv_heads=6, fused_qkv=fused)
    request = Request(config, 48, 12, chips.lookup("tpu-v5p"), 12)
    plan = ParallelPlan(tensor=np.array([1, 2, 3, 4, 6, 12]))
    refused = search.violations(request, plan, 0)["heads"]
    np.testing.assert_array_equal(refused, [0, 0, 0, 1, 0, fused])


def test_the_axis_feature_is_priced_on_request():
    assert GRID.levels["feature"] == (1,)
    spec = LinearSpec("block_sparse", density=1 / 8, block=64)
    request = dataclasses.replace(GRID.request, config=SMALL.with_linears(spec), largest_feature=16)
    prices = search.price(request)
    ranked = [plan for plan, _ in prices.ranked(prices.legal.size)]
    wide = [plan for plan in ranked if plan.feature > 1]
    assert {plan.feature for plan in wide} == {2, 4, 8, 16}
    # It divides the 16 heads with tensor, also of a stage.
    assert {plan.chips for plan in wide} == {16} and {1, 2} <= {plan.stage for plan in wide}
    assert max(plan.layer_chips for plan in wide) == 16 and {p.feature for p in ranked} > {1}


def test_an_illegal_batch_is_answered_with_the_closest_legal_one():
    # 48 chips are 3 times a power of two, so legal batches are multiples of 3.
    with pytest.raises(
        UserError, match=r"divides a batch of 7 .* closest legal batch is --batch=6\."
    ):
        search.check_legal(priced(batch=7, count=48))
    search.check_legal(priced(batch=6, count=48))


def test_too_few_chips_are_answered_with_a_legal_number():
    with pytest.raises(UserError, match=r"smallest needs .* GiB on each of 64") as refused:
        search.check_legal(priced(LARGE, 512, "tpu-v5e", 64))
    words = str(refused.value)
    more = int(words.split("--chips=tpu-v5e:")[1].split()[0])
    batch = int(words.split("--batch=")[1].rstrip("."))
    assert more > 64
    search.check_legal(priced(LARGE, batch, "tpu-v5e", more))
    assert not priced(LARGE, batch, "tpu-v5e", more // 2).legal.any()


def test_a_chip_that_is_too_small_is_answered_with_the_relay():
    config = dataclasses.replace(SIZES["13b"], compute_dtype="bfloat16")
    with pytest.raises(UserError, match=r"--executor=relay --set training.micro_batches="):
        search.check_legal(priced(config, 8, "h100", 1))
    # Scores that no kernel keeps on the chip need twice as many micro-batches.
    request = dataclasses.replace(priced(config, 128, "h100", 1).request, sequence=1024)
    for fused, count in ((True, 4), (False, 8)):
        one = search.price(dataclasses.replace(request, fused_attention=fused))
        with pytest.raises(UserError, match=rf"training.micro_batches={count}\b"):
            search.check_legal(one)


def test_a_legal_request_is_not_refused():
    search.check_legal(GRID)


def test_shapley_effects_of_a_sum_are_shares_of_its_variance():
    a, b, c = np.arange(4.0), 3 * np.arange(3.0), np.zeros(2)
    values = a[:, None, None] + b[None, :, None] + c[None, None, :]
    effects = bands.shapley_effects(values, ["a", "b", "c"])
    total = a.var() + b.var()
    assert effects == pytest.approx({"b": b.var() / total, "a": a.var() / total, "c": 0.0})
    assert list(effects) == ["b", "a", "c"]


@given(st.integers(0, 2**32 - 1))
def test_shapley_effects_sum_to_1_and_follow_their_definition(seed):
    values = np.random.default_rng(seed).normal(size=(2, 3, 4))
    effects = bands.shapley_effects(values, ["a", "b", "c"])
    assert sum(effects.values()) == pytest.approx(1)
    # Definition: the mean over all orders of the variance that an axis adds to those before it.
    expected = dict.fromkeys("abc", 0.0)
    for order in itertools.permutations(range(3)):
        subset = ()
        for axis in order:
            before = values.mean(axis=tuple(a for a in range(3) if a not in subset)).var()
            subset = (*subset, axis)
            after = values.mean(axis=tuple(a for a in range(3) if a not in subset)).var()
            expected["abc"[axis]] += (after - before) / values.var() / 6
    assert effects == pytest.approx(expected)


def test_constant_values_have_no_effects():
    assert bands.shapley_effects(np.ones((2, 2)), ["a", "b"]) == {"a": 0.0, "b": 0.0}


def test_best_by_level_has_the_best_plan():
    values, levels = bands.decisions(GRID)
    assert values.shape == tuple(len(v) for v in levels.values())
    assert values.max() == GRID.throughput.max()
    assert "interleaved" not in levels["schedule"]
    best = bands.best_by_level(values, levels)
    [(plan, _)] = GRID.ranked(1)
    for name in ("tensor", "stage", "micro_batch", "zero", "remat"):
        assert best[name][getattr(plan, name)] == pytest.approx(GRID.throughput.max())
    effects = bands.shapley_effects(values, list(levels))
    assert sum(effects.values()) == pytest.approx(1)
    assert all(-1e-9 < effect < 1 for effect in effects.values())
