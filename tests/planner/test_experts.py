"""Counts of mixtures of experts: stored parameters, active FLOPs, bytes that decoding reads."""

import dataclasses
import math

import jax
import pytest

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.training import cost
from sparse_dataflow.planner import memory
from sparse_dataflow.planner.decoding import decoding_bytes
from sparse_dataflow.runs.equal_cost import stored_parameters

DENSE = ModelConfig(2, 32, 2, 64, vocab_size=64, max_len=16)
MIXTURE = dataclasses.replace(DENSE, experts=4, top_k=2)
SPARSE = LinearSpec("block_sparse", "monarch", density=0.25, block=8)


@pytest.mark.parametrize(
    "model",
    [
        MIXTURE,
        dataclasses.replace(MIXTURE, shared_expert=True, gated_mlp=True, biases=("mlp_in",)),
        dataclasses.replace(MIXTURE, prototypes=2, shared_expert=True).with_linears(SPARSE),
    ],
)
def test_parameter_count_is_that_of_the_initial_parameters(model):
    shapes = jax.eval_shape(lambda: gpt.init(model, jax.random.key(0)))
    assert cost.parameter_count(model) == sum(
        math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)
    )
    matrices = [
        math.prod(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
        if path[-1].key in ("kernel", "values")
    ]
    assert memory.matrix_count(model) == stored_parameters(model) == sum(matrices)


def test_flops_are_those_of_the_experts_of_a_token():
    """Two experts of half the width cost what the MLP costs, besides the router."""
    half = dataclasses.replace(MIXTURE, d_ff=DENSE.d_ff // 2)
    dense, mixture = (cost.flops_per_token(model, 16).sections for model in (DENSE, half))
    router = 3 * 2 * DENSE.num_layers * DENSE.d_model * MIXTURE.experts
    assert mixture == {**dense, "router": router}
    shared = cost.flops_per_token(dataclasses.replace(half, shared_expert=True), 16).sections
    assert shared["mlp_in"] == 1.5 * dense["mlp_in"]
    by_group = dataclasses.replace(MIXTURE, prototypes=2)
    assert by_group.active_experts == 4


def test_orthogonalization_counts_every_expert():
    more = dataclasses.replace(MIXTURE, experts=8)
    counts = [cost.orthogonalization_flops(model) for model in (DENSE, MIXTURE, more)]
    assert counts[2] - counts[1] == pytest.approx(4 / 3 * (counts[1] - counts[0]))


def test_decoding_reads_the_chosen_experts():
    """Until the rows of a batch have all experts."""
    first, second, many = (decoding_bytes(MIXTURE, batch, 0) for batch in (1, 2, 9))
    mlp = 2 * (2 * 32 * 64 + 32 + 64) * 4
    assert second - first == pytest.approx(2 * mlp) and many == second
