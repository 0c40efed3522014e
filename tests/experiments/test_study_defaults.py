"""What the studies of several widths train when no flag is given."""

import types

import pytest

from experiments import coordinate_check, sparse_scaling_law
from experiments.coordinates import numbers
from experiments.recipes import sparse_config
from experiments.study import _DEFAULTS
from sparse_dataflow.models.sizes import SIZES
from sparse_dataflow.training.coordinates import widened


@pytest.mark.parametrize("experiment", [coordinate_check, sparse_scaling_law])
def test_every_model_has_layouts_and_heads_of_one_width(experiment):
    asked = {flag.name: flag.default for group in experiment.GROUPS for flag in group.flags}
    projections = ("qkv", "attn_out", "mlp_in", "mlp_out")
    size = SIZES[asked["scale"]]
    for width in numbers(asked["widths"], "widths", int):
        for density in numbers(asked["densities"], "densities"):
            flags = _DEFAULTS | asked | {"density": density, "sparse_projections": projections}
            wide = widened(sparse_config(types.SimpleNamespace(**flags), size), width)
            assert wide.d_model // wide.num_heads == size.d_model // size.num_heads
            assert set(wide.sparse_projections) == set(projections)
