"""Rates of block-sparse products in the planner: their source, and the words on slow ones."""

import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.commands.planning.plan_rows import slow_products
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.run import SIZES
from sparse_dataflow.core.config.sparsity import GROUPED_PATTERNS
from sparse_dataflow.hardware.chips import CHIPS
from sparse_dataflow.planner.efficiency import BLOCK_RATES, PRIOR, block_rate, slower_than_dense

KEPT = pathlib.Path(__file__).parents[2] / "experiments/results/schedule_bench.json"
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
