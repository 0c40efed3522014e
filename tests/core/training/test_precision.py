"""Training with fp8 and int8 products: loss, exact resumption, what stays wide, refusals."""

import dataclasses
import functools
import importlib.util
import sys

import jax
import numpy as np
import pytest
from marks import some
from small_models import fixed, tables_of

import sparse_dataflow as sd
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.training.saved_state import SavedState
from sparse_dataflow.core.training.step import abstract_state, initial_state, make_train_step
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.variants import variants

needs_library = pytest.mark.skipif(
    not importlib.util.find_spec("qwix"), reason="quantised products need the extra quantized"
)

STEPS = 60
MODEL = ModelConfig(2, 32, 4, 64, vocab_size=48, max_len=8).with_linears(
    LinearSpec("block_sparse", "monarch", density=0.5, block=8), ["qkv", "mlp_in", "mlp_out"]
)
TRAINING = TrainingConfig(steps=STEPS, batch=4, sequence=8)
# Each sequence counts up with its own increment.
TOKENS = np.arange(4 * STEPS, dtype=np.int32).reshape(STEPS, 4, 1) * 7
TOKENS = (TOKENS + np.arange(9, dtype=np.int32) * np.arange(1, 5, dtype=np.int32)[:, None]) % 48


def model_of(precision):
    return dataclasses.replace(MODEL, precision=precision)


@functools.cache
def program(precision):
    """(layout tables, jitted step)."""
    tables = tables_of(MODEL)
    return tables, jax.jit(make_train_step(model_of(precision), TRAINING))


def trained(precision, steps, state=None):
    """Trains up to step `steps`, from `state` or the initial one; returns (state, losses)."""
    tables, step = program(precision)
    state = initial_state(model_of(precision), TRAINING) if state is None else state
    state, losses = state._replace(rest=fixed(tables)), []
    for windows in TOKENS[int(state.step) : steps]:
        state, report = step(state, Batch.from_windows(windows), np.float32(3e-3))
        losses.append(float(report.loss))
    return state._replace(rest=tables), losses


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", pytest.param("fp8", marks=pytest.mark.nightly)])
def test_losses_stay_within_five_percent_of_float32_over_60_steps(precision):
    mine, right = trained(precision, STEPS)[1], trained("compute_dtype", STEPS)[1]
    np.testing.assert_allclose(mine, right, rtol=0.05)
    assert right[-1] < 0.7 * right[0]
    assert mine[5:] != right[5:]


@needs_library
@pytest.mark.parametrize("precision", some(["fp8", "int8"], "fp8"))
def test_a_restored_training_goes_on_to_the_same_bits(precision, tmp_path):
    straight, losses = trained(precision, 8)
    half, _ = trained(precision, 4)
    with Checkpoints(tmp_path, config={}) as checkpoints:
        checkpoints.save(4, SavedState.of(half), {})
    shapes = abstract_state(model_of(precision), TRAINING)
    target = SavedState.of(shapes._replace(rest=half.rest))
    restored, _ = Checkpoints(tmp_path, config={}).restore(target)
    resumed, rest = trained(precision, 8, restored.state(model_of(precision)))
    assert rest == losses[4:]
    for mine, right in zip(jax.tree.leaves(resumed.params), jax.tree.leaves(straight.params)):
        assert mine.dtype == np.float32
        np.testing.assert_array_equal(mine, right)


CONFIG = sd.preset("pico").change(sparsity__block=8, training__steps=2, model__precision="fp8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sparsity__pattern": "random"},
            "random has none in .*; legal: .*pattern=monarch or",
        ),
        ({"evolution__method": "rigl"}, "known before training.*--evolution=static"),
        ({"evolution__method": "gradual"}, "known before training"),
        (
            {"model__precision": "fp4"},
            "model.precision=fp4 is unknown. Legal: compute_dtype, fp8, int8",
        ),
    ],
)
def test_what_is_not_quantised_is_refused_before_training(changes, message):
    with pytest.raises(UserError, match=message):
        variants(CONFIG.change(**changes))


@pytest.mark.parametrize("method", ["static", "sparse_to_dense"])
def test_all_models_of_a_run_have_its_precision(method):
    models = variants(CONFIG.change(evolution__method=method, run__twin="narrow"))
    assert [v.name for v in models] == ["sparse", "dense", "narrow"]
    for v in models:
        assert {spec.model.precision for spec in v.phase_specs} == {"fp8"}


def test_a_run_without_the_library_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    config = CONFIG.change(run__out=str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"pip install 'sparse_dataflow\[quantized\]'"):
        sd.train(config, texts=["A document. " * 99] * 40)
    assert not (tmp_path / "run" / "config.json").exists()


@needs_library
@pytest.mark.slow
def test_a_run_says_that_it_is_emulated_and_its_model_multiplies_in_float32(
    tmp_path, capsys, monkeypatch
):
    texts = [f"Document {number} has a few words. " * 60 for number in range(40)]
    run = sd.train(CONFIG.change(run__out=str(tmp_path / "run"), run__twin="no"), texts=texts)
    assert run.finished
    assert "emulated, which is slower than without" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "qwix", None)
    model = run.model()
    assert model.model.precision == "compute_dtype"
    assert len(sd.generate(model, ["Document"], max_new_tokens=2)) == 1
