"""Tokenizers that are no BPE of bytes work as the library's, whose decoder says what tokens are."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import DENSE, random_model
from other_tokenizers import ENGLISH, KINDS, SPECIALS, TEXTS, text_of, write

import sparse_dataflow as sd
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.data.corpora import corpus_of_texts
from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.tokenizer import Tokenizer, id_tokenizer
from sparse_dataflow.data.tokens import prepare_tokens
from sparse_dataflow.evaluation.stopping import StreamDecoder
from sparse_dataflow.evaluation.tasks import text as text_tasks
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import extended_vocabulary, huggingface, tokenizer_files
from sparse_dataflow.interchange.named_tokenizers import named_tokenizer


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Returns (tokenizer, the library's) of each kind."""
    result = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp("tokenizers") / kind
        library, config = write(folder, kind)
        result[kind] = tokenizer_files.read(folder, config).tokenizer, library
    return result


def theirs(tokenizer, ids):
    return [tokenizer.original_ids[number] for number in ids]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_have_the_ids_text_and_bytes_of_the_library(kind, imported, tmp_path):
    tokenizer, library = imported[kind]
    text = TEXTS.get(kind, ENGLISH[0])
    ids = tokenizer.encode(text)
    assert theirs(tokenizer, ids) == library.encode(text).ids
    assert tokenizer.decode(ids) == text
    # A decoder leaves out one space, of the first word or the last one.
    assert tokenizer.token_bytes[ids].sum() - len(text.encode()) in (0, 1)
    assert tokenizer.original_ids[tokenizer.eot_id] == library.token_to_id("[END]")
    tokenizer.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json") == tokenizer


@pytest.mark.parametrize(
    "kind, token, size",
    [
        ("chess", "e2e4", 5),
        ("protein", "A", 1),
        ("unigram", "\u2581quick", 6),
        ("unigram", "\u2581", 1),
        ("unigram_bytes", "<0xE3>", 1),
        ("unigram_bytes", "x", 1),
        ("wordpiece", "the", 4),
        ("wordpiece", "##u", 1),
        ("wordpiece", ",", 1),  # The decoder puts no space in front of it.
        ("gpt1", "the</w>", 4),
        ("gpt1", "t", 1),
        ("byte_level_words", "\u00e9", 1),
        ("byte_level_words", "\u0120quick", 6),
        ("chess", "[UNK]", 0),
    ],
)
def test_a_token_has_the_bytes_that_it_adds_to_a_text(kind, token, size, imported):
    tokenizer, library = imported[kind]
    number = int(tokenizer.ids_from_original[library.token_to_id(token)])
    assert tokenizer.token_bytes[number] == len(tokenizer.token_to_bytes(number)) == size


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_the_text_of_all_ids_at_once(kind, imported, data):
    tokenizer, library = imported[kind]

    def decoded(ids):
        ids = theirs(tokenizer, [number for number in ids if number < len(tokenizer.tokens)])
        return library.decode(ids, skip_special_tokens=False)

    number = st.integers(0, tokenizer.eot_id - 1)
    some_bytes = st.integers(0, min(255, tokenizer.eot_id - 1))  # Mostly no whole characters.
    before = data.draw(st.sampled_from([[], tokenizer.encode(TEXTS.get(kind, "The dog")).tolist()]))
    ids = data.draw(st.lists(number | some_bytes, max_size=12))
    decoder = StreamDecoder(tokenizer, before=before)
    written = "".join(map(decoder.add, ids)) + decoder.end("length")
    whole = decoded([*before, *ids])
    if kind == "unigram_bytes" and "\ufffd" in whole:
        # Of bytes in a row the library writes none once one of them is of no character. A stream
        # has written those before it already.
        return
    assert decoded(before) + written == whole
    alone = StreamDecoder(tokenizer)
    assert "".join(map(alone.add, ids)) + alone.end("length") == tokenizer.decode(ids)


