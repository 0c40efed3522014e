"""What other files than tokenizer.json say of tokens counts, whichever form the tokenizer has."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import special_tokens, tokenizer_files, tokenizer_json
from sparse_dataflow.interchange.named_tokenizers import named_tokenizer

TEXT = "the cat sat on the mat"
WORDS = ["[UNK]", "[END]", *dict.fromkeys(TEXT.split())]


def lists(folder):
    engine = byte_level()
    model = json.loads(engine.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(map(" ".join, model["merges"])))
    return len(model["vocab"])


def words(folder):
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return len(WORDS)


def byte_level(prefix_space=False):
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    engine.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=264, initial_alphabet=alphabet, special_tokens=["[END]"], show_progress=False
    )
    engine.train_from_iterator([TEXT] * 9, trainer)
    return engine


def saved(make):
    def write(folder):
        engine = make()
        engine.save(str(folder / "tokenizer.json"))
        return engine.get_vocab_size()

    return write


def word_level():
    vocab = {word: number for number, word in enumerate(WORDS)}
    engine = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.add_special_tokens(["[END]"])
    return engine


def unigram():
    rows = [
        ("[UNK]", 0.0),
        ("[END]", 0.0),
        *((c, -2.0) for c in sorted({*TEXT, "\u2581", *"<>new"})),
    ]
    engine = tokenizers.Tokenizer(models.Unigram(rows, 0))
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    engine.add_special_tokens(["[END]"])
    return engine


FORMS = {
    "lists": lists, "words": words, "byte_level": saved(byte_level),
    "word_level": saved(word_level), "unigram": saved(unigram),
}  # fmt: skip


def decoder(start, gap):
    row = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {
        str(start): {"content": "<new>", "special": False, **row},
        str(start + 1 + gap): {"content": "<|turn|>", "special": True, **row},
    }


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("place", ["added_tokens.json", "added_tokens_decoder"])
@pytest.mark.parametrize("form", FORMS)
def test_added_tokens_are_read_in_every_form(form, place, gap, tmp_path):
    start = FORMS[form](tmp_path)
    settings = {"eos_token": "[END]", "unk_token": "[UNK]", "additional": ["<|turn|>"]}
    ids = {"<new>": start, "<|turn|>": start + 1 + gap}
    if place == "added_tokens.json":
        (tmp_path / place).write_text(json.dumps(ids))
        settings["pad_token"] = "<|turn|>"
    else:
        settings[place] = decoder(start, gap)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"vocab_size": start + 8}
    if gap and form == "unigram":
        with pytest.raises(UserError, match=r"added tokens have the ids .*; legal: \["):
            tokenizer_files.read(tmp_path, config)
        return
    tokenizer = tokenizer_files.read(tmp_path, config).tokenizer
    theirs = lambda ids: [tokenizer.original_ids[number] for number in ids]  # noqa: E731
    assert start in theirs(tokenizer.encode("the <new> cat"))
    assert ids["<|turn|>"] not in theirs(tokenizer.encode("the <|turn|> cat"))
    assert ids["<|turn|>"] in theirs(tokenizer.encode_chat(["the <|turn|> cat"])[0])
    assert named_tokenizer(str(tmp_path)).vocab_size == ids["<|turn|>"] + 1
    # An export has them in tokenizer.json, and says the same when it is read.
    (tmp_path / "out").mkdir()
    tokenizer_files.write(tmp_path / "out", tokenizer, 64)
    again = tokenizer_files.read(tmp_path / "out", config).tokenizer
    assert again == tokenizer


def test_files_that_add_nothing_leave_tokenizer_json_as_it_is(tmp_path):
    engine = byte_level()
    engine.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": "[END]", "added_tokens_decoder": {"0": {"content": "[END]"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "added_tokens.json").write_text('{"[END]": 0}')
    files = special_tokens.read_files(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    assert tokenizer_json.text_of(tokenizer_json.source(tmp_path), files) == text


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "GPT2TokenizerFast", "GPTNeoXTokenizerFast", ""])
@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("setting", [True, False, None])
def test_the_class_says_whether_a_space_comes_first(kind, in_file, setting, tmp_path):
    byte_level(in_file).save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": kind or "PreTrainedTokenizerFast", "eos_token": "[END]"}
    settings |= {} if setting is None else {"add_prefix_space": setting}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = tokenizer_files.read(tmp_path, {"vocab_size": 264}).tokenizer
    first = tokenizer.tokens[tokenizer.encode("the cat")[0]]
    assert first.startswith("\u0120") == (bool(setting) if kind else in_file)


@pytest.mark.parametrize("setting", [True, False, None])
def test_the_class_of_bert_says_whether_letters_become_lower_case(setting, tmp_path):
    vocab = {word: number for number, word in enumerate([*WORDS, "CAT"])}
    engine = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    engine.normalizer = normalizers.BertNormalizer(lowercase=setting is None)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece()
    engine.add_special_tokens(["[END]", "[UNK]"])
    engine.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "BertTokenizer", "eos_token": "[END]"}
    settings |= {} if setting is None else {"do_lower_case": setting}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = tokenizer_files.read(tmp_path, {"vocab_size": len(vocab)}).tokenizer
    [number] = tokenizer.encode("CAT")
    assert tokenizer.original_ids[number] == vocab["CAT" if setting is False else "cat"]


def test_an_end_that_only_generation_config_names_ends_documents(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 9]}')
    tokenizer = named_tokenizer(str(tmp_path))
    assert tokenizer.vocab_size == 264 and tokenizer.original_ids[tokenizer.eot_id] == 0
    assert sorted(tokenizer.original_ids[number] for number in tokenizer.ends) == [0, 9]
