"""An imported tokenizer.json keeps its settings when encoding, in a run and in an export."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from marks import some
from models import DENSE, random_model

from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import huggingface

WORDS = "hello world Hello World café 12 123 x = 12345\n    return the lazy dog's 1234 hello"
TEXTS = ["Hello World", "Cafe\u0301 CAFÉ", "x = 12345\n\n    return", " hello", "</s>", "🙂", ""]
MODEL = dataclasses.replace(DENSE, vocab_size=320)
SPLIT = {"type": "Split", "pattern": {"Regex": r"\d|\s+|[^\s\d]+"}, "behavior": "Isolated"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
CHANGES = {
    "nothing": {},
    "NFC": {"normalizer": {"type": "NFC"}},
    "Lowercase": {"normalizer": {"type": "Lowercase"}},
    "add_prefix_space": {
        "pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True, "use_regex": True}
    },
    "Split": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [SPLIT | {"invert": False}, BYTE_LEVEL | {"use_regex": False}],
        }
    },
    "truncation": {
        "truncation": {
            "direction": "Right",
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
        }
    },
}


def added_token(content, number, special):
    options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": special} | options


@pytest.fixture(scope="session")
def trained_fields():
    """Fields of a tokenizer.json: special tokens first, as in OPT, and an added word last."""
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=["<s>", "<pad>", "</s>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator([WORDS] * 9, trainer)
    fields = json.loads(engine.to_str())
    fields["added_tokens"].append(added_token("lazy dog", engine.get_vocab_size(), special=False))
    return fields


@pytest.fixture(params=CHANGES.values(), ids=CHANGES)
def original(request, trained_fields):
    return json.dumps(trained_fields | request.param, indent=2, ensure_ascii=False)


@pytest.fixture
def imported(original, tmp_path):
    return huggingface.read(directory(tmp_path / "imported", original))


@pytest.fixture(scope="session")
def fallback_original():
    """A tokenizer.json as Llama 2's and Mistral's: characters, and bytes for those it lacks."""
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    engine.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=specials, show_progress=False
    )
    engine.train_from_iterator([WORDS] * 9, trainer)
    decoders = tokenizers.decoders
    engine.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fields = json.loads(engine.to_str())
    fields["added_tokens"] = [t for t in fields["added_tokens"] if "0x" not in t["content"]]
    return json.dumps(fields, ensure_ascii=False)


def test_byte_fallback_is_encoded_and_decoded_as_by_the_library(fallback_original, tmp_path):
    imported = huggingface.read(directory(tmp_path / "imported", fallback_original))
    tokenizer, engine = imported.tokenizer, library_tokenizer(fallback_original)
    for text in [*TEXTS, WORDS]:
        expected = engine.encode(text, add_special_tokens=False).ids
        ids = tokenizer.encode(text)
        assert original_ids(tokenizer, text) == expected
        assert tokenizer.decode(ids) == engine.decode(expected) == text
        spelled = b"".join(map(tokenizer.token_to_bytes, ids)).decode()
        assert spelled == (f" {text}" if text else "")  # The tokenizer writes a space in front.
        assert tokenizer.token_bytes[ids].sum() == len(spelled.encode())
    tokenizer.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json") == tokenizer
    write(tmp_path / "exported", "dense", imported)
    assert (tmp_path / "exported" / "tokenizer.json").read_text() == fallback_original


def directory(folder, original):
    """Writes a random GPT-2 with this tokenizer.json."""
    plain = Tokenizer(tuple(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())), (), 320)
    params, tables = random_model(MODEL)
    weights = merged(params, tables)
    huggingface.write(folder, "dense", MODEL, weights, plain, context=16, card="")
    (folder / "tokenizer.json").write_text(original, encoding="utf-8")
    (folder / "tokenizer_config.json").unlink()  # It names the end of text of the other one.
    config = json.loads((folder / "config.json").read_text())
    config |= {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def library_tokenizer(original):
    engine = tokenizers.Tokenizer.from_str(original)
    engine.no_truncation()
    engine.encode_special_tokens = True
    return engine


def original_ids(tokenizer, text):
    return [tokenizer.original_ids[i] for i in tokenizer.encode(text)]


def test_text_is_encoded_and_decoded_as_by_the_library(imported, original):
    engine = library_tokenizer(original)
    for text in [*TEXTS, WORDS]:
        expected = engine.encode(text, add_special_tokens=False).ids
        assert original_ids(imported.tokenizer, text) == expected
        assert imported.tokenizer.decode(imported.tokenizer.encode(text)) == engine.decode(expected)


def test_token_bytes_add_up_to_the_decoded_text(imported):
    tokenizer = imported.tokenizer
    for text in [*TEXTS, WORDS]:
        ids = tokenizer.encode(text)
        decoded = tokenizer.decode(ids)
        assert tokenizer.token_bytes[ids].sum() == len(decoded.encode())
        assert b"".join(map(tokenizer.token_to_bytes, ids)).decode() == decoded


def test_a_long_text_is_encoded_whole(imported, original):
    text = "Hello world\n" * 30_000
    expected = library_tokenizer(original).encode(text, add_special_tokens=False).ids
    assert original_ids(imported.tokenizer, text) == expected


def test_no_text_encodes_to_end_of_text_which_decodes_to_nothing(imported):
    tokenizer = imported.tokenizer
    assert tokenizer.original_ids[tokenizer.eot_id] == 2
    assert tokenizer.eot_id not in tokenizer.encode("a</s>b")
    assert tokenizer.decode([tokenizer.eot_id]) == ""


def test_a_run_saves_the_original_unchanged(imported, original, tmp_path):
    imported.tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded == imported.tokenizer and loaded.original == original
    assert loaded.content_hash == imported.tokenizer.content_hash


def test_the_first_of_several_ends_of_text_ends_a_document(trained_fields, tmp_path):
    folder = directory(tmp_path / "imported", json.dumps(trained_fields))
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": [2, 1]}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = huggingface.read(folder).tokenizer
    assert tokenizer.original_ids[tokenizer.eot_id] == 2


@pytest.mark.parametrize("form", some(huggingface.READABLE, "sparse"))
def test_an_export_writes_the_original_byte_for_byte(imported, original, tmp_path, form):
    folder = tmp_path / "exported"
    write(folder, form, imported)
    assert (folder / "tokenizer.json").read_bytes() == original.encode()
    reread = huggingface.read(folder)
    for text in TEXTS:
        np.testing.assert_array_equal(
            embedded(reread, reread.tokenizer.encode(text)),
            embedded(imported, imported.tokenizer.encode(text)),
        )
    np.testing.assert_array_equal(
        embedded(reread, reread.tokenizer.eot_id), embedded(imported, imported.tokenizer.eot_id)
    )


def test_transformers_reads_an_export_with_the_original_ids(imported, original, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    write(tmp_path / "exported", "dense", imported)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    for text in TEXTS:
        if "</s>" not in text:
            assert loaded(text).input_ids == original_ids(imported.tokenizer, text)
    assert loaded.eos_token_id == 2


def write(folder, form, model):
    weights = model.params
    huggingface.write(folder, form, model.model, weights, model.tokenizer, context=16, card="")


def embedded(model, ids):
    return model.params["embed"]["tokens"][ids]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalizer": {"type": "none"}}, "original cannot be read"),
        ({"decoder": {"type": "none"}}, "original cannot be read"),
    ],
)
def test_a_tokenizer_that_the_library_cannot_read(trained_fields, tmp_path, change, message):
    folder = directory(tmp_path / "imported", json.dumps(trained_fields | change))
    with pytest.raises(UserError, match=message):
        huggingface.read(folder)


def test_a_damaged_original_is_refused(trained_fields, tmp_path):
    folder = directory(tmp_path / "imported", json.dumps(trained_fields))
    path = tmp_path / "tokenizer.json"
    huggingface.read(folder).tokenizer.save(path)
    saved = json.loads(path.read_text())
    for field, damage in (
        ("original", "{"),
        ("original", ""),
        ("original", 3),
        ("original_ids", []),
        ("original_ids", saved["original_ids"][1:]),
        ("original_ids", [0.5, *saved["original_ids"][1:]]),
    ):
        path.write_text(json.dumps(saved | {field: damage}))
        with pytest.raises(UserError, match="cannot be read"):
            Tokenizer.load(path)
