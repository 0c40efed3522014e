"""Tokenizers of Hugging Face directories, from the text that `tokenizer_json` gives.

All kinds are read. BPE is read by its merges if it is byte-level, as GPT-2's, Llama 3's and Qwen's,
or has byte fallback, as Llama 2's and Mistral's, whose tokens are characters, with U+2581 for a
space and <0xHH> for a byte. Of others, such as WordLevel, Unigram and WordPiece, each token is what
the decoder of the file writes for it.

Hugging Face vocabularies may have special tokens at any id. In this project the ids of text come
first and the end-of-text id is last, so an import reorders the vocabulary. An imported
tokenizer.json is stored unchanged: it encodes and decodes, and an export writes it back with its
original ids.
"""

import dataclasses
import json
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers

from sparse_dataflow.data import tokenizer_library
from sparse_dataflow.data.tokenizer import (
    GPT2_VOCAB_SIZE,
    Tokenizer,
    from_bytes,
    gpt2_tokenizer,
    id_tokenizer,
    to_byte_alphabet,
)
from sparse_dataflow.data.tokenizer_library import BYTE_TOKEN, Identity
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import special_tokens, tokenizer_json
from sparse_dataflow.interchange.tokenizer_json import END_OF_TEXT, FILE

_LOG = logging.getLogger(__name__)
_SPACE = "\u2581"
_ALPHABET = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")

_SENTENCE = "The cat's 12 caf\u00e9s,  (it) said:\n\tNO!"


class Read(NamedTuple):
    """An imported tokenizer and the order of its ids.

    Attributes:
      tokenizer: tokenizer with the model's vocabulary size.
      order: the Hugging Face id of each id of `tokenizer`, int [vocab_size].
    """

    tokenizer: Tokenizer
    order: np.ndarray


def read(folder: Path, config: json_files.JsonObject) -> Read:
    """Reads the tokenizer of a Hugging Face directory, with its special tokens and other files.

    Args:
      folder: folder with tokenizer.json, or vocab.json and merges.txt, or vocab.txt. Without
        these files, a model with GPT-2's 50,257 tokens gets GPT-2's tokenizer.
      config: fields of its config.json.

    Raises:
      UserError: the tokenizer is missing or damaged, or needs a class of transformers.
    """
    folder, size = Path(folder), config["vocab_size"]
    path = tokenizer_json.source(folder)
    if path is None and size == GPT2_VOCAB_SIZE:
        _LOG.warning("%s has no tokenizer: GPT-2's is used, for its 50,257 tokens", folder)
        return Read(gpt2_tokenizer(), np.arange(size))
    if path is None:
        raise UserError(
            f"{folder} has no tokenizer: neither {tokenizer_json.LEGAL}. AutoTokenizer."
            f"from_pretrained(DIR).save_pretrained(DIR) of transformers makes {FILE} of other "
            "files, such as SentencePiece's."
        )
    files = special_tokens.read_files(folder)
    generation, settings = (
        special_tokens.fields_of(files, name, folder)
        for name in (special_tokens.GENERATION, special_tokens.SETTINGS)
    )
    names = tokenizer_json.names(path, files)
    template = special_tokens.chat_template(files, names, folder)
    try:
        parsed = _parsed(tokenizer_json.text_of(path, files), names)
        vocab = parsed.vocab
        if not all(type(number) is int and number >= 0 for number in vocab.values()):
            raise ValueError("each id must be a whole number of 0 or more")
        if sorted(vocab.values()) != sorted(set(vocab.values())):
            raise ValueError("two tokens share an id")
        ends = special_tokens.ends(config, generation, names, vocab, END_OF_TEXT, folder)
        result = _reorder(parsed, size, config, ends[0])
        result.tokenizer.validate_original()
        engine = tokenizer_library.from_text(parsed.original)
        probe = _probe(engine, result.tokenizer, folder) if parsed.certain else "a"
        prefix = special_tokens.prefix(engine, settings, names, ends[0], folder, probe)
        start = special_tokens.start(config, generation, names, vocab)
        tokenizer = dataclasses.replace(result.tokenizer, chat_template=template)
        identity = _identity(tokenizer, prefix, ends, start, files, engine)
        return Read(dataclasses.replace(tokenizer, identity=identity), result.order)
    except json_files.MALFORMED as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"The tokenizer {path} cannot be read: {error}.") from None
    finally:
        tokenizer_library.fields_of.cache_clear()  # A large one takes 100 MB.


