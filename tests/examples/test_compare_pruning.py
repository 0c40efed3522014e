"""The example that compares shapes of pruning finds that single weights cost least."""

import importlib.util
import json
import pathlib
import sys

import pytest

import sparse_dataflow as sd
from sparse_dataflow.data import cache

PATH = pathlib.Path(__file__).parents[2] / "examples" / "compare_pruning.py"
SEEDS = (0, 1)


@pytest.mark.slow
def test_shapes_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "FOLDER", tmp_path / "cache")
    monkeypatch.syspath_prepend(str(PATH.parent))
    monkeypatch.delitem(sys.modules, "prune_a_llama", raising=False)
    spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = tmp_path / "losses.json"
    shapes = (16, 1, "narrow")
    losses = module.main(
        out=str(out), shapes=shapes, rounds=(2,), seeds=SEEDS, texts=10, steps=30, recover=(0.1,)
    )  # fmt: skip
    assert json.loads(out.read_text())["losses"] == losses
    single, blocks = (sum(losses[s]["2"]) / len(SEEDS) - losses["dense"] for s in ("1", "16"))
    assert abs(single) < abs(blocks)
    before, after = (losses["narrow"][each] for each in ("2", "after 0.1"))
    assert sum(after) < sum(before)
    assert "sd" in vars(module) and module.sd is sd
