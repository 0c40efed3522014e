"""The reader for PyTorch that is written into the sparse form gives our logits and texts."""

import importlib.util

import jax
import numpy as np
import pytest
from marks import some
from models import READABLE, export
from test_masked_form import SPECS, TOKENS, drawn

import sparse_dataflow as sd
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model.stacks import weights_of

torch = pytest.importorskip("torch")


def reader(folder):
    """Returns the model that the reader in a folder makes, as another program would."""
    spec = importlib.util.spec_from_file_location("run_in_torch", folder / "run_in_torch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Model(folder)


@pytest.mark.parametrize("config", some(READABLE, *READABLE))
def test_logits_are_ours(tmp_path, config):
    params, tables = export(tmp_path / "model", "sparse", config)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, config.max_len))
    ours = whole.logits(config, weights_of(config, params, tables), ids.astype(np.int32))
    with torch.no_grad():
        theirs = reader(tmp_path / "model")(torch.tensor(ids))
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", SPECS)
def test_logits_of_masked_weights_are_ours(name, tmp_path):
    model = drawn(SPECS[name])
    with torch.no_grad():
        theirs = reader(sd.save(model, tmp_path / "model"))(torch.tensor(TOKENS))
    np.testing.assert_allclose(theirs, sd.logits(model, TOKENS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("pattern", ["monarch", "random", "butterfly"])
def test_greedy_text_is_ours(pattern, tmp_path):
    """Which reads the cache of keys and values."""
    config = sd.preset("pico").change(sparsity__block=16, sparsity__pattern=pattern)
    model = sd.init(config, jax.random.key(1))
    prompt = [5, 8, 300, 7]
    [ours] = sd.generate(model, [prompt], max_new_tokens=9)
    theirs = reader(sd.save(model, tmp_path / "model")).generate(torch.tensor([prompt] * 2), 9)
    assert theirs.tolist() == [ours.tokens] * 2
