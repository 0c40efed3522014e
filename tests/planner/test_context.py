"""What the planner says of sequences that several chips share, and of attention that runs."""

import dataclasses

import numpy as np
import pytest

from sparse_dataflow.hardware.chips import CHIPS, Network
from sparse_dataflow.planner import memory, plan_collectives, search
from sparse_dataflow.planner.efficiency import EFFICIENCIES, PRIOR, own_key
from sparse_dataflow.planner.memory import runs_fused
from sparse_dataflow.planner.parallel_plan import KEY_EXCHANGES, ParallelPlan
from sparse_dataflow.planner.plan_memory import plan_bytes
from sparse_dataflow.planner.step_time import step_time
from sparse_dataflow.runs.run_config import SIZES

MODEL = dataclasses.replace(SIZES["llama3-8b"], compute_dtype="bfloat16")
LONG = 2**17


def timed(plan, chip="tpu-v5p"):
    efficiency = EFFICIENCIES[own_key(CHIPS[chip].family)]
    return step_time(MODEL, LONG, plan, CHIPS[chip], efficiency)


def test_chips_that_share_a_sequence_share_its_tokens_and_the_state():
    how = {"zero": 3, "remat": "full", "tpu": True, "sequence_parallel": True}
    rows, tokens = ParallelPlan(fsdp=8, **how), ParallelPlan(context=8, **how)
    assert tokens.chips == rows.chips == 8 and tokens.batch == 1 and rows.batch == 8
    fsdp_bytes, context_bytes = (plan_bytes(MODEL, LONG, plan) for plan in (rows, tokens))
    for name in ("parameters", "moments", "gradients"):
        assert getattr(context_bytes, name) == getattr(fsdp_bytes, name)
    assert context_bytes.activations == pytest.approx(fsdp_bytes.activations / 8)
    # Keys and values of all tokens, and their gradients, beside an eighth of the rest.
    gathered = 2 * 2 * 8 * 128 * 2 * LONG
    apart = context_bytes.working_set - gathered
    state = plan_bytes(MODEL, 1, rows).working_set  # What does not depend on the tokens.
    assert apart - state == pytest.approx((fsdp_bytes.working_set - state) / 8, rel=1e-2)


def test_a_share_of_a_sequence_costs_its_share_of_the_products_and_a_gather():
    how = {"zero": 3, "remat": "full", "tpu": True}
    rows, tokens = timed(ParallelPlan(fsdp=8, **how)), timed(ParallelPlan(context=8, **how))
    for name in ("q", "attention", "mlp_in"):
        assert tokens.sections[name].flops == pytest.approx(rows.sections[name].flops / 8)
    assert rows.terms["context"] == 0
    # Three collectives in each of 32 layers, of keys and values of all tokens.
    size = 3 * 32 * LONG * 2 * 8 * 128 * 2 * 7 / 8
    rate = CHIPS["tpu-v5p"].network.fast
    assert size / rate / 4 < tokens.terms["context"] < 4 * size / rate


RING = Network(8, 300e9, 25e9, fast_latency=0.0, slow_latency=0.0)
EXACT = dataclasses.replace(PRIOR, fast_link=1.0, slow_link=1.0)


@pytest.mark.parametrize("context", [2, 4, 16])
@pytest.mark.parametrize("attention", [0.0, 1e-3, 1.0])
def test_a_ring_waits_for_what_attention_does_not_hide(context, attention):
    """In each of n - 1 steps for keys and values, and backward for these and their gradients."""
    tokens = 4096
    plan = ParallelPlan(context=context, key_exchange="ring")
    size = tokens * 2 * 8 * 128 * 2
    rate = 300e9 if context <= 8 else 25e9
    share = attention / context
    wait = max(size / rate - share, 0) + max(2 * size / rate - 2.5 * share, 0)
    waited = plan_collectives.context_seconds(MODEL, tokens, plan, RING, EXACT, attention, 3.5)
    assert float(waited) == pytest.approx((context - 1) * wait)


