"""More tokens for the kinds of tokenizers that published models have, against the library."""

import json

import base_tokenizers
import numpy as np
import pytest
import tokenizers
from base_tokenizers import AMHARIC, BYTE_LEVEL, ENGLISH, FALLBACK, HUNGARIAN, THAI

from sparse_dataflow.data.tokenizer import Tokenizer, gpt2_tokenizer
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import tokenizer_files
from sparse_dataflow.interchange.extended_vocabulary import extended, fertility, parts

KINDS = (*BYTE_LEVEL, *FALLBACK)
LANGUAGES = {"Hungarian": HUNGARIAN, "Amharic": AMHARIC, "Thai": THAI}
ODD = ["", " ", "🙂 x  y\n\n\tzé 12345", "ሰላም abc ภาษา", "<|im_start|></s><0x41>", "\u2581a"]
TOKENS = 40


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    result = {}
    for kind in KINDS:
        engine, _ = base_tokenizers.write(folder / kind, kind, padding=7)
        config = json.loads((folder / kind / "config.json").read_text())
        result[kind] = engine, tokenizer_files.read(folder / kind, config).tokenizer
    return result


def new_tokens(engine, other):
    old = engine.get_vocab()
    return {token: number for token, number in other.get_vocab().items() if token not in old}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("language", LANGUAGES)
def test_old_ids_and_texts_without_new_tokens_stay_and_texts_return(bases, kind, language):
    engine, base = bases[kind]
    texts = LANGUAGES[language]
    tokenizer = extended(base, texts, TOKENS)
    other = tokenizers.Tokenizer.from_str(tokenizer.original)
    assert engine.get_vocab().items() <= other.get_vocab().items()
    added = new_tokens(engine, other)
    first = max(engine.get_vocab().values()) + 1
    assert sorted(added.values()) == list(range(first, first + TOKENS))
    assert tokenizer.vocab_size == max(base.vocab_size, first + TOKENS)
    assert base.vocab_size < first + TOKENS  # Padding is used first.
    changed = 0
    for text in (*texts, *ENGLISH, *HUNGARIAN, *ODD):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == base.decode(base.encode(text))
        given = np.asarray(tokenizer.original_ids)[ids].tolist()
        other.encode_special_tokens = engine.encode_special_tokens = True
        assert given == other.encode(text, add_special_tokens=False).ids
        before = engine.encode(text, add_special_tokens=False).ids
        if set(given) & set(added.values()):
            changed += 1
            assert len(given) <= len(before)  # A character may have had one byte token.
        else:
            assert given == before
    assert changed
    before, after = fertility(base, texts), fertility(tokenizer, texts)
    assert after.tokens_per_word < before.tokens_per_word / 1.5
    assert after.bytes_per_token > before.bytes_per_token


@pytest.mark.parametrize("kind", KINDS)
def test_each_new_token_joins_old_ones_of_the_same_text(bases, kind):
    _, base = bases[kind]
    tokenizer = extended(base, HUNGARIAN + AMHARIC, TOKENS)
    joined = parts(base, tokenizer)
    assert len(joined) == TOKENS
    for number, ids in enumerate(joined, len(base.tokens)):
        text = b"".join(map(base.token_to_bytes, ids))
        assert tokenizer.token_to_bytes(number) == text
        assert len(ids) > 1 or kind in FALLBACK  # A character may have had one byte token.


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_deterministic_and_survives_being_saved(bases, kind, tmp_path):
    _, base = bases[kind]
    tokenizer = extended(base, HUNGARIAN, TOKENS)
    assert extended(base, HUNGARIAN, TOKENS).content_hash == tokenizer.content_hash
    tokenizer.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json") == tokenizer
    more = extended(tokenizer, THAI, 10)  # Again, for another language.
    assert more.original_ids[len(tokenizer.tokens)] == max(
        tokenizers.Tokenizer.from_str(tokenizer.original).get_vocab().values()
    ) + 1  # fmt: skip
    assert len(more.tokens) == len(tokenizer.tokens) + 10


def test_special_ids_are_those_of_the_same_tokens(bases):
    for kind in KINDS:
        engine, base = bases[kind]
        tokenizer = extended(base, HUNGARIAN, TOKENS)
        other = tokenizers.Tokenizer.from_str(tokenizer.original)
        for one, two in ((base.eot_id, tokenizer.eot_id), *zip(
            base.identity.prefix, tokenizer.identity.prefix, strict=True
        )):  # fmt: skip
            name = engine.id_to_token(base.original_ids[one])
            assert name == other.id_to_token(tokenizer.original_ids[two])
        assert tokenizer.special_ids.keys() == base.special_ids.keys()


def test_gpt2_itself_gets_ids_after_its_end_of_text():
    base = gpt2_tokenizer()
    tokenizer = extended(base, HUNGARIAN, 20)
    assert tokenizer.vocab_size == 50277
    assert tokenizer.original_ids[50256:50276] == tuple(range(50257, 50277))
    assert tokenizer.original_ids[-1] == 50256
    for text in ENGLISH:
        ids = tokenizer.encode(text)
        if ids.max() < 50256:
            assert ids.tolist() == base.encode(text).tolist()


def test_a_corpus_with_few_pairs_gives_fewer_tokens_and_says_so(bases, caplog):
    _, base = bases["gpt2"]
    tokenizer = extended(base, ["zq zq zq"], 500)
    assert 0 < len(tokenizer.tokens) - len(base.tokens) < 5
    assert "of 500 more tokens" in caplog.text


@pytest.mark.parametrize("texts", [[], [""], ["q"]])
def test_texts_without_a_pair_are_refused(bases, texts):
    with pytest.raises(UserError, match=r"finds no pair of tokens .*legal: more text, or 0"):
        extended(bases["gpt2"][1], texts, 10)
