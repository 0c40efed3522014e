"""What studies share: models of one config with changes, and folders of one config."""

import json

import pytest

from experiments import sparse_scaling_law
from experiments.studies import study
from experiments.studies.activation_changes import with_width
from sparse_dataflow.commands import command_line
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import SIZES, preset
from sparse_dataflow.runs.variants import variant

PROJECTIONS = SIZES["nano"].projections

CONFIG = preset("pico")


@pytest.mark.parametrize("experiment", [sparse_scaling_law])
def test_every_default_model_has_layouts_and_heads_of_one_width(experiment):
    scale = experiment.DEFAULTS["scale"]
    config = preset(scale).change(sparsity__block=experiment.DEFAULTS["block"])
    options = experiment.Options()
    for width in options.widths:
        for density in options.densities:
            model = variant(config.change(sparsity__density=density), "sparse").model
            wide = with_width(model, width)
            assert wide.d_model // wide.num_heads == model.d_model // model.num_heads
            assert set(wide.sparse_projections) == set(PROJECTIONS)


def test_a_folder_goes_on_with_the_same_config_alone(tmp_path):
    study.keep_settings(tmp_path, CONFIG, "study")
    study.keep_settings(tmp_path, CONFIG, "study")
    other = CONFIG.change(training__batch=4, training__final_rate=0.0)
    with pytest.raises(UserError) as refused:
        study.keep_settings(tmp_path, other, "study")
    assert "--batch=4 (saved: 8), --set training.final_rate=0.0 (saved: 0.1)" in str(refused.value)


def test_a_setting_that_an_older_study_lacks_counts_as_its_default(tmp_path):
    study.keep_settings(tmp_path, CONFIG, "study")
    path = tmp_path / "settings.json"
    saved = json.loads(path.read_text())
    del saved["training"]["final_rate"]
    path.write_text(json.dumps(saved))
    study.keep_settings(tmp_path, CONFIG, "study")
    with pytest.raises(UserError, match=r"final_rate=0.0 \(saved: 0.1\)"):
        study.keep_settings(tmp_path, CONFIG.change(training__final_rate=0.0), "study")


def test_settings_that_are_no_object_are_damaged(tmp_path):
    study.keep_settings(tmp_path, CONFIG, "study")
    (tmp_path / "settings.json").write_text("3")
    with pytest.raises(UserError, match="damaged"):
        study.keep_settings(tmp_path, CONFIG, "study")


@pytest.mark.parametrize("path", ["training.seed=1", "parallel.zero=3", "sparsity.rank=2"])
def test_what_a_study_sets_itself_is_refused(path):
    argv = ["study", f"--set={path}"]
    [request] = command_line.arguments(argv, ("scale",), None)
    with pytest.raises(UserError, match=f"sets {path.partition('=')[0]} itself"):
        study.prepare(request, ["sparsity.rank"], {})