def test_a_line_break_of_a_byte_is_written_and_ends_a_text_at_once(imported):
    tokenizer, library = imported["unigram_bytes"]
    row = lambda *names: [int(tokenizer.ids_from_original[library.token_to_id(n)]) for n in names]  # noqa: E731
    decoder = StreamDecoder(tokenizer, before=row("\u2581dog"))
    assert [decoder.add(n) for n in row("<0x0A>", "<0xC3>", "<0xA9>", "<0x0A>")] == [
        "\n",
        "",
        "\u00e9",
        "\n",
    ]
    stopping = StreamDecoder(tokenizer, ["\n"])
    for number in row("\u2581dog", "<0x0A>", "<0x0A>"):
        stopping.add(number)
    assert stopping.stopped_by == "stop" and len(stopping.tokens) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_ask_for_passages_of_the_text(kind, imported):
    """Which a tokenizer may not write as they are."""
    tokenizer, _ = imported[kind]
    words = " ".join([TEXTS[kind]] if kind in ("chess", "protein") else ENGLISH[:3]).split()
    rng = np.random.default_rng(0)
    rows = [" ".join(rng.choice(words, 9)) for _ in range(40)]
    document = Document("d", "\n".join(rows))
    cuts = tokenizer.cuts(document.text)
    assert len(cuts) == len(tokenizer.encode(document.text)) + 1
    builders = {
        "continuation": text_tasks.continuation(tokenizer, 24),
        "cloze": text_tasks.cloze(tokenizer, 24, text_tasks.WordFrequencies([document])),
        "last_word": text_tasks.last_word(tokenizer, 24),
    }
    for name, build in builders.items():
        items = list(itertools.islice(build(document, np.random.default_rng(1)), 20))
        assert items or kind in ("chess", "protein"), name
        for item in items:
            assert item.context + item.choices[item.answer] in document.text, name


def test_what_a_tokenizer_cannot_say_is_counted(imported, tmp_path, caplog):
    tokenizer, _ = imported["chess"]
    assert tokenizer.lost(["e2e4 h7h8"], [tokenizer.encode("e2e4 h7h8")]) == {"[UNK]": 1}
    tokenizer, _ = imported["characters"]
    text = "\u00e9t\u00e9 and the dog \u4e2d"
    assert "t and the dog " in tokenizer.decode(tokenizer.encode(text))
    assert tokenizer.lost([text], [tokenizer.encode(text)]) == {"\u00e9": 2, "\u4e2d": 1}
    caplog.clear()
    prepare_tokens(corpus_of_texts([text] * 20), tokenizer, tmp_path / "cache")
    assert "'\u00e9' (" in caplog.text and "'\u4e2d' (" in caplog.text and "all of" in caplog.text
    tokenizer, _ = imported["unigram_bytes"]
    assert not tokenizer.lost([text], [tokenizer.encode(text)])


def test_words_without_an_unknown_token_load_and_refuse_other_words(tmp_path):
    folder = tmp_path / "model"
    _, config = write(folder, "chess")
    fields = json.loads(text_of("chess"))
    fields["model"]["unk_token"] = "<unk>"
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    tokenizer = tokenizer_files.read(folder, config).tokenizer
    assert tokenizer.decode(tokenizer.encode("e2e4 e7e5")) == "e2e4 e7e5"
    with pytest.raises(UserError, match=r"The tokenizer cannot encode a text: .*token"):
        tokenizer.encode("e2e4 h7h8")


def test_a_tokenizer_that_changes_texts_says_so_at_import(tmp_path, caplog):
    folder = tmp_path / "model"
    _, config = write(folder, "wordpiece")
    tokenizer_files.read(folder, config)
    assert "do not come back as they were" in caplog.text and "becomes 'the cat" in caplog.text
    caplog.clear()
    write(tmp_path / "bytes", "byte_level_words")
    tokenizer_files.read(
        tmp_path / "bytes", json.loads((tmp_path / "bytes/config.json").read_text())
    )
    assert "come back" not in caplog.text


@pytest.mark.parametrize("named, expected", [("eos_token", "1-0"), ("sep_token", "1-0"), ("", "")])
def test_an_end_beyond_the_vocabulary_does_not_count(named, expected, tmp_path, caplog):
    folder = tmp_path / "model"
    library, config = write(folder, "chess")
    (folder / "tokenizer_config.json").write_text(json.dumps({named: expected} if named else {}))
    fields = {**config, "eos_token_id": 50256}
    if not expected:
        with pytest.raises(UserError, match=r"no file names the end of text; legal.* from 0 to 8"):
            tokenizer_files.read(folder, fields)
        return
    tokenizer = tokenizer_files.read(folder, fields).tokenizer
    assert tokenizer.original_ids[tokenizer.eot_id] == library.token_to_id(expected)
    assert "[50256] are not in the vocabulary of 9" in caplog.text and "'1-0'" in caplog.text


