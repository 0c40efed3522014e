"""Imports and exports of Hugging Face directories keep the logits; errors name what is damaged."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_fixture import BYTES, FOLDER
from marks import some
from models import (
    DENSE,
    DEPTH,
    LOW_RANK,
    SPARSE,
    SUPAR,
    change_tensors,
    export,
    logits,
    random_model,
)
from safetensors import SafetensorError
from safetensors.numpy import load_file

from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import huggingface, sparse_form, tensors
from sparse_dataflow.interchange.equivalent_forms import fuse_qkv, split_qkv

IDS = np.random.default_rng(0).integers(0, BYTES.vocab_size, (2, 16), np.int32)


def equal_bits(left, right):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, left, right)))


@pytest.mark.parametrize(
    "config",
    some(
        {"sparse": SPARSE, "low rank": LOW_RANK, "supar": SUPAR, "by depth": DEPTH},
        "supar", "by depth",
    ),
)  # fmt: skip
def test_the_dense_form_has_the_logits_of_the_sparse_model(tmp_path, config):
    params, tables = export(tmp_path / "model", "dense", config)
    imported = huggingface.read(tmp_path / "model")
    assert not imported.model.sparse_projections
    np.testing.assert_allclose(
        logits(imported.model, imported.params, {}, IDS),
        logits(config, params, tables, IDS),
        atol=1e-4,
    )


def test_a_dense_model_round_trips_bit_for_bit(tmp_path):
    params, _ = export(tmp_path / "model", "dense", DENSE)
    imported = huggingface.read(tmp_path / "model")
    assert imported.model == DENSE and imported.tokenizer == BYTES
    assert equal_bits(imported.params, params)


@pytest.mark.parametrize(
    "config",
    [DENSE, SPARSE, LOW_RANK, DEPTH],
    ids=["dense", "sparse", "low rank", "by depth"],
)
def test_the_sparse_form_round_trips_bit_for_bit(tmp_path, config):
    params, tables = export(tmp_path / "model", "sparse", config)
    imported = huggingface.read(tmp_path / "model")
    assert imported.model == config and imported.tokenizer == BYTES
    assert equal_bits(imported.params, merged(params, tables))


@given(groups=st.sampled_from([1, 2]), queries=st.integers(1, 3), width=st.integers(1, 4))
def test_fused_and_split_qkv_hold_the_same_heads(groups, queries, width):
    heads = groups * queries
    fused = dataclasses.replace(
        DENSE, num_heads=heads, num_kv_heads=groups, head_dim=width, d_model=4
    )
    columns = np.arange(4 * fused.projection_shape("qkv")[1]).reshape(1, 4, -1)
    params = {"blocks": {"qkv": {"kernel": columns}}}
    split = split_qkv(fused, params)
    # Each group starts with its queries, then its key and its value.
    grid = columns.reshape(1, 4, groups, queries + 2, width)
    for name, part in (("q", grid[..., :-2, :]), ("k", grid[..., -2, :]), ("v", grid[..., -1, :])):
        np.testing.assert_array_equal(split["blocks"][name]["kernel"], part.reshape(1, 4, -1))
    np.testing.assert_array_equal(fuse_qkv(fused, split)["blocks"]["qkv"]["kernel"], columns)


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(FOLDER, tmp_path / "gpt2"))


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


TENSOR = "transformer.h.1.mlp.c_fc.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(TENSOR), f"no tensor {TENSOR}"),
        (lambda t: t.update({TENSOR: t[TENSOR][:, 1:]}), r"\[32, 127\]; .* requires \[32, 128\]"),
        (lambda t: t.update({TENSOR: t[TENSOR] * np.nan}), "not finite"),
        (lambda t: t.update({TENSOR: t[TENSOR].astype(np.int32)}), "is int32; legal: floats"),
        (lambda t: t.pop("transformer.wte.weight"), "no tensor transformer.wte.weight"),
    ],
)
def test_damaged_tensors_are_named(folder, change, message):
    change_tensors(folder, change)
    with pytest.raises(UserError, match=message):
        huggingface.read(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "bloom"}, "type 'bloom'; legal: gpt2, opt"),
        ({"activation_function": "tanh"}, r"activation_function='tanh' \(legal: gelu_new"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"n_embd": "wide"}, "has n_embd=wide, which is not legal: it must be a whole number.$"),
        ({"n_head": 5}, "legal head counts"),
        ({"n_layer": 1.5}, "n_layer=1.5, which is not legal: it must be a whole number"),
        ({"n_head": True}, "n_head=yes, which is not legal: it must be a whole number"),
        ({"vocab_size": 10**6}, "and 1,000,000 tokens .* the weights are incomplete"),
        ({"eos_token_id": 1.5}, "eos_token_id=1.5"),
        ({"model_type": ["gpt2"]}, "model_type is missing or is not a string"),
    ],
)
def test_unsupported_configs_are_named(folder, fields, message):
    change_config(folder, **fields)
    with pytest.raises(UserError, match=message):
        huggingface.read(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "is not a Hugging Face directory"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is damaged"),
        (lambda f: (f / "model.safetensors").unlink(), "has no weights; legal: model.safetensors"),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"x" * 99),
            "is not a complete safetensors file",
        ),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
        (lambda f: (f / "tokenizer.json").write_text("[]"), "tokenizer .* cannot be read"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}'),
            "lacks b, which its index names",
        ),
    ],
)
def test_missing_and_damaged_files_are_named(folder, damage, message):
    damage(folder)
    with pytest.raises(UserError, match=message):
        huggingface.read(folder)


def test_an_end_of_text_that_is_a_text_token_is_named(folder):
    fields = json.loads((folder / "tokenizer.json").read_text())
    left, right = list(fields["model"]["vocab"])[:2]
    fields["model"]["merges"] = [[left, right]]
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    number = fields["model"]["vocab"][left]
    change_config(folder, eos_token_id=number)
    with pytest.raises(UserError, match=f"end of text has the id {number}, which is the text"):
        huggingface.read(folder)


def test_sharded_and_half_precision_weights_are_read(folder):
    import struct

    from safetensors.numpy import save_file

    whole_file = load_file(folder / "model.safetensors")
    names = sorted(whole_file)
    (folder / "model.safetensors").unlink()
    save_file({n: whole_file[n].astype(np.float16) for n in names[::2]}, folder / "a.safetensors")
    # The other half is bfloat16, which numpy does not have, so its file is written by hand.
    header, data = {}, b""
    for name in names[1::2]:
        raw = (whole_file[name].view(np.uint32) >> 16).astype("<u2").tobytes()
        shape = list(whole_file[name].shape)
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    (folder / "b.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    index = {name: "ab"[i % 2] + ".safetensors" for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    rounded = huggingface.read(folder)
    exact = huggingface.read(FOLDER)
    assert not equal_bits(rounded.params, exact.params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0.01, atol=1e-3),
        rounded.params,
        exact.params,
    )


@pytest.mark.parametrize("form", huggingface.FORMS)
def test_a_failed_export_leaves_no_files(tmp_path, monkeypatch, form):
    def full(*args):
        raise OSError(28, "No space left on device")

    def interrupted(*args):
        raise KeyboardInterrupt

    folder = tmp_path / "deep" / "model"
    monkeypatch.setattr(huggingface.tokenizer_files, "write", full)
    with pytest.raises(UserError, match="cannot be written: No space left"):
        export(folder, form, DENSE)
    monkeypatch.setattr(huggingface.tokenizer_files, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(folder, form, DENSE)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    other_folder = folder.parent / ".model.partial"
    other_folder.mkdir(parents=True)
    (other_folder / "model.safetensors").write_bytes(b"mine")
    export(folder, form, DENSE)
    assert sorted(path.name for path in folder.parent.iterdir()) == [".model.partial", "model"]
    assert (other_folder / "model.safetensors").read_bytes() == b"mine"
    modes = {path.name: path.stat().st_mode for path in folder.iterdir()}
    assert modes["README.md"] == modes["model.safetensors"]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError, match="exists already"):
        export(folder, form, SPARSE)
    assert before == {path: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("form", some(huggingface.FORMS, "sparse"))
def test_an_export_on_a_full_disk_says_so(tmp_path, monkeypatch, form):
    """The library of the weights raises its own kind of error."""

    def full(*args, **named):
        raise SafetensorError("Error while serializing: No space left on device (os error 28)")

    monkeypatch.setattr(tensors, "save_file", full)
    with pytest.raises(UserError, match=r"cannot be written: No space left on device\. No partial"):
        export(tmp_path / "model", form, DENSE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_not_written(tmp_path, value):
    with pytest.raises(UserError, match=r"^b has values that are not finite; legal: finite"):
        arrays = {"a": np.arange(3), "b": np.asarray([1.0, value], np.float32)}
        tensors.write(tmp_path, tensors.as_dtype(arrays, "bfloat16"), {})
    assert not list(tmp_path.iterdir())


def test_what_is_written_twice_has_the_same_bytes(tmp_path):
    """Safetensors itself writes the metadata in another order each time."""
    arrays = {"größe": np.arange(5, dtype=np.float32), "a": np.ones((2, 3), np.int32)}
    metadata = {f"name {number}": 'a "quoted" \n 疎 text' for number in range(9)}
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for path in paths:
        tensors.write_file(path, arrays, metadata)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    loaded = load_file(paths[0])
    assert all(np.array_equal(loaded[name], array) for name, array in arrays.items())


@pytest.mark.parametrize("place", ["s3://bucket/model", "gs:/bucket/model", Path("s3://bucket/m")])
def test_an_export_to_an_address_is_refused(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"folder=.* legal: "):
        export(place, "sparse", DENSE)
    assert not list(tmp_path.iterdir())
    assert huggingface.local_path("folder", f"file://{tmp_path}/model") == tmp_path / "model"


def test_a_damaged_layout_is_refused(tmp_path):
    export(tmp_path / "model", "sparse", SPARSE)

    def duplicate_a_block(tensors):
        tensors["blocks.0.qkv.in_slot"][0, 0] = tensors["blocks.0.qkv.in_slot"][0, 1]

    change_tensors(tmp_path / "model", duplicate_a_block)
    with pytest.raises(UserError, match="in_slot"):
        sparse_form.read(tmp_path / "model")


def flax_logits(folder, ids):
    """Logits of transformers' Flax model, whose kernels are [out, in]."""
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    params: dict = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        *path, leaf = name.split(".")
        if path[-1] in ("wte", "wpe"):
            leaf = "embedding"
        elif leaf == "weight":
            leaf = "scale" if tensor.ndim == 1 else "kernel"
        subtree = params
        for name in path:
            subtree = subtree.setdefault(name, {})
        subtree[leaf] = tensor.T if leaf == "kernel" else tensor
    model = FlaxGPT2LMHeadModel(GPT2Config.from_pretrained(folder), _do_init=False)
    return np.asarray(model(ids, params=params).logits)


