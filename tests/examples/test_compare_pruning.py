"""The example that compares shapes of pruning finds that single weights cost least."""

import importlib.util
import json
import sys

import jax
import numpy as np
import pytest
from places import ROOT

import sparse_dataflow as sd
from sparse_dataflow.data import cache

PATH = ROOT / "examples" / "compare_pruning.py"
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


@pytest.mark.slow
def test_rows_of_ids_take_the_place_of_texts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(PATH.parent))
    spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = sd.preset("pico").dense().change(model__num_layers=1, model__vocab_size=257)
    model = sd.init(config, jax.random.key(0))
    ids = np.random.default_rng(0).integers(0, 256, (20, 16)).tolist()
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(ids))
    losses = module.main(
        model=str(sd.save(model, tmp_path / "model")), ids=str(path), shapes=("narrow",),
        rounds=(1,), seeds=(0,), sequences=16, tested=4,
    )  # fmt: skip
    assert losses["dense"] == pytest.approx(float(sd.loss(model, np.asarray(ids[:4]))), abs=1e-4)
    pruned = sd.prune(
        model, np.array_split(np.random.default_rng(0).permutation(ids[4:]), 8), block="narrow",
        rounds=1,
    )  # fmt: skip
    expected = float(sd.loss(pruned.model, np.asarray(ids[:4])))
    assert losses["narrow"] == {"1": [pytest.approx(expected, abs=1e-4)]}
