"""The example that prunes a Llama exports one that has learned."""

import importlib.util
import json

import pytest
from places import ROOT

import sparse_dataflow as sd
from sparse_dataflow.data import cache

PATH = ROOT / "examples" / "prune_a_llama.py"


@pytest.mark.slow
def test_a_llama_is_pruned_trained_and_exported(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "FOLDER", tmp_path / "cache")
    spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path, losses, dense_loss = module.main(folder=tmp_path, steps=12, texts=8)
    assert losses[-1] < losses[0] and dense_loss < losses[0]
    assert json.loads((path / "config.json").read_text())["model_type"] == "llama"
    exported = sd.load(path)
    assert exported.model.gated_mlp and exported.model.kv_heads == 1
    zeros = (exported.params["blocks"]["mlp_in"]["kernel"] == 0).mean()
    assert 0.7 < zeros < 0.8  # The blocks that are not stored.
