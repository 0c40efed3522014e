"""The axis "feature" has the collectives of the planner's formula."""

import collections

import pytest
from compared import executor_run
from executor_runs import BATCH, MODELS, SEQUENCE

from sparse_dataflow.core.config.projections import ROW_PARALLEL
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