def test_gathered_keys_of_published_runs_have_fused_attention():
    """Which waits for a gather as this project's does, but does not compute scores in chunks."""
    chunks, gather, ring = (
        timed(ParallelPlan(context=8, zero=3, key_exchange=kind), "h100") for kind in KEY_EXCHANGES
    )
    rows = timed(ParallelPlan(fsdp=8, zero=3), "h100")
    for each in (gather, ring):
        seconds = each.sections["attention"].seconds
        assert seconds == pytest.approx(rows.sections["attention"].seconds / 8, rel=0.01)
    assert chunks.terms["context"] == gather.terms["context"] > ring.terms["context"]


def test_attention_over_context_is_not_cudnns():
    how = {"zero": 3, "remat": "full"}
    alone, shared = (
        timed(ParallelPlan(**{axis: 8}, **how), "h100") for axis in ("fsdp", "context")
    )
    assert shared.sections["attention"].seconds > 2 * alone.sections["attention"].seconds / 8


def test_the_search_shares_a_sequence_that_no_chip_has_memory_for():
    request = search.Request(MODEL, LONG, 1, CHIPS["tpu-v5p"], 8)
    priced = search.price(request)
    plan, _ = priced.ranked(1)[0]
    assert plan.context > 1 and plan.stage == 1 and plan.chips == 8
    short = search.space(dataclasses.replace(request, sequence=4096))
    assert short["context"] == (1,)


@pytest.mark.parametrize("remat", ["none", "keep", "full"])
@pytest.mark.parametrize("axis", ["tensor", "context", "feature"])
def test_an_axis_that_cuts_the_stream_makes_the_buffers_and_sends_of_a_stage_smaller(axis, remat):
    """By no more than its devices, as some arrays are gathered."""
    how = {"stage": 4, "accumulation": 8, "remat": remat, "tpu": True, "sequence_parallel": True}
    whole, cut = ParallelPlan(**how), ParallelPlan(**how, **{axis: 2})
    sizes = [float(plan_bytes(MODEL, LONG, plan).activations) for plan in (whole, cut)]
    assert sizes[0] / 2 * 0.999 <= sizes[1] < 0.8 * sizes[0]
    sends = [float(timed(plan).terms["sends"]) for plan in (whole, cut)]
    assert sends[0] / 2 * 0.999 <= sends[1] < 0.8 * sends[0]


def test_exchanged_tokens_share_no_sequence():
    request = search.Request(MODEL, LONG, 1, CHIPS["tpu-v5p"], 8)
    assert not search.violations(request, ParallelPlan(context=2, stage=4), 0)["context"]
    experts = dataclasses.replace(request, config=dataclasses.replace(MODEL, experts=8))
    assert not search.violations(experts, ParallelPlan(context=8), 0)["context"]
    exchanged = ParallelPlan(context=8, experts="exchange")
    assert search.violations(experts, exchanged, 0)["experts"]
    odd = dataclasses.replace(request, sequence=LONG + 8)
    assert search.violations(odd, ParallelPlan(context=8), 0)["context"]
    assert not search.violations(request, ParallelPlan(context=8), 0)["context"]


def test_scores_of_many_tokens_take_no_memory_without_a_kernel_either():
    sizes = [
        memory.activation_bytes(dataclasses.replace(MODEL, remat="none"), tokens).saved
        for tokens in (1024, 8192)
    ]
    assert sizes[0] - sizes[1] >= 32 * 1024 * (4 + 2)  # Scores and probabilities a token.


@pytest.mark.parametrize(
    ("chip", "changes", "fused"),
    [
        ("h100", {}, True),
        ("h100", {"attention_cap": 50.0}, False),
        ("h100", {"head_dim": 512}, False),
        ("h100", {"compute_dtype": "float32"}, False),
        ("tpu-v5p", {"attention_cap": 50.0, "compute_dtype": "float32"}, True),
        ("tpu-v5p", {"head_dim": 512}, False),
    ],
)
def test_attention_is_fused_where_its_kernel_takes_the_model(chip, changes, fused):
    assert runs_fused(dataclasses.replace(MODEL, **changes), CHIPS[chip]) is fused
    assert not runs_fused(MODEL, CHIPS[chip], host=True)


def test_cudnns_mask_of_documents_is_counted():
    packed = dataclasses.replace(MODEL, mask_documents=True)
    plans = [ParallelPlan(tpu=tpu, remat="full") for tpu in (False, True)]
    gpu, tpu = (plan_bytes(packed, 8192, plan).working_set for plan in plans)
    assert np.asarray(gpu - tpu) == 8192**2 * 2
