"""Rates of block-sparse products in the planner: their source, and the words on slow ones."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from sparse_dataflow.commands.planning.plan_rows import slow_products
from sparse_dataflow.commands.preflight import settling
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import GROUPED_PATTERNS
from sparse_dataflow.hardware.chips import CHIPS
from sparse_dataflow.hardware.machines import Machine
from sparse_dataflow.planner.efficiency import BLOCK_RATES, PRIOR, block_rate, slower_than_dense
from sparse_dataflow.runs.run_config import SIZES, preset
from sparse_dataflow.runs.variants import variant

KEPT = ROOT / "experiments/results/schedule_bench.json"
ROWS = json.loads(KEPT.read_text())["rows"]


def spec(block, pattern="pixelfly", density=1 / 8):
    return LinearSpec("block_sparse", pattern, density, block)


def test_the_rates_of_tpus_are_those_of_the_kept_schedules():
    def cycles(chip, implementation, block):
        key = chip, implementation, block
        rows = [r for r in ROWS if (r["chip"], r["implementation"], r["block"]) == key]
        assert len(rows) == 12
        return sum(row["cycles"] + row["xla_cycles"] for row in rows) / rows[0]["density"]

    for family, by_kind in BLOCK_RATES.items():
        chip = family.removeprefix("tpu-")
        for grouped, rates in by_kind.items():
            name = "pallas_tpu_grouped" if grouped else "pallas_tpu"
            for block, rate in rates.items():
                measured = cycles(chip, "dense", 0) / cycles(chip, name, block)
                assert rate == pytest.approx(measured, abs=5e-4)


@given(
    st.sampled_from(sorted(BLOCK_RATES)),
    st.sampled_from([*GROUPED_PATTERNS, "pixelfly"]),
    st.integers(8, 512),
)
def test_larger_blocks_are_not_much_slower(family, pattern, block):
    smaller, larger = (block_rate(family, spec(b, pattern), PRIOR) for b in (block, 2 * block))
    assert 0 < smaller <= 1.1 * larger
    assert block_rate(family, LinearSpec(), PRIOR) == 1


def test_small_blocks_that_are_slower_than_dense_are_named():
    model = SIZES["13b"].with_linears(spec(64), ["qkv", "mlp_in"])
    assert slower_than_dense(model, "tpu-v6e") == ["mlp_in", "qkv"]
    words = slow_products(model, CHIPS["tpu-v6e"])
    assert "slow down mlp_in, qkv on tpu-v6e" in words and "Legal: a larger --block." in words
    assert slow_products(SIZES["13b"].with_linears(spec(128)), CHIPS["tpu-v6e"]) == ""
    assert slow_products(SIZES["13b"], CHIPS["tpu-v6e"]) == ""
    assert slow_products(model, CHIPS["a100-80gb"]) == ""


@pytest.mark.parametrize(
    ("changes", "grouped"),
    [
        ({}, True),
        ({"run__init_from": "somewhere", "run__prune_to": "pattern"}, True),
        ({"run__init_from": "somewhere", "run__prune_to": "blocks"}, False),
        ({"evolution__method": "set"}, False),
        ({"sparsity__pattern": "random"}, False),
    ],
)
def test_a_run_is_priced_by_the_products_that_it_has(changes, grouped):
    """The pattern is that of equal groups, but only the blocks that a run keeps are."""
    config = preset("13b").change(sparsity__block=128, **changes)
    rates = BLOCK_RATES["tpu-v6e"][grouped]
    chip = Machine(CHIPS["tpu-v6e"], 1)
    priced = settling.planning.request_of(config, settling.models_of, chip).config
    assert block_rate("tpu-v6e", priced.linear("mlp_in"), PRIOR) == rates[128]


def test_a_run_that_prunes_to_a_pattern_is_faster_than_one_that_prunes_to_blocks():
    config = preset("13b").change(
        sparsity__block=128, run__init_from="somewhere", training__micro_batches=1
    )
    costs = {
        prune_to: settling.run_costs(
            [variant(config.change(run__prune_to=prune_to), "sparse")],
            CHIPS["tpu-v6e"],
            settling.SINGLE_DEVICE,
        )[0].forward
        for prune_to in ("blocks", "pattern")
    }
    assert costs["blocks"] > 1.05 * costs["pattern"]
