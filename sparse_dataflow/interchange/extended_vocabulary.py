"""More tokens for the vocabulary of a trained model, learned from the text that it adapts to.

BPE training goes on where the tokenizer's own ended: words are first cut into its tokens, and new
merges join those.  They come after all old merges, so a text without a new merge keeps its ids, and
the new tokens of a text always replace whole old ones.  Appending the merges of another tokenizer,
trained on its own, has neither property.
"""

import collections
import dataclasses
import itertools
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers

from sparse_dataflow.data import cache, tokenizer_library
from sparse_dataflow.data import tokenizer as plain
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.data.tokenizer_library import BYTE_TOKEN
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError, escaped
from sparse_dataflow.interchange import special_tokens, tokenizer_files
from sparse_dataflow.interchange.sparse_form import CONFIG

TRAINING_VERSION = 1
"""Raise it when training changes."""

OF_OLD_VOCABULARY = ("vocab.json", "merges.txt", "tokenizer.model")
"""Files with the old tokens alone, which an export of more tokens leaves out."""

COVERAGE = 0.9995
"""Share of the characters without a token that get one (SentencePiece's character coverage)."""

_LOG = logging.getLogger(__name__)
_FIRST = 0x10000
"""Character that stands for the first old token while merges are learned."""
_SPACE = "\u2581"
_BATCH = 256


class _Learned(NamedTuple):
    """What is added to a vocabulary.

    Attributes:
      tokens: new tokens as tokenizer.json spells them.
      merges: pairs of tokens, in order.
    """

    tokens: list[str]
    merges: list[tuple[str, str]]


def learned(base: Tokenizer, corpus: Corpus, count: int, cache_dir: Path) -> Tokenizer:
    """Returns a tokenizer with more tokens from the train split, or loads it from the cache.

    Of a mixture of corpora the first one is read.

    Args:
      base: byte-level BPE, or BPE with byte fallback.
      corpus: of the texts.
      count: tokens to add, at most.

    Raises:
      UserError: the texts give no token, or the cache cannot be written.
    """
    source = corpus.mixture[0][1] if corpus.mixture else corpus

    def learn(path):
        name = escaped(source.name)
        _LOG.info("learning %d more tokens from the corpus %s", count, name)
        extended(base, plain.training_texts(source), count).save(path)

    origin = {
        "code": [TRAINING_VERSION, COVERAGE],
        "count": count,
        "base": base.content_hash,
        "texts": plain.texts_read(source),
    }
    path = cache.derive(cache_dir, "tokenizers", "more", origin, learn, ".json").path
    cached = Tokenizer.load(path)
    # The cache knows no files of the model, by which its key does not differ.
    files = tuple((n, c) for n, c in base.identity.files if n not in OF_OLD_VOCABULARY)
    identity = dataclasses.replace(cached.identity, files=files)
    return dataclasses.replace(cached, identity=identity)


def extended(base: Tokenizer, texts: Iterable[str], count: int) -> Tokenizer:
    """Returns a tokenizer with up to `count` more tokens; see `learned`.

    The tokens of `base` keep their ids in tokenizer.json.  New ones get the ids after the largest
    that is in use, which may be rows that a padded vocabulary has already.

    Raises:
      UserError: the texts give no token, or `base` is not BPE of bytes.
    """
    original = base.original or tokenizer_files.plain_text(base)
    fields = json_files.parse(original)
    if not tokenizer_library.joins_bytes(fields):
        raise UserError(
            f"data.extend_vocabulary={count} does not work with the tokenizer of this model; legal "
            "for byte-level BPE and BPE with byte fallback."
        )
    new = _learn(fields, list(plain.short_words(iter(texts))), count)
    if not new.tokens:
        raise UserError(
            f"data.extend_vocabulary={count} finds no pair of tokens that is twice in the corpus; "
            "legal: more text, or 0."
        )
    if len(new.tokens) < count:
        _LOG.warning("the corpus gives %d of %d more tokens", len(new.tokens), count)
    ids = base.original_ids or tuple(range(base.vocab_size))
    # A special token may have an id beyond the rows.
    first = 1 + max(*_used(base, fields, ids), *tokenizer_library.vocabulary(fields).values())
    numbers = list(range(first, first + len(new.tokens)))
    text = json.dumps(_with_tokens(fields, new, numbers), ensure_ascii=False)
    size = max(base.vocab_size, first + len(numbers))
    # The order that `Tokenizer` demands: texts, then rows without a token, then the end of a text.
    old_text, rest = ids[: len(base.tokens)], ids[len(base.tokens) : -1]
    taken = {*ids, *numbers}
    rest = tuple(n for n in rest if n not in numbers) + tuple(
        n for n in range(size) if n not in taken
    )
    new_ids = (*old_text, *numbers, *rest, ids[-1])
    spell = tokenizer_files.spell_fallback if _has_fallback(fields) else str
    ours = {number: place for place, number in enumerate(new_ids)}
    move = lambda old: ours[ids[old]]  # noqa: E731
    identity = base.identity
    identity = dataclasses.replace(
        identity,
        prefix=tuple(map(move, identity.prefix)),
        ends=tuple(map(move, identity.ends)),
        start=None if identity.start is None else move(identity.start),
        files=tuple((n, c) for n, c in identity.files if n not in OF_OLD_VOCABULARY),
    )
    tokenizer = dataclasses.replace(
        base,
        tokens=(*base.tokens, *map(spell, new.tokens)),
        merges=(*base.merges, *((spell(left), spell(right)) for left, right in new.merges)),
        vocab_size=size,
        original=text,
        original_ids=new_ids,
        identity=identity,
    )
    tokenizer.validate_original()
    return tokenizer


