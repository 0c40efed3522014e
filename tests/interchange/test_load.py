"""Directories and exports are loaded, generate text and begin runs with their own sparsity."""

import dataclasses

import jax
import numpy as np
import pytest
from make_fixture import BYTES, FOLDERS
from marks import some
from models import DENSE, DEPTH, SPARSE, change_tensors, export, logits
from safetensors.numpy import load_file

import sparse_dataflow as sd
from sparse_dataflow.commands.models import load_model
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import starting_point
from sparse_dataflow.interchange.architectures import ARCHITECTURES
from sparse_dataflow.runs.families import FAMILIES
from sparse_dataflow.runs.variants import variant

LLAMA = dataclasses.replace(DENSE, **FAMILIES["llama"], num_kv_heads=2)
SPECS = {
    "uniform": SPARSE,
    "by depth": dataclasses.replace(SPARSE, density_by_depth=(2.0, 1.0)),
    "by projection": SPARSE.with_linears(
        LinearSpec("block_sparse", "monarch", 0.25, 8), ("mlp_in", "mlp_out")
    ),
    "some projections": DENSE.with_linears(
        LinearSpec("block_sparse", "random", 0.5, 8, rank=2, hadamard=4), ("qkv", "mlp_in")
    ),
    "llama": LLAMA.with_linears(LinearSpec("block_sparse", "cyclic", 0.5, 8)),
}


@pytest.mark.parametrize("name", some([*ARCHITECTURES], "gpt2"))
def test_a_directory_generates_the_greedy_tokens_of_its_logits(name):
    model = sd.load(FOLDERS[name])
    assert model.variant == "dense" and model.step == 0 and model.record is None
    prompt = model.tokenizer.encode("hello").tolist()
    [continuation] = sd.generate(model, [prompt], max_new_tokens=6)
    ids = list(prompt)
    for _ in continuation.tokens:
        padded = np.zeros((1, 16), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(logits(model.model, model.params, {}, padded)[0, len(ids) - 1].argmax()))
    assert ids[len(prompt) :] == continuation.tokens


@pytest.mark.parametrize(("form", "variant"), [("dense", "dense"), ("sparse", "sparse")])
def test_an_export_is_loaded_as_it_is(tmp_path, form, variant):
    params, tables = export(tmp_path / "model", form, SPARSE)
    model = load_model.load(load_model.ModelOptions(run=str(tmp_path / "model")))
    assert model.variant == variant and model.context == 16 and model.tokenizer == BYTES
    ids = np.random.default_rng(0).integers(0, BYTES.vocab_size, (2, 16), np.int32)
    np.testing.assert_allclose(
        logits(model.model, model.params, (), ids),
        logits(SPARSE, params, tables, ids),
        atol=1e-4,
    )


def test_a_variant_or_checkpoint_that_a_directory_lacks_is_named():
    with pytest.raises(UserError, match="no variant 'sparse'; legal: dense"):
        sd.load(FOLDERS["llama"], "sparse")
    with pytest.raises(UserError, match="no checkpoint 'best'; legal: newest"):
        sd.load(FOLDERS["llama"], checkpoint="best")
    with pytest.raises(UserError, match="is not a run folder"):
        sd.load("nowhere")


@pytest.mark.parametrize("config", some(SPECS, "by depth", "llama", "by projection"))
def test_a_sparse_form_begins_a_run_with_its_own_sparsity(tmp_path, config):
    params, tables = export(tmp_path / "model", "sparse", config)
    request = Request(changes={"run.init_from": str(tmp_path / "model")})
    run = request.config()
    model = variant(run, "sparse").model
    assert (model.linears, model.density_by_depth) == (config.linears, config.density_by_depth)
    start = starting_point.read(str(tmp_path / "model"))
    training = dataclasses.replace(run.training, steps=1)
    state = starting_point.initial_state_from(start, model, training)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, state.params, params)))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, state.rest, tables)))


def test_a_density_on_the_command_line_replaces_that_of_the_weights(tmp_path):
    export(tmp_path / "model", "sparse", SPECS["by projection"])
    changes = {"run.init_from": str(tmp_path / "model"), "sparsity.density": 0.25}
    sparsity = Request(changes=changes).config().sparsity
    assert (sparsity.density, sparsity.block, sparsity.budget) == (0.25, 8, "uniform")


RANDOM = DENSE.with_linears(LinearSpec("block_sparse", "random", 0.5, 8))


@pytest.mark.parametrize("config", [RANDOM, DEPTH], ids=["uniform", "by depth"])
def test_values_with_the_tables_of_another_layout_are_refused(tmp_path, config):
    """The shapes of two exports are equal, so only the digest of the tables differs."""
    export(tmp_path / "one", "sparse", config)
    export(tmp_path / "two", "sparse", dataclasses.replace(config, seed=1))
    other = load_file(tmp_path / "two" / "model.safetensors")
    tables = {n: t for n, t in other.items() if n.endswith(("_index", "_slot"))}
    change_tensors(tmp_path / "one", lambda tensors: tensors.update(tables))
    with pytest.raises(UserError, match="tables of another layout"):
        sd.load(tmp_path / "one")


def test_tables_that_do_not_fit_the_config_are_refused(tmp_path):
    export(tmp_path / "model", "sparse", SPARSE)
    other = SPARSE.with_linears(LinearSpec("block_sparse", "monarch", 0.25, 8))
    export(tmp_path / "other", "sparse", other)
    (tmp_path / "model" / "model.safetensors").write_bytes(
        (tmp_path / "other" / "model.safetensors").read_bytes()
    )
    with pytest.raises(UserError, match=r"has shape .* requires"):
        sd.load(tmp_path / "model")