def _probe(engine, tokenizer, folder):
    """Says whether texts come back as they were, and returns a text that has tokens."""

    def encoded(text):
        try:
            with tokenizer_library.failures("encode a text"):
                return engine.encode(text, add_special_tokens=False).ids
        except UserError:  # No token stands for what is unknown.
            return []

    with tokenizer_library.failures("decode tokens"):
        back = engine.decode(encoded(_SENTENCE), skip_special_tokens=True)
    if back != _SENTENCE:
        _LOG.warning(
            "%s: texts do not come back as they were: %r becomes %r; bits per byte count the bytes "
            "of what tokens are decoded to", folder, _SENTENCE, back,
        )  # fmt: skip
    texts = (tokenizer.decode([number]).strip() for number in range(len(tokenizer.tokens)))
    return next((text for text in texts if encoded(text)), "a")


def _identity(tokenizer, prefix, ends, start, files, engine):
    """Returns the identity in the ids of the tokenizer, without what it says anyway.

    Args:
      engine: of the library, for the text of ids.
    """
    ours = tokenizer.ids_from_original
    prefix, ends = (tuple(int(ours[number]) for number in ids) for ids in (prefix, ends))
    ends = () if ends == (tokenizer.eot_id,) else ends
    begins_so = prefix or start is None or ours[start] == tokenizer.eot_id
    start = None if begins_so else int(ours[start])
    identity = Identity(prefix, ends, start)
    if special_tokens.SETTINGS in files:
        # An export that has the same settings without this file does not need it.
        given = json_files.parse(files[special_tokens.SETTINGS].decode("utf-8-sig"))
        plain = dataclasses.replace(tokenizer, identity=identity)
        if given == _settings(plain, given.get("model_max_length"), engine):
            files = {n: content for n, content in files.items() if n != special_tokens.SETTINGS}
    contents = ((name, content.decode("latin-1")) for name, content in sorted(files.items()))
    return dataclasses.replace(identity, files=tuple(contents))


class _Parsed(NamedTuple):
    """The vocabulary of a tokenizer.

    Attributes:
      vocab: id of each token.
      merges: pairs of tokens.
      specials: special tokens.
      texts: tokens that are text although no merge makes them.
      spell: returns the bytes of a token in the byte alphabet.
      original: text of its tokenizer.json.
      certain: tokens that are text even if config.json names them as special.
    """

    vocab: dict[str, int]
    merges: Sequence[tuple[str, ...]]
    specials: set[str]
    texts: set[str]
    spell: Callable[[str], str]
    original: str
    certain: Collection[str] = ()


def _parsed(original, names):
    """Returns the vocabulary of a tokenizer.json."""
    fields = tokenizer_library.fields_of(original)
    model = fields["model"]
    fallback = bool(model.get("byte_fallback"))
    if not tokenizer_library.joins_bytes(fields):
        return _parsed_by_library(original, fields, names)
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    vocab = dict(model["vocab"])
    specials, texts = set(), set(vocab) if fallback or model.get("ignore_merges") else set()
    for token in fields.get("added_tokens") or ():
        name, number = token["content"], token["id"]
        vocab.pop(name, None)
        if token.get("special"):
            specials.add(name)
        else:
            name = name if fallback else to_byte_alphabet(name)
            texts.add(name)
        if vocab.get(name, number) != number:
            raise ValueError(f"two tokens have the text {token['content']!r}")
        vocab[name] = number
    spell = spell_fallback if fallback else str
    return _Parsed(vocab, merges, specials, texts - specials, spell, original)


def _parsed_by_library(original, fields, names):
    """Returns the vocabulary of a tokenizer.json whose tokens are what its decoder writes."""
    vocab = tokenizer_library.vocabulary(fields)
    named = {tokenizer_library.unknown_token(fields), END_OF_TEXT, *names.values()}
    specials = tokenizer_library.special_tokens(original) | (named & set(vocab))
    texts = {token: number for token, number in vocab.items() if token not in specials}
    try:
        engine = tokenizer_library.from_text(original)
    except ValueError as error:
        raise ValueError(f"its original cannot be read ({error})") from None
    written = tokenizer_library.written(engine, list(texts.values()))
    spelled = {token: _spelled(token, text) for token, text in zip(texts, written)}
    return _Parsed(vocab, (), specials, set(texts), spelled.__getitem__, original, set(texts))


def _spelled(token, text):
    """Returns the bytes of a token, of which the library writes a text."""
    if BYTE_TOKEN.fullmatch(token) and token not in text:
        return from_bytes(bytes.fromhex(token[3:5]))
    if "\ufffd" in text and set(token) <= _ALPHABET:
        return token  # Part of a character, of a byte-level tokenizer.
    return to_byte_alphabet(text)


def spell_fallback(token):
    """Returns the bytes of a token of a tokenizer with byte fallback, in the byte alphabet."""
    if BYTE_TOKEN.fullmatch(token):
        return from_bytes(bytes.fromhex(token[3:5]))
    return to_byte_alphabet(token.replace(_SPACE, " "))