def parts(base: Tokenizer, tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the ids in `base` of the old tokens that each token of `extended` joins."""
    # Of two tokens of equal bytes the later one is a character, the other a byte.
    old = {token: number for number, token in enumerate(base.tokens)}
    joined: dict[str, tuple[str, str]] = {}
    for left, right in tokenizer.merges[len(base.merges) :]:
        joined.setdefault(left + right, (left, right))

    def of(token):
        if token in old:
            return [old[token]]
        if token in joined:
            left, right = joined[token]
            return of(left) + of(right)
        return [old[byte] for byte in token]  # A new character, of bytes so far.

    return [of(token) for token in tokenizer.tokens[len(base.tokens) :]]


class Fertility(NamedTuple):
    """How a tokenizer cuts texts.

    Attributes:
      tokens_per_word: tokens for each word between white space.
      bytes_per_token: UTF-8 bytes for each token.
    """

    tokens_per_word: float
    bytes_per_token: float


def fertility(tokenizer: Tokenizer, texts: Iterable[str]) -> Fertility:
    """Returns the fertility of a tokenizer on texts; zeros where they are empty."""
    words = count = size = 0
    for batch in _batches(texts):
        words += sum(len(text.split()) for text in batch)
        size += sum(len(text.encode()) for text in batch)
        count += sum(map(len, tokenizer.encode_batch(batch)))
    return Fertility(count / max(words, 1), size / max(count, 1))


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    texts = iter(texts)
    while batch := list(itertools.islice(texts, _BATCH)):
        yield batch


def _has_fallback(fields) -> bool:
    return bool(fields["model"].get("byte_fallback"))


def _used(base, fields, ids) -> set[int]:
    """Returns the ids that a token has, or a file of the model names."""
    used = {*tokenizer_library.vocabulary(fields).values(), ids[-1]}
    special = {*base.identity.prefix, *base.identity.ends}
    used |= {ids[number] for number in special}
    for name in (CONFIG, special_tokens.GENERATION):
        for field, value in json_files.parse(base.identity.content(name) or b"{}").items():
            if field.endswith("_token_id"):
                used |= set(special_tokens.ids_of(value, field))
    return {number for number in used if number < base.vocab_size}


def _with_tokens(fields, new: _Learned, numbers) -> json_files.JsonObject:
    """Returns the fields of a tokenizer.json with more tokens and merges."""
    model = fields["model"]
    as_text = bool(model["merges"]) and isinstance(model["merges"][0], str)
    merges = [" ".join(pair) if as_text else list(pair) for pair in new.merges]
    # The library numbers added tokens that the model does not have anew, after all of the model's.
    vocab = {**tokenizer_library.vocabulary(fields), **dict(zip(new.tokens, numbers, strict=True))}
    return {**fields, "model": {**model, "vocab": vocab, "merges": [*model["merges"], *merges]}}


def _learn(fields, texts: list[str], count: int) -> _Learned:
    characters = _characters(fields, texts, count // 2) if _has_fallback(fields) else []
    if characters:  # They are symbols of the words from here on.
        first = 1 + max(tokenizer_library.vocabulary(fields).values())
        numbers = range(first, first + len(characters))
        fields = _with_tokens(fields, _Learned(characters, []), numbers)
    words, symbols = _words(fields, texts)
    wanted, more = count - len(characters), count
    # Some merges make only tokens that exist already, so `count` of them may give too few.
    while True:
        pairs = _merges(words, len(symbols), more)
        new = _named(pairs, symbols, set(tokenizer_library.vocabulary(fields)), wanted)
        if len(new.tokens) >= wanted or len(pairs) < more:
            return _Learned(characters + new.tokens, new.merges)
        more *= 2


def _characters(fields, texts, most: int) -> list[str]:
    """Returns the characters, so far of byte tokens, that are to be tokens, most frequent first."""
    engine = _engine(fields)
    values = {
        n: int(t[3:5], 16)
        for t, n in tokenizer_library.vocabulary(fields).items()
        if BYTE_TOKEN.fullmatch(t)
    }
    counts: collections.Counter[str] = collections.Counter()
    for ids, _ in _encoded(engine, texts):
        # Other tokens become line feeds, so that bytes on two sides of one make no character.
        run = bytes(values.get(number, 10) for number in ids)
        counts.update(run.decode("utf-8", "ignore"))
    # Equal counts are ordered by character, so that every machine chooses the same.
    rare = sorted((-n, c) for c, n in counts.items() if c.isprintable() and n > 1)
    total, covered, chosen = -sum(n for n, _ in rare), 0, []
    for number, character in rare[:most]:
        if covered >= COVERAGE * total:
            break
        covered -= number
        chosen.append(character)
    return chosen


def _engine(fields):
    engine = tokenizer_library.from_text(json.dumps(fields, ensure_ascii=False))
    # The texts are data: "<|end|>" in one is text. Without dropout, a text is always cut alike.
    engine.encode_special_tokens = True
    engine.model.dropout = None
    return engine


def _encoded(engine, texts) -> Iterator[tuple[list[int], list[int | None]]]:
    """Yields the ids of each text and the word that each is of."""
    for batch in _batches(texts):
        with tokenizer_library.failures("encode a text"):
            encoded = engine.encode_batch(batch, add_special_tokens=False)
        yield from ((one.ids, one.word_ids) for one in encoded if one.ids)


def _words(fields, texts) -> tuple[list[str], list[str]]:
    """Cuts texts into the tokens of a tokenizer.json, inside words that no merge may leave.

    Returns:
      A line for each text, with a line break between words, whose characters stand for
      tokens from _FIRST on; and the token that each stands for.
    """
    vocab = tokenizer_library.vocabulary(fields)
    names = [""] * (max(vocab.values()) + 1)
    for token, number in vocab.items():
        names[number] = token
    added = [token["content"] for token in fields.get("added_tokens") or ()]
    kinds = _kinds(names, set(added), _has_fallback(fields))
    place = np.full(len(names), -1, np.int64)
    symbols: list[str] = []
    lines = []
    for numbers, words in _encoded(_engine(fields), texts):
        ids = np.asarray(numbers, np.int64)
        word = np.asarray([-1 if w is None else w for w in words], np.int64)
        begins = _begins(ids, word, kinds)
        for number in np.unique(ids[place[ids] < 0]):
            place[number] = len(symbols)
            symbols.append(names[number])
        # UTF-32 has four bytes a character, so an array of code points is a text as it is.
        codes = np.insert((place[ids] + _FIRST).astype("<u4"), np.flatnonzero(begins), 10)
        lines.append(codes.tobytes().decode("utf-32-le"))
    return lines, symbols


class _Kinds(NamedTuple):
    """Of each token: whether it is a word alone, whether it begins one, and its sort.

    Attributes:
      alone: bool [tokens].
      starts: bool [tokens].
      sort: int [tokens]; a word has tokens of one sort.
    """

    alone: np.ndarray
    starts: np.ndarray
    sort: np.ndarray


def _kinds(names, added, fallback) -> _Kinds:
    alone = [not name or name in added for name in names]
    if not fallback:  # The pre-tokenizer of a byte-level tokenizer says what a word is.
        nothing = np.zeros(len(names), np.int64)
        return _Kinds(np.array(alone), nothing.astype(bool), nothing)
    alone = [a or bool(BYTE_TOKEN.fullmatch(name)) for a, name in zip(alone, names, strict=True)]
    digits = any(len(name) > 1 and name.isdecimal() for name in names)
    alone = [a or (not digits and n[-1:].isdecimal()) for a, n in zip(alone, names, strict=True)]
    starts = [name.startswith(_SPACE) for name in names]
    sort = [1 if _is_letters(name) else 2 for name in names]
    return _Kinds(np.array(alone), np.array(starts), np.array(sort))


def _is_letters(name) -> bool:
    """Returns whether a token is letters and marks, behind a space or not."""
    return all(c.isalpha() or not (c.isascii() or c.isspace()) for c in name.lstrip(_SPACE))


def _begins(ids, word, kinds: _Kinds) -> np.ndarray:
    """Returns whether each token begins a word, bool [tokens]; the first does."""
    begins = np.ones(len(ids), bool)
    alone, starts, sort = (each[ids] for each in kinds)
    begins[1:] = (
        (word[1:] != word[:-1]) | starts[1:] | alone[1:] | alone[:-1] | (sort[1:] != sort[:-1])
    )
    return begins


def _merges(words: list[str], symbols: int, more: int) -> list[tuple[str, str]]:
    """Returns up to so many merges of the symbols in words, most frequent first."""
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.CharDelimiterSplit("\n")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=symbols + more, min_frequency=2, show_progress=False
    )
    engine.train_from_iterator(words, trainer)
    merges = json_files.parse(engine.to_str())["model"]["merges"]
    pairs = (m.split(" ") if isinstance(m, str) else m for m in merges)
    return [(left, right) for left, right in pairs]


def _named(pairs, symbols, vocab: set[str], most: int) -> _Learned:
    """Returns merges of symbols as merges of tokens, without those that make an old token."""
    names = {chr(_FIRST + place): token for place, token in enumerate(symbols)}
    tokens: dict[str, None] = {}
    merges: dict[tuple[str, str], None] = {}
    for left, right in pairs:
        if left not in names or right not in names:
            continue
        pair = names[left], names[right]
        token = "".join(pair)
        if token in vocab:
            continue
        if token not in tokens:
            if len(tokens) == most:
                break
            tokens[token] = None
        # Another way to a new token is one more merge, and no other token.
        names[left + right] = token
        merges[pair] = None
    return _Learned(list(tokens), list(merges))