def torch_logits(folder, ids):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.from_numpy(ids).long()).logits.numpy()


@pytest.mark.parametrize("library", ["torch", "flax"])
@pytest.mark.parametrize("config", [DENSE, LOW_RANK], ids=["dense", "low rank"])
def test_transformers_loads_an_export(tmp_path, library, config):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if library == "torch":
        pytest.importorskip("torch", reason="torch is not installed")
    elif not hasattr(transformers, "FlaxGPT2LMHeadModel"):
        pytest.skip("this transformers has no Flax models; 4.57 has")
    export(tmp_path / "model", "dense", config)
    library_logits = torch_logits if library == "torch" else flax_logits
    actual = library_logits(tmp_path / "model", IDS)
    np.testing.assert_allclose(
        actual, logits(config, *random_model(config), IDS), rtol=0, atol=1e-4
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    for text in ("hello", "héllo\n 🙂", "a  b"):
        assert tokenizer(text).input_ids == BYTES.encode(text).tolist()
        assert tokenizer.decode(BYTES.encode(text)) == text
    assert tokenizer.eos_token_id == BYTES.eot_id


@pytest.mark.parametrize("form", huggingface.FORMS)
def test_the_tokenizer_returns_only_what_gpt2_reads(tmp_path, form):
    """transformers 4 adds token_type_ids by default, and GPT-2 embeds them."""
    export(tmp_path / "model", form, DENSE)
    fields = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert fields["model_input_names"] == ["input_ids", "attention_mask"]


@pytest.mark.parametrize("config", [DENSE, LOW_RANK], ids=["dense", "low rank"])
def test_transformers_generates_our_greedy_tokens_from_all_tokenizer_outputs(tmp_path, config):
    for library in ("transformers", "torch"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    params, tables = export(tmp_path / "model", "dense", config)
    ids = BYTES.encode("hello").tolist()
    while len(ids) < config.max_len and ids[-1] != BYTES.eot_id:
        padded = np.zeros((1, config.max_len), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(logits(config, params, tables, padded)[0, len(ids) - 1].argmax()))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    inputs = AutoTokenizer.from_pretrained(tmp_path / "model")("hello", return_tensors="pt")
    generated = model.generate(**inputs, max_length=config.max_len, do_sample=False)
    assert generated[0].tolist() == ids
