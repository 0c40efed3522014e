"""Models load from run folders as they were saved, or the error names the cause."""

import json

import jax
import numpy as np
import pytest
from marks import some

import sparse_dataflow as sd
from sparse_dataflow.core.model.stacks import split_layouts
from sparse_dataflow.evaluation.trained import load
from sparse_dataflow.files.errors import UserError


@pytest.mark.parametrize("variant", some(["sparse", "dense"], "sparse"))
@pytest.mark.parametrize(
    ("name", "step"), some([("newest", 3), ("best", 2), ("1", 1)], "newest", "best")
)
def test_the_loaded_model_equals_the_saved_model(
    run_folder, models, tokenizer, variant, name, step
):
    before = sorted(run_folder.path.rglob("*"))
    trained = load(run_folder.path, variant, name)
    assert sorted(run_folder.path.rglob("*")) == before
    assert (trained.step, trained.variant, trained.model) == (step, variant, models[variant])
    assert trained.tokenizer.content_hash == tokenizer.content_hash
    state = run_folder.states[variant, step]
    jax.tree.map(np.testing.assert_array_equal, trained.params, state.merged)
    # Programs are specialised to concrete tables.
    layouts = split_layouts(trained.params)[1]
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(layouts))


def test_a_damaged_checkpoint_falls_back_to_the_previous_one(run_folder):
    path = next((run_folder.path / "sparse/checkpoints/3/state").rglob("d/*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert load(run_folder.path, "sparse").step == 2
    with pytest.raises(UserError, match=r"step 3 .* is damaged"):
        load(run_folder.path, "sparse", "3")


def load_error(run_folder, variant="sparse", checkpoint="newest"):
    with pytest.raises(UserError) as error:
        load(run_folder.path, variant, checkpoint)
    return str(error.value)


def test_a_missing_run_raises(tmp_path):
    with pytest.raises(UserError, match=r"not a run folder: it has no config\.json"):
        load(tmp_path, "sparse")


@pytest.mark.parametrize("kind", ["gpt2", "sparse_dataflow"])
def test_an_exported_model_is_named(tmp_path, kind):
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    with pytest.raises(UserError, match=r"exported model .* not a run .*--init_from="):
        load(tmp_path, "sparse")


def test_a_missing_variant_or_checkpoint_raises_with_the_legal_names(run_folder):
    assert "sparse, dense" in load_error(run_folder, "spares")
    assert "legal: newest, best" in load_error(run_folder, checkpoint="last")
    assert "it has: 1, 2, 3" in load_error(run_folder, checkpoint="7")
    (run_folder.path / "sparse/checkpoints").rename(run_folder.path / "moved")
    assert "no checkpoint of sparse yet" in load_error(run_folder)


def test_a_wrong_damaged_or_missing_tokenizer_raises(run_folder):
    path = run_folder.path / "tokenizer.json"
    fields = json.loads(path.read_text())
    fields["merges"].reverse()
    path.write_text(json.dumps(fields))
    assert "not the tokenizer that the run was trained with" in load_error(run_folder)
    path.write_text("{")
    assert "cannot be read" in load_error(run_folder)
    path.unlink()
    assert "has no tokenizer.json" in load_error(run_folder)


@pytest.mark.parametrize(
    "content", some(["{", "[]", '{"model": {}}', '{"model": {"d_model": 1}}'], "{", '{"model": {}}')
)
def test_a_damaged_config_raises(run_folder, content):
    (run_folder.path / "config.json").write_text(content)
    assert "config.json is damaged" in load_error(run_folder)


def test_a_run_of_an_older_version_raises(run_folder):
    (run_folder.path / "config.json").write_text('{"flags": {}, "variants": {}}')
    assert "older sparse_dataflow" in load_error(run_folder)


def test_a_model_prints_shapes_and_layouts_but_no_numbers():
    model = sd.init(sd.preset("pico"), jax.random.key(0))
    lines = repr(model).splitlines()
    assert lines[0] == "Model(sparse, step 0, Tokenizer(257 tokens, vocab_size=512)"
    words = "128 x 128, 8 of 64 blocks of 16, density 0.125"
    assert f"  blocks/attn_out/values=f32[2,8,16,16]: {words}" in lines
    assert "  head/norm/bias=f32[128]" in lines and lines[-1] == ")"
    assert len(lines) == len(jax.tree.leaves(model)) + 2
    shape = "LayoutTables(in_index=(2, 8, 1), in_slot=(2, 8, 1), out_index=(2, 8, 1), "
    assert repr(model.params["blocks"]["attn_out"]["layout"]) == shape + "out_slot=(2, 8, 1))"
    abstract = jax.eval_shape(lambda: model)
    assert repr(abstract).splitlines()[1:] == lines[1:]


@pytest.mark.parametrize(
    "leaf", [lambda x: True, lambda x: {"values": x}, lambda x: x[0], lambda x: (x, None), id]
)
def test_whatever_a_map_leaves_in_a_model_prints(leaf):
    model = sd.init(sd.preset("pico"), jax.random.key(0))
    assert repr(jax.tree.map(leaf, model)).startswith("Model(sparse")
