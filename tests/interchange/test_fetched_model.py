"""Initial weights at an address: what is read is fetched, and nothing else."""

from pathlib import Path

import jax
import numpy as np
import pytest
from object_store import object_store

from sparse_dataflow.data import cache
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import fetched_model, starting_point

LLAMA = Path(__file__).parent / "llama"


@pytest.fixture(scope="module")
def store():
    with object_store() as server:
        server.make_bucket("models")
        yield server


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "FOLDER", tmp_path / "cache")


def test_a_hugging_face_directory_at_an_address_gives_the_weights_of_a_local_one(store):
    for path in LLAMA.iterdir():
        if path.is_file():
            store.write("models", f"llama/{path.name}", path.read_bytes())
    store.write("models", "llama/pytorch_model.bin", b"0" * 1000)
    store.write("models", "llama/original/consolidated.pth", b"0" * 1000)
    local, remote = starting_point.read(str(LLAMA)), starting_point.read("s3://models/llama")
    assert remote.provenance == local.provenance | {"path": "s3://models/llama"}
    assert jax.tree.all(jax.tree.map(np.array_equal, remote.params, local.params))
    assert remote.tokenizer.content_hash == local.tokenizer.content_hash
    copies = [p.name for p in (cache.FOLDER / "fetched").rglob("*") if p.is_file()]
    assert "model.safetensors" in copies
    assert not {"pytorch_model.bin", "consolidated.pth"} & set(copies)
    again = starting_point.read_again(remote.provenance, "run", "train adapters of")
    assert again.provenance == remote.provenance


def test_an_address_without_a_model_is_refused_by_its_own_name(store):
    store.write("models", "empty/readme.txt", b"no model")
    with pytest.raises(UserError, match=r"^s3://models/empty is neither a run folder"):
        starting_point.read("s3://models/empty")
    with pytest.raises(UserError, match=r"^s3://models/none does not exist"):
        starting_point.run_config("s3://models/none")


def test_of_a_run_one_finished_checkpoint_of_each_model_is_fetched():
    names = {"config.json", "run.json", "tokenizer.json", "report.html", "sparse/metrics.jsonl"}
    for step in (3, 6, 12):
        names |= {f"sparse/checkpoints/{step}/{n}" for n in ("extra.json", "state/d/0")}
    names |= {f"sparse/checkpoints/{step}/manifest.json" for step in (3, 6)}
    whole = {"config.json", "run.json", "tokenizer.json"}
    at = lambda step: {n for n in names if n.startswith(f"sparse/checkpoints/{step}/")}  # noqa: E731
    assert set(fetched_model._needed(names, "newest")) == whole | at(6)
    assert set(fetched_model._needed(names, "3")) == whole | at(3)
