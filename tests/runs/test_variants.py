"""The models of a run."""

import dataclasses

import pytest

from sparse_dataflow.core.config.depth import DepthSchedule
from sparse_dataflow.core.training.phases import mean_flops_per_token, run_flops
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.relay.relay import RelayConfig
from sparse_dataflow.relay.relay_executor import RelayExecutor
from sparse_dataflow.runs import equal_cost
from sparse_dataflow.runs.run_config import preset
from sparse_dataflow.runs.variants import variants


@pytest.mark.parametrize("changes", [{}, {"evolution__method": "sparse_to_dense"}])
@pytest.mark.parametrize("scale", ["pico", "3m", "nano"])
def test_the_narrow_model_is_dense_and_spends_the_sparse_models_flops(scale, changes):
    config = preset(scale).change(
        run__twin="narrow", sparsity__block=16, training__steps=100, **changes
    )
    sparse, dense, narrow = variants(config)
    assert [v.name for v in (sparse, dense, narrow)] == ["sparse", "dense", "narrow"]
    assert not narrow.model.sparse_projections and narrow.model.d_model < dense.model.d_model
    spent = [run_flops(v.model, v.evolution, v.training) for v in (sparse, narrow)]
    assert spent[1] == pytest.approx(spent[0], rel=equal_cost.TOLERANCE + 0.01)


SHARED = preset("pico").change(
    evolution__method="shared_to_own", sparsity__block=16, training__steps=100
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sparsity__pattern": "random"}, "pattern random gives each .*legal: .* such as monarch"),
        ({"sparsity__budget": "depth:2x,1x"}, "legal: another sparsity.budget"),
        ({"run__init_from": "folder"}, "which begins with one layer; legal with it: none"),
    ],
)
def test_layers_that_cannot_share_a_block_are_refused(changes, words):
    with pytest.raises(UserError, match=f"shared_to_own.*{words}"):
        variants(SHARED.change(**changes))


def test_executors_without_all_layers_refuse_a_shared_block():
    model = variants(SHARED)[0].phases[0].model
    training = SHARED.without_auto().training
    executor = RelayExecutor(RelayConfig(depth=DepthSchedule("drop", 0.5)))
    with pytest.raises(UserError, match=r"shared_to_own .*; legal: .*depth_schedule=constant"):
        executor.check(model, training)
    executor.check(dataclasses.replace(model, shared_layers=False), training)


def test_a_dense_model_shares_its_block_and_a_dense_twin_does_not():
    alone, *_ = variants(SHARED.change(sparsity__projections=(), run__twin="no"))
    sparse, twin = variants(SHARED)
    assert [v.phases[0].model.shared_layers for v in (alone, sparse, twin)] == [True, True, False]
    flops = [mean_flops_per_token(v.model, v.evolution, 64) for v in (alone, twin)]
    assert flops[0] == flops[1]