def test_a_text_token_is_no_end_unless_a_file_names_it(tmp_path):
    folder = tmp_path / "model"
    library, config = write(folder, "chess")
    fields = {**config, "eos_token_id": library.token_to_id("e2e4")}
    with pytest.raises(UserError, match=r"which is the text token 'e2e4'; legal: .* eos_token"):
        tokenizer_files.read(folder, fields)


def test_a_vocabulary_of_lines_is_that_of_bert(tmp_path, caplog):
    lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"ACDEF", "##C"]
    (tmp_path / "vocab.txt").write_text("\n".join(lines) + "\n")
    config = {"vocab_size": 11, "eos_token_id": 50256}
    tokenizer = tokenizer_files.read(tmp_path, config).tokenizer
    # BertTokenizer makes letters lower case if no file says otherwise.
    assert theirs(tokenizer, tokenizer.encode("A C AC D x")) == [1] * 5
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    tokenizer = tokenizer_files.read(tmp_path, config).tokenizer
    assert tokenizer.original_ids[tokenizer.eot_id] == 3  # [SEP]
    assert theirs(tokenizer, tokenizer.encode("A C AC D x")) == [5, 6, 5, 10, 7, 1]
    assert tokenizer.decode(tokenizer.encode("A C AC D")) == "A C AC D"
    assert theirs(tokenizer, tokenizer.encode_prompts(["A"])[0]) == [2, 5]  # Behind [CLS].
    named = named_tokenizer(str(tmp_path))
    assert theirs(named, named.encode("D AC")) == [7, 5, 10] and named.eot_id == tokenizer.eot_id
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "EsmTokenizer"}')
    with pytest.raises(UserError, match=r"EsmTokenizer without a tokenizer.json; legal: Bert"):
        tokenizer_files.read(tmp_path, config)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "vocab.txt").write_text("[UNK]\n[SEP]\n")
    with pytest.raises(UserError, match="all of its tokens are special"):
        tokenizer_files.read(tmp_path, {"vocab_size": 2})
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(UserError, match=r"nor vocab.txt. AutoTokenizer.from_pretrained\(DIR\)"):
        tokenizer_files.read(tmp_path, config)


@pytest.mark.parametrize("kind", ["protein", "gpt1"])
def test_a_model_generates_and_is_exported_with_its_files(kind, tmp_path):
    folder, place = tmp_path / "model", tmp_path / "tokenizer"
    _, config = write(place, kind)
    size = config["vocab_size"]
    model = dataclasses.replace(DENSE, vocab_size=size)
    weights = merged(*random_model(model))
    huggingface.write(folder, "dense", model, weights, id_tokenizer(size), context=16, card="")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIALS[1]}))
    (folder / "tokenizer.json").write_bytes(text_of(kind).encode())
    fields = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(fields))
    loaded, pieces = sd.load(folder), []
    prompt = TEXTS[kind][:9]
    [text] = sd.generate(
        loaded, [prompt], max_new_tokens=5, on_token=lambda _, piece: pieces.append(piece)
    )
    tokens = [*loaded.tokenizer.encode(prompt).tolist(), *text.tokens]
    assert "".join(pieces) == text.text
    assert prompt + text.text == loaded.tokenizer.decode(tokens)
    exported = sd.save(loaded, tmp_path / "exported", form="dense")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (exported / name).read_bytes() == (folder / name).read_bytes()
    again = sd.load(exported)
    np.testing.assert_array_equal(sd.logits(again, [tokens]), sd.logits(loaded, [tokens]))


def test_a_vocabulary_of_words_is_not_extended(imported):
    with pytest.raises(
        UserError, match=r"extend_vocabulary=3 does not work .* legal for byte-level"
    ):
        extended_vocabulary.extended(imported["chess"][0], ENGLISH, 3)


def test_a_tokenizer_of_ids_may_have_two(tmp_path):
    assert id_tokenizer(2).token_bytes.tolist() == [1, 0]
    id_tokenizer(13).save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json") == id_tokenizer(13)
