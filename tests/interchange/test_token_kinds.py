"""Tokenizers whose first token has any length, and special tokens that a model has no row for."""

import json

import base_tokenizers
import numpy as np
import pytest
import tokenizers

from sparse_dataflow.data.tokenizer import Tokenizer, byte_tokenizer, id_tokenizer
from sparse_dataflow.evaluation.stopping import StreamDecoder
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import extended_vocabulary, tokenizer_files

TEXTS = ["The dog", " two plus two", "<extra>", "a<|long token|>b", "\u00e9\n\n12"]


def token(content, number, special):
    options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": special, **options}


def read(tmp_path, name, change, rows_less=0):
    """Returns (imported tokenizer, the library's) of a tokenizer.json after a change."""
    folder = tmp_path / "model"
    base_tokenizers.write(folder, name)
    fields = json.loads((folder / "tokenizer.json").read_text())
    change(fields)
    text = json.dumps(fields, ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text)
    library = tokenizers.Tokenizer.from_str(text)
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = max(library.get_vocab().values()) + 1 - rows_less
    result = tokenizer_files.read(folder, config).tokenizer
    library.encode_special_tokens = True
    return result, library


@pytest.mark.parametrize("name", base_tokenizers.FALLBACK)
@pytest.mark.parametrize("first", ["<extra>", "<|long token|>", "\u2581\u2581", "\u65e5\u672c"])
def test_a_first_token_of_any_length_is_text(name, first, tmp_path):
    def change(fields):  # The first text token changes places with a new one.
        vocab = fields["model"]["vocab"]
        last, byte = max(vocab.values()) + 1, vocab["<0x00>"]
        vocab["<0x00>"] = last
        vocab[first] = byte
        fields["added_tokens"].append(token(first, byte, False))

    tokenizer, library = read(tmp_path, name, change)
    assert tokenizer.has_text and len(tokenizer.tokens[0]) > 1
    for text in [*TEXTS, first]:
        expected = library.encode(text, add_special_tokens=False).ids
        ids = tokenizer.encode(text)
        assert [tokenizer.original_ids[i] for i in ids] == expected
        decoder = StreamDecoder(tokenizer)
        written = "".join(map(decoder.add, ids.tolist())) + decoder.end("length")
        assert written.lstrip(" ") == library.decode(expected).lstrip(" ")


def test_a_tokenizer_of_ids_alone_says_so_in_its_file_and_in_files_without_the_field(tmp_path):
    for tokenizer in (id_tokenizer(300), byte_tokenizer(300)):
        path = tmp_path / "tokenizer.json"
        tokenizer.save(path)
        fields = json.loads(path.read_text())
        assert fields.pop("has_text", True) == tokenizer.has_text
        assert Tokenizer.load(path) == tokenizer
        path.write_text(json.dumps(fields))  # As earlier versions wrote it.
        assert Tokenizer.load(path) == tokenizer
        assert Tokenizer.load(path).content_hash == tokenizer.content_hash
    assert id_tokenizer(300).token_to_bytes(0) == b""


@pytest.mark.parametrize("name", ["gpt2", "qwen", "llama2", "gemma"])
@pytest.mark.parametrize("beyond", [1, 3])
def test_special_tokens_without_a_row_load_and_are_refused_only_in_a_conversation(
    name, beyond, tmp_path
):
    def change(fields):
        first = 1 + max(
            *fields["model"]["vocab"].values(), *(t["id"] for t in fields["added_tokens"])
        )
        for number in range(beyond):
            fields["added_tokens"].append(token(f"<image {number}>", first + number, True))

    tokenizer, library = read(tmp_path, name, change, beyond)
    for text in [*TEXTS, "<image 0> text"]:
        expected = library.encode(text, add_special_tokens=False).ids
        assert [tokenizer.original_ids[i] for i in tokenizer.encode(text)] == expected
    assert max(tokenizer.special_ids.values()) < tokenizer.vocab_size
    with pytest.raises(UserError, match=r"special token '<image 0>', id \d+, .* has no row"):
        tokenizer.encode_chat(["a <image 0> b"])
    tokenizer.save(tmp_path / "saved.json")
    assert Tokenizer.load(tmp_path / "saved.json") == tokenizer
    longer = extended_vocabulary.extended(tokenizer, base_tokenizers.HUNGARIAN, 8)
    ids = {library.token_to_id(f"<image {number}>") for number in range(beyond)}
    new = {longer.original_ids[i] for i in range(len(tokenizer.tokens), len(longer.tokens))}
    assert not ids & new and np.array_equal(
        [longer.original_ids[i] for i in longer.encode("The dog")],
        [tokenizer.original_ids[i] for i in tokenizer.encode("The dog")],
    )


@pytest.mark.parametrize("name", ["qwen", "mistral"])
def test_a_token_of_texts_without_a_row_is_refused(name, tmp_path):
    def change(fields):
        numbers = [*fields["model"]["vocab"].values(), *(t["id"] for t in fields["added_tokens"])]
        fields["added_tokens"].append(token("<tool>", 1 + max(numbers), False))

    with pytest.raises(UserError, match=r"token '<tool>' has the id \d+; legal .* at most"):
        read(tmp_path, name, change, rows_less=1)


@pytest.mark.parametrize("method", ["encode", "encode_batch", "encode_prompts", "encode_chat"])
@pytest.mark.parametrize("text", ["\ud83d", "end \udfff", "a\n\ud800b \N{GRINNING FACE}"])
def test_a_text_with_half_a_character_is_refused_everywhere(method, text):
    tokenizer = byte_tokenizer(300)
    argument = text if method == "encode" else ["whole", text]
    name = "text" if method == "encode" else r"texts\[1\]"
    with pytest.raises(UserError, match=f"{name} has an unpaired surrogate"):
        getattr(tokenizer, method)(argument)
    with pytest.raises(UserError, match=r"texts\[1\] has an unpaired surrogate"):
        Tokenizer.from_texts(["whole", text], 260)
