"""Parallel plans of mixtures of experts: time, memory and the search."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors.sharded import Sharded
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.step import abstract_state
from sparse_dataflow.hardware import chips
from sparse_dataflow.planner import collectives, plan_memory, search, step_time
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.runs.parallel import EXPERTS

MODEL = ModelConfig(4, 1024, 16, 4096, 32768, 1024, experts=8, top_k=2, compute_dtype="bfloat16")
DROPPING = dataclasses.replace(MODEL, expert_capacity=1.0)
STORED = LinearSpec("block_sparse", "monarch", density=0.25, block=64)
CHIP = chips.lookup("h100")


def time(model, plan):
    request = search.Request(model, model.max_len, int(plan.batch), CHIP, int(plan.chips))
    return request.time(plan)


@pytest.mark.parametrize("model", [MODEL, dataclasses.replace(MODEL, shared_expert=True)])
def test_products_have_the_flops_of_the_experts_of_a_token(model):
    sections = time(model, ParallelPlan(micro_batch=2)).sections
    flops = cost.flops_per_token(model, model.max_len, training=False).sections
    for name in ("mlp_in", "mlp_out", "router", "qkv"):
        per_token = sections[name].flops / (2 * model.max_len)
        assert per_token == pytest.approx(flops[name] / model.num_layers)


def test_tokens_that_travel_cost_all_to_alls_and_save_gathers():
    how = {"fsdp": 8, "zero": 3, "micro_batch": 1}
    gather, exchange = (time(DROPPING, ParallelPlan(experts=e, **how)) for e in EXPERTS)
    assert "exchange" not in gather.terms and exchange.terms["exchange"] > 0
    assert exchange.terms["state"] < gather.terms["state"]
    dropless = time(MODEL, ParallelPlan(experts="exchange", **how))
    assert dropless.terms["exchange"] > 2 * exchange.terms["exchange"]


@given(st.integers(1, 9), st.sampled_from([1, 2, 4, 8]))
def test_all_to_alls_carry_each_choice_once_if_no_expert_has_more_than_the_mean(rows, devices):
    tokens = 4 * rows
    plan = ParallelPlan(fsdp=devices, experts="exchange")
    size = collectives.exchange_bytes(DROPPING, tokens, plan)
    assert size == tokens * DROPPING.top_k * DROPPING.d_model * 2


@pytest.mark.parametrize("capacity", [0.0, 1.0, 2.0])
@pytest.mark.parametrize(("expert", "tensor"), [(2, 1), (4, 2), (8, 1)])
def test_without_buffers_the_rows_that_tokens_choose_travel(capacity, expert, tensor):
    model = dataclasses.replace(MODEL, expert_capacity=capacity)
    plan = ParallelPlan(fsdp=16, expert=expert, tensor=tensor, experts="dropless", zero=1)
    # Two of eight experts for each of 512 tokens, a part of them from each chip of "tensor".
    assert collectives.exchange_bytes(model, 512, plan) == 2 * 512 * 1024 * 2 / tensor
    rows, weights = step_time.computed_rows(model, 512, plan)
    assert (rows, weights) == (2 * 512, 8 / expert)
    padded = dataclasses.replace(plan, experts="exchange", expert=None)
    assert step_time.computed_rows(MODEL, 512, padded)[0] > 4 * rows


def test_an_axis_of_experts_keeps_the_exchange_in_a_node():
    """Its chips are some of those with other rows; the others sum gradients of the same experts."""
    how = {"fsdp": 32, "zero": 1, "experts": "dropless"}
    near, far = (time(MODEL, ParallelPlan(expert=n, **how)) for n in (8, 32))
    assert near.terms["exchange"] < far.terms["exchange"] / 5
    assert near.terms["state"] > far.terms["state"]
    same = time(MODEL, ParallelPlan(**how))
    assert same.terms["exchange"] == far.terms["exchange"]


@pytest.mark.parametrize("model", [MODEL, MODEL.with_linears(STORED)])
@pytest.mark.parametrize(("fsdp", "tensor", "zero"), [(4, 1, 3), (2, 2, 3), (8, 1, 1)])
def test_state_of_a_plan_is_that_of_the_executor(model, fsdp, tensor, zero):
    plan = ParallelPlan(fsdp=fsdp, tensor=tensor, zero=zero)
    sizes = dict.fromkeys(meshes.AXES, 1) | {"fsdp": fsdp, "tensor": tensor}
    executor = Sharded(AbstractMesh(tuple(sizes.values()), tuple(sizes)), zero)
    state = abstract_state(model, TrainingConfig(1, 8, 64), executor)
    local = sum(
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * 4 for leaf in jax.tree.leaves(state.params)
    )
    estimate = plan_memory.plan_bytes(model, 64, plan)
    assert float(estimate.parameters) == pytest.approx(local, rel=0.02)


def test_search_chooses_what_travels():
    """Weights of many large experts have more bytes than tokens; few and small ones have less."""
    many = dataclasses.replace(DROPPING, experts=64, d_ff=16384)
    few = dataclasses.replace(MODEL, experts=2, top_k=1, d_ff=256)
    island = dataclasses.replace(CHIP, network=dataclasses.replace(CHIP.network, island=1))
    for model, best in ((many, "exchange"), (few, "gather")):
        priced = search.price(search.Request(model, 1024, 64, island, 64))
        [(plan, _)] = priced.ranked(1)
        assert plan.experts == best
        assert not plan.exchanges or (plan.zero == 3 and model.experts % plan.fsdp == 0)
        legal = priced.legal[..., priced.levels["experts"].index("exchange")]
        assert not legal[..., priced.levels["zero"].index(1), :].any()
