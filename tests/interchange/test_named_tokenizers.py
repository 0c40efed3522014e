"""An existing tokenizer for a new model: of a folder, of a run folder, of the hub."""

import json

import numpy as np
import pytest
import tokenizers
from fake_hub import FakeHub

from sparse_dataflow.data.tokenizer import byte_tokenizer
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.named_tokenizers import named_tokenizer

WORDS = "hello world café 12 123 x = 12345\n    return the lazy dog's 1234 hello"
TEXTS = [WORDS, "hello", " x", "🙂 né", ""]


def written(folder, end="</s>", **settings):
    """A byte-level tokenizer of 300 tokens as `transformers` saves it; returns the library's."""
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[end] if end else [],
        show_progress=False,
    )
    engine.train_from_iterator([WORDS] * 9, trainer)
    folder.mkdir(parents=True)
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end} | settings))
    return engine


def assert_encodes_as(tokenizer, engine):
    for text in TEXTS:
        ids = tokenizer.encode(text)
        given = np.asarray(tokenizer.original_ids or range(tokenizer.vocab_size))[ids]
        assert given.tolist() == engine.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text


def test_a_folder_without_config_json_gives_its_tokenizer(tmp_path):
    engine = written(tmp_path / "t")
    tokenizer = named_tokenizer(str(tmp_path / "t"))
    assert_encodes_as(tokenizer, engine)
    assert tokenizer.vocab_size == engine.get_vocab_size()
    assert tokenizer.original_ids[tokenizer.eot_id] == engine.token_to_id("</s>")


def test_config_json_gives_the_size_of_the_vocabulary(tmp_path):
    engine = written(tmp_path / "t")
    (tmp_path / "t" / "config.json").write_text('{"vocab_size": 320, "eos_token_id": 0}')
    tokenizer = named_tokenizer(str(tmp_path / "t"))
    assert tokenizer.vocab_size == 320
    assert_encodes_as(tokenizer, engine)


def test_a_tokenizer_without_end_of_text_gets_one(tmp_path):
    engine = written(tmp_path / "t", end="")
    tokenizer = named_tokenizer(str(tmp_path / "t"))
    assert tokenizer.vocab_size == engine.get_vocab_size() + 1
    assert_encodes_as(tokenizer, engine)


def test_a_run_folder_gives_its_tokenizer(tmp_path):
    byte_tokenizer(300).save(tmp_path / "tokenizer.json")
    assert named_tokenizer(str(tmp_path)) == byte_tokenizer(300)


def test_a_name_of_the_hub_fetches_the_files_of_the_tokenizer_alone(tmp_path, monkeypatch):
    hub = FakeHub(tmp_path / "hub")
    engine = written(tmp_path / "hub" / "owner" / "model")
    (tmp_path / "hub" / "owner" / "model" / "model.safetensors").write_bytes(b"x" * 10**6)
    with hub.used_here(monkeypatch, tmp_path / "cached"):
        tokenizer = named_tokenizer("hf:owner/model")
        with pytest.raises(UserError, match=r"hf:owner/other cannot be fetched: the hub has no"):
            named_tokenizer("hf:owner/other")
    hub.close()
    assert_encodes_as(tokenizer, engine)
    assert hub.bytes_of("model.safetensors") == 0


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, r"has no tokenizer\.json.*legal: bpe, gpt2, none, a folder"),
        ({"tokenizer.json": "{"}, "cannot be read"),
        ({"tokenizer.json": "[]"}, "cannot be read"),
        ({"tokenizer.json": '{"model": 3}'}, "cannot be read"),
        ({"tokenizer.json": '{"model": {"type": "WordPiece", "vocab": {"a": 0}}}'}, "cannot be"),
    ],
)
def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        named_tokenizer(str(tmp_path))
