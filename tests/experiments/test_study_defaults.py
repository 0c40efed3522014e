"""What the studies of several widths train when no flag is given."""

import types

import pytest
from experiments.recipes import sparse_config

from experiments import coordinate_check, sparse_scaling_law
from experiments.coordinates import numbers
from experiments.study import _DEFAULTS, keep_settings
from sparse_dataflow.config.presets import SIZES
from sparse_dataflow.files import folders
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.training.coordinates import with_width


@pytest.mark.parametrize("experiment", [coordinate_check, sparse_scaling_law])
def test_every_model_has_layouts_and_heads_of_one_width(experiment):
    asked = {flag.name: flag.default for group in experiment.GROUPS for flag in group.flags}
    projections = ("qkv", "attn_out", "mlp_in", "mlp_out")
    size = SIZES[asked["scale"]]
    for width in numbers(asked["widths"], "widths", int):
        for density in numbers(asked["densities"], "densities"):
            flags = _DEFAULTS | asked | {"density": density, "sparse_projections": projections}
            wide = with_width(sparse_config(types.SimpleNamespace(**flags), size), width)
            assert wide.d_model // wide.num_heads == size.d_model // size.num_heads
            assert set(wide.sparse_projections) == set(projections)


def test_a_folder_from_before_a_flag_goes_on_at_its_default_alone(tmp_path):
    keep_settings(tmp_path, {"scale": "pico"}, "study")
    keep_settings(tmp_path, {"scale": "pico", "final_rate": _DEFAULTS["final_rate"]}, "study")
    with pytest.raises(UserError, match=r"other flags: --final_rate=0.0 \(saved: 0.1\)"):
        keep_settings(tmp_path, {"scale": "pico", "final_rate": 0.0}, "study")


def test_a_number_is_no_settings(tmp_path):
    folders.claim(tmp_path, "study")
    (tmp_path / "settings.json").write_text("3")
    with pytest.raises(UserError, match="damaged"):
        keep_settings(tmp_path, {"scale": "pico"}, "study")
