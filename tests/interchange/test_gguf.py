"""GGUF files have the weights, the tokenizer and the special tokens of their directories."""

import dataclasses
import json
import struct

import gguf_models
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_fixture import BYTES
from marks import examples, some

import sparse_dataflow as sd
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import huggingface, starting_point, tokenizer_files
from sparse_dataflow.interchange.hub_models import local_folder
from sparse_dataflow.interchange.llama_cpp import gguf_form, vocabulary
from sparse_dataflow.interchange.llama_cpp.gguf_file import GgufFile

IDS = np.random.default_rng(0).integers(0, 200, (1, 12), np.int32)
each_family = pytest.mark.parametrize(
    "name", some(gguf_models.FAMILIES, "gpt2", "llama", "mixtral", "gemma3_text", "phi3")
)


def export(folder, form, name, dtype="float32"):
    config, params = gguf_models.drawn(name)
    tokenizer = gguf_models.tokenizer()
    more = {"context": 128, "card": "", "architecture": name, "dtype": dtype}
    return huggingface.write(folder, form, config, params, tokenizer, **more)


def same_params(actual, expected, tolerance=0.0):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


@each_family
def test_a_file_of_llama_cpps_converter_has_the_model_of_the_directory(tmp_path, name):
    folder = export(tmp_path / "directory", "dense", name)
    gguf_models.write(folder, tmp_path / "model.gguf")
    expected = huggingface.read(folder)
    actual = huggingface.read(local_folder(tmp_path / "model.gguf"))
    assert dataclasses.replace(actual.model, rotary_low=1.0) == dataclasses.replace(
        expected.model, rotary_low=1.0
    )
    same_params(actual.params, expected.params, 1e-6)
    assert actual.tokenizer.tokens == expected.tokenizer.tokens


@each_family
def test_an_export_is_read_back(tmp_path, name):
    folder = export(tmp_path / "model", "gguf", name)
    config, params = gguf_models.drawn(name)
    actual = huggingface.read(local_folder(folder))
    assert actual.model == config
    same_params(actual.params, params, 1e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float16", 1e-3), ("bfloat16", 8e-3), ("q8_0", 1e-2)]
)
def test_numbers_are_rounded_and_norms_are_not(tmp_path, dtype, tolerance):
    folder = export(tmp_path / "model", "gguf", "llama", dtype)
    params, (_, drawn) = huggingface.read(local_folder(folder)).params, gguf_models.drawn("llama")
    same_params(params, drawn, tolerance)
    kernels = [tree["blocks"]["mlp_in"]["kernel"] for tree in (params, drawn)]
    assert not np.array_equal(*kernels)
    norms = [tree["blocks"]["norm1"]["scale"] for tree in (params, drawn)]
    np.testing.assert_array_equal(*norms)


def test_every_command_takes_the_file_and_its_folder(tmp_path):
    folder = export(tmp_path / "model", "gguf", "qwen2")
    file = folder / gguf_form.FILE
    model, again = sd.load(file), sd.load(str(folder))
    np.testing.assert_array_equal(sd.logits(model, IDS), sd.logits(again, IDS))
    start = starting_point.read(str(file))
    assert start.model == model.model and start.provenance["path"] == str(file)
    pruned = sd.prune(file, [np.tile(IDS, (4, 1))], density=0.5, block=1, rounds=1)
    assert pruned.model.model.linear("mlp_in").density == 0.5


def test_sparse_weights_are_dense_in_the_file(tmp_path):
    model = sd.init(sd.preset("pico").change(sparsity__block=16), jax.random.key(0))
    again = sd.load(sd.save(model, tmp_path / "model", form="gguf"))
    np.testing.assert_allclose(sd.logits(again, IDS), sd.logits(model, IDS), atol=1e-4)
    assert not again.model.linears and model.model.linears


def test_what_a_family_lacks_is_refused(tmp_path):
    config, params = gguf_models.drawn("llama")
    config = dataclasses.replace(config, window=5)
    with pytest.raises(UserError, match="has no such model"):
        huggingface.write(
            tmp_path / "model",
            "gguf",
            config,
            params,
            gguf_models.tokenizer(),
            context=16,
            card="",
        )
    assert not list(tmp_path.iterdir())


def test_a_failed_export_leaves_no_files(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_form, "write", full)
    with pytest.raises(UserError, match="cannot be written: No space left"):
        export(tmp_path / "deep" / "model", "gguf", "llama")
    assert not list(tmp_path.iterdir())


def test_an_unknown_dtype_names_the_legal_ones(tmp_path):
    with pytest.raises(UserError, match="q8_0"):
        export(tmp_path / "model", "gguf", "llama", "int4")
    with pytest.raises(UserError, match="legal: float32, bfloat16"):
        export(tmp_path / "model", "dense", "llama", "q8_0")