def _reorder(parsed, size, config, end):
    vocab, merges, specials, texts, spell, original, certain = parsed
    config = {n: set(special_tokens.ids_of(config.get(n), n)) for n in _SPECIAL_IDS}
    # Padding and the begin of text may be a text token, which stays text; the end may not.
    made = _ALPHABET | {token for left, right in merges for token in (left, right, left + right)}
    made = made.union(certain)
    special_ids = {
        number
        for token, number in vocab.items()
        if token not in made
        and not BYTE_TOKEN.fullmatch(token)
        and any(number in numbers for numbers in config.values())
    } | {end}
    # A token is text if it is a byte, the result of a merge, or listed as text by the file.
    text_tokens = {left + right for left, right in merges} | _ALPHABET | texts
    text = sorted(
        (number, token)
        for token, number in vocab.items()
        if token in text_tokens and token not in specials and number not in special_ids
    )
    tokenizer_library.refuse_beyond(vocab, specials, size)
    if not text:
        unknown = id_tokenizer(size)
        if _plain_vocab(unknown) == vocab:
            return Read(unknown, np.arange(size))
        raise ValueError("all of its tokens are special; legal: at least one token of text")
    text_ids = {number for number, _ in text}
    name = next((token for token, number in vocab.items() if number == end), None)
    if not 0 <= end < size or (name in made and name not in specials):
        has = f", which is the text token {name!r}" if name in made else ""
        raise ValueError(
            f"its end of text has the id {end}{has}; legal: an id under {size} that no text token "
            f"has, or of the eos_token that {special_tokens.SETTINGS} names"
        )
    rest = [number for number in range(size) if number not in text_ids and number != end]
    order = np.array([number for number, _ in text] + rest + [end])
    vocabulary = {token for _, token in text}
    for token in (token for merge in merges for token in merge if token not in vocabulary):
        raise ValueError(f"a merge has the token {token!r}, which is not in the vocabulary")
    tokens = tuple(spell(token) for _, token in text)
    spelling = {token: spell(token) for token in {token for merge in merges for token in merge}}
    spelled = tuple((spelling[left], spelling[right]) for left, right in merges)
    tokenizer = Tokenizer(tokens, spelled, size, original, tuple(order.tolist()))
    in_order = np.array_equal(order, np.arange(size))
    if in_order and original == plain_text(tokenizer):  # `write` gives the same text without it.
        tokenizer = Tokenizer(tokens, spelled, size)
    return Read(tokenizer, order)


def write(folder: Path, tokenizer: Tokenizer, context: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json for `AutoTokenizer`.

    An imported tokenizer is written byte for byte with its original ids; any other keeps its ids.

    Args:
      folder: existing folder.
      context: sequence length of the training, in tokens.
    """
    text, identity = tokenizer.original or plain_text(tokenizer), tokenizer.identity
    (folder / FILE).write_bytes(text.encode())
    files = {n: c.encode("latin-1") for n, c in identity.files if n in special_tokens.FILES}
    if special_tokens.SETTINGS not in files:
        files[special_tokens.SETTINGS] = special_tokens.as_json(_settings(tokenizer, context))
    elif tokenizer.chat_template != special_tokens.chat_template(
        files, special_tokens.names(files, folder), folder
    ):
        files[special_tokens.TEMPLATE] = getattr(tokenizer.chat_template, "text", "").encode()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _settings(tokenizer, context, engine=None):
    """Returns the fields of a tokenizer_config.json of a tokenizer that was imported without."""
    if not tokenizer.original:
        names, space = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT), False
    else:
        engine = engine or tokenizer_library.from_text(tokenizer.original)
        named = {"bos_token": tokenizer.start_id, "eos_token": tokenizer.eot_id}
        texts = {n: engine.id_to_token(tokenizer.original_ids[i]) for n, i in named.items()}
        names = {name: text for name, text in texts.items() if text is not None}
        if tokenizer.chat_template:
            # A template renders the names that it was imported with, and no others.
            names = {}
        space = _adds_prefix_space(tokenizer_library.fields_of(tokenizer.original)["pre_tokenizer"])
    return special_tokens.settings_of(names, context, space, tokenizer.chat_template)


def _adds_prefix_space(pre_tokenizer):
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    return any(step.get("add_prefix_space", False) for step in steps)


def plain_text(tokenizer):
    """Returns a tokenizer.json of the tokens and merges, with GPT-2's settings."""
    fields = tokenizer_json.byte_level(_plain_vocab(tokenizer), tokenizer.merges)
    fields["added_tokens"] = [tokenizer_json.added_token(tokenizer.eot_id, END_OF_TEXT, True)]
    return json.dumps(fields, ensure_ascii=False)


def _plain_vocab(tokenizer):
    return {t: n for n, t in enumerate(tokenizer.tokens)} | {END_OF_TEXT: tokenizer.eot_id}
