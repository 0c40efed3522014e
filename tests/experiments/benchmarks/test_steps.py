"""Which steps of `step_bench` may hold their states at once."""

from experiments.benchmarks import steps
from sparse_dataflow.hardware.chips import GIB
from sparse_dataflow.runs.run_config import preset
from sparse_dataflow.runs.variants import variant


def test_two_states_that_fit_only_one_by_one_are_measured_one_by_one():
    config = preset("13b", compute_dtype="bfloat16").change(
        training__batch=1, training__state_dtype="bfloat16", model__remat="full"
    )
    config = config.without_auto()
    models, training = [variant(config, n).model for n in ("dense", "sparse")], config.training
    assert not steps.fit_together(models, training, 139 * GIB)
    assert all(steps.fit_together([model], training, 139 * GIB) for model in models)
    assert steps.fit_together(models, training, 200 * GIB)
    assert steps.fit_together(models, training, None)
