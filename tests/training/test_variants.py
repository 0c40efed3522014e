"""The models of a run."""

import pytest

from sparse_dataflow.config.presets import preset
from sparse_dataflow.planning import equal_cost
from sparse_dataflow.training.phases import run_flops
from sparse_dataflow.training.variants import variants


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