def fallback_tokenizer(folder, space):
    """A tokenizer of SentencePiece: characters, some merges, bytes for all else."""
    specials = ["<pad>", "</s>", "<s>", "<unk>"]
    texts = ["\u2581", *"abcdehlost", "th", "\u2581th", "the", "\u2581the", "ab", "lo", "cat"]
    byte_tokens = [f"<0x{n:02X}>" for n in range(256)]
    tokens = [*specials, *byte_tokens, *texts]
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = [("t", "h"), ("\u2581", "th"), ("th", "e"), ("\u2581", "the"), ("\u2581th", "e"),
              ("a", "b"), ("l", "o")]  # fmt: skip
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 2, *[6] * 256, *[1] * len(texts)],
        "tokenizer.ggml.scores": [
            -float(next((i for i, m in enumerate(merges) if "".join(m) == t), 99)) for t in tokens
        ],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": space,
    }
    assert len(vocab) == len(tokens)
    for name, content in vocabulary.read(metadata, len(tokens)).items():
        (folder / name).write_bytes(content)
    fields = {"vocab_size": len(tokens), "eos_token_id": 1, "bos_token_id": 2}
    return metadata, tokenizer_files.read(folder, fields).tokenizer


@pytest.mark.parametrize("space", [True, False])
def test_a_tokenizer_of_scores_is_written_back(tmp_path, space):
    metadata, tokenizer = fallback_tokenizer(tmp_path, space)
    rows = len(metadata["tokenizer.ggml.tokens"])
    written = vocabulary.write(tokenizer, rows)
    again = tmp_path / "again"
    again.mkdir()
    for name, content in vocabulary.read(written, rows).items():
        (again / name).write_bytes(content)
    fields = {"vocab_size": rows, "eos_token_id": 1, "bos_token_id": 2}
    other = tokenizer_files.read(again, fields).tokenizer
    for text in ("the cat", " the  lotus \u00e9", "\n", "ablo"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        np.testing.assert_array_equal(other.encode(text), tokenizer.encode(text))
    assert tokenizer.document_prefix == other.document_prefix != ()


@pytest.mark.parametrize("name", vocabulary.STEPS)
def test_a_byte_level_tokenizer_is_written_back(tmp_path, name):
    written = vocabulary.write(BYTES, BYTES.vocab_size)
    assert written["tokenizer.ggml.pre"] == "gpt-2"
    files = vocabulary.read({**written, "tokenizer.ggml.pre": name}, BYTES.vocab_size)
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    fields = {"vocab_size": BYTES.vocab_size, "eos_token_id": BYTES.eot_id}
    tokenizer = tokenizer_files.read(tmp_path, fields).tokenizer
    assert vocabulary.write(tokenizer, BYTES.vocab_size)["tokenizer.ggml.pre"] == name
    text = "It's 1234 caf\u00e9s,  (IT) said:\n\tNO!"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_and_the_ends_are_those_of_the_file(tmp_path):
    written = vocabulary.write(BYTES, BYTES.vocab_size)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    more = {"tokenizer.chat_template": template, "tokenizer.ggml.eot_token_id": 5}
    files = vocabulary.read({**written, **more}, BYTES.vocab_size)
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == template
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [BYTES.eot_id, 5]


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    folder = export(tmp_path_factory.mktemp("gguf") / "model", "gguf", "qwen2")
    return (folder / gguf_form.FILE).read_bytes()


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_in_words_or_read(small_file, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "model.gguf"
    content = bytearray(small_file)
    header = 40_000
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, max(0, min(header, len(content)) - 9)))
        number = data.draw(st.sampled_from([0, 1, 2**31, 2**40, 2**62, 2**64 - 1]))
        content[place : place + 8] = struct.pack("<Q", number)
    path.write_bytes(bytes(content))
    try:
        huggingface.open_dense(local_folder(path)).ends()
    except UserError as error:
        assert 0 < len(str(error)) < 2000 and "Traceback" not in str(error)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"", "does not begin with GGUF"),
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "announces"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "announces"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**50) + bytes(64), "announces"),
    ],
)
def test_counts_are_compared_with_the_bytes(tmp_path, head, words):
    path = tmp_path / "model.gguf"
    path.write_bytes(head)
    with pytest.raises(UserError, match=words):
        sd.load(path)


def test_tensors_do_not_share_bytes(tmp_path, small_file):
    path = tmp_path / "model.gguf"
    path.write_bytes(small_file)
    file = GgufFile(path)
    name = "blk.1.ffn_up.weight"
    row = small_file.index(name.encode()) + len(name) + 4 + 2 * 8 + 4
    content = bytearray(small_file)
    content[row : row + 8] = struct.pack("<Q", 0)
    path.write_bytes(bytes(content))
    assert GgufFile(path).places[name].start == min(p.start for p in file.places.values())
    path.write_bytes(bytes(content)[: len(content) - file.places[name].size])
    with pytest.raises(UserError, match=r"more bytes|ends at byte"):
        sd.load(path)
