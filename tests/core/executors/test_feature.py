"""The axis "feature" has the collectives of the planner's formula."""

import collections

import numpy as np
import pytest
from compared import executor_run
from executor_runs import BATCH, MODELS, SEQUENCE
from jax.sharding import AbstractMesh

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import ROW_PARALLEL, LinearSpec
from sparse_dataflow.core.executors import residual_stream
from sparse_dataflow.planner import collectives


@pytest.mark.slow
@pytest.mark.parametrize("model", ["sparse_gated", "sparse_gated_full"])
def test_the_step_gathers_and_reduce_scatters_what_the_formula_says(model):
    """Arrays of other steps than the layers' are those of the embedding and of the output layer."""
    text, config, tensor, feature = "feature:4,tensor:2/0/1", MODELS[model], 2, 4
    expected, tokens = collections.Counter(), BATCH * SEQUENCE
    size, arrays = collectives.layer_gathers(config, tokens, tensor, feature)
    remat = config.remat == "full"
    for kind in ("all-gather", "reduce-scatter"):
        # Recomputed: both inputs are gathered again, and attn_out's output is reduced again.
        again = {"all-gather": 2, "reduce-scatter": 1}[kind] * remat
        expected[kind, tensor, size] += config.num_layers * (4 + again)
        for name, array in arrays.items():
            again = remat and (name in ROW_PARALLEL) == (kind == "all-gather")
            expected[kind, feature, array] += config.num_layers * (1 + again)
        whole = 4 * tokens * config.d_model
        expected[kind, tensor, whole] += 2
        expected[kind, feature, whole / tensor] += 2
    [steps] = executor_run("collectives", model, text).values()
    sharing = [step for step in steps if step[0] != "all-reduce"]
    assert {(kind, group, size): times for kind, group, size, times in sharing} == expected


@pytest.mark.parametrize(("block", "devices"), [(4, 2), (8, 4), (16, 2)])
def test_each_device_has_an_equal_part_of_every_run(block, devices):
    spec = LinearSpec("block_sparse", "monarch", 0.5, block)
    model = ModelConfig(1, 32, 2, 64, vocab_size=40, max_len=8).with_linears(spec)
    order = residual_stream.order(model, AbstractMesh((devices,), ("feature",)))
    runs = order.reshape(devices, 32 // block, block // devices)
    first = block * np.arange(32 // block)[:, None] + np.arange(block // devices)
    for device, features in enumerate(runs):
        np.testing.assert_array_equal(features, first + device * block // devices)
