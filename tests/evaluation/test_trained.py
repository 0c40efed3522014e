"""A model comes back from its run folder as it was saved, or what is wrong is said in words."""

import json

import jax
import numpy as np
import pytest

from sparse_dataflow.evaluation.trained import load
from sparse_dataflow.files.errors import UserError


@pytest.mark.parametrize("variant", ["sparse", "dense"])
@pytest.mark.parametrize(("name", "step"), [("newest", 3), ("best", 2), ("1", 1)])
def test_the_model_is_the_saved_one(run_folder, models, tokenizer, variant, name, step):
    before = sorted(run_folder.path.rglob("*"))
    trained = load(run_folder.path, variant, name)
    assert sorted(run_folder.path.rglob("*")) == before
    assert (trained.step, trained.variant, trained.model) == (step, variant, models[variant])
    assert trained.tokenizer.content_hash == tokenizer.content_hash
    state = run_folder.states[variant, step]
    jax.tree.map(np.testing.assert_array_equal, trained.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, trained.tables, state.tables)
    # Concrete tables are what programs are specialised to.
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(trained.tables))


def test_a_damaged_checkpoint_gives_way_to_the_one_before(run_folder):
    path = next((run_folder.path / "sparse/checkpoints/3/state").rglob("d/*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert load(run_folder.path, "sparse").step == 2
    with pytest.raises(UserError, match=r"step 3 .* is damaged"):
        load(run_folder.path, "sparse", "3")


def complaint(run_folder, variant="sparse", checkpoint="newest"):
    with pytest.raises(UserError) as refused:
        load(run_folder.path, variant, checkpoint)
    return str(refused.value)


def test_no_such_run(tmp_path):
    with pytest.raises(UserError, match=r"not a run folder: it has no config\.json"):
        load(tmp_path, "sparse")


def test_no_such_variant_or_checkpoint(run_folder):
    assert "it has: sparse, dense" in complaint(run_folder, "spares")
    assert "legal: newest, best" in complaint(run_folder, checkpoint="last")
    assert "it has: 1, 2, 3" in complaint(run_folder, checkpoint="7")
    (run_folder.path / "sparse/checkpoints").rename(run_folder.path / "elsewhere")
    assert "no checkpoint of sparse yet" in complaint(run_folder)


def test_tokenizers_that_do_not_fit(run_folder):
    path = run_folder.path / "tokenizer.json"
    fields = json.loads(path.read_text())
    fields["merges"].reverse()
    path.write_text(json.dumps(fields))
    assert "not the tokenizer that the run was trained with" in complaint(run_folder)
    path.write_text("{")
    assert "cannot be read" in complaint(run_folder)
    path.unlink()
    assert "has no tokenizer.json" in complaint(run_folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {}}', '{"model": {"d_model": 1}}'])
def test_damaged_configs(run_folder, content):
    (run_folder.path / "config.json").write_text(content)
    assert "config.json is damaged" in complaint(run_folder)


def test_a_run_of_an_older_version_is_named(run_folder):
    (run_folder.path / "config.json").write_text('{"flags": {}, "variants": {}}')
    assert "older sparse_dataflow" in complaint(run_folder)
