"""The border to the `tokenizers` library, which panics on files and texts that it does not expect.

A panic is a BaseException. Nothing else of the package calls the library with an imported
tokenizer.json.

`Identity` is what a model directory says of its tokens beyond the text of its tokenizer.
"""

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from sparse_dataflow.data.tokenizer_growth import refuse_growth
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError, first_line

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""Name of a token for one byte."""


@contextlib.contextmanager
def failures(activity: str) -> Iterator[None]:
    """Makes each failure of the library in a block a UserError: "The tokenizer cannot ACTIVITY"."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"The tokenizer cannot {activity}: {first_line(error)}.") from None


@functools.lru_cache(maxsize=1)
def fields_of(text: str) -> Any:
    """Returns the value of a tokenizer.json, which must not be changed: it is parsed once, as that
    takes seconds where there are 262,144 tokens.

    Raises:
      ValueError: it is no JSON.
    """
    return json_files.parse(text)


def from_text(text: str) -> Any:
    """Returns the library's tokenizer of a tokenizer.json, which neither cuts nor pads a text.

    Raises:
      ValueError: the library cannot read it, or its steps would make a text endlessly long.
    """
    import tokenizers

    fields = fields_of(text)
    if not isinstance(fields, dict):
        raise ValueError("it is no JSON object")
    refuse_growth(fields)
    with failures("be read"):
        engine = tokenizers.Tokenizer.from_str(text)
        # A file may pad every text to any length.
        engine.no_truncation()
        engine.no_padding()
        return engine


def special_tokens(text: str) -> set[str]:
    """Returns the special tokens of a tokenizer.json, which no text encodes to."""
    added = fields_of(text).get("added_tokens") or ()
    return {token["content"] for token in added if token.get("special")}


def vocabulary(fields: json_files.JsonObject) -> dict[str, int]:
    """Returns the id of each token of a tokenizer.json, the added ones included."""
    rows = fields["model"]["vocab"]  # That of Unigram is a list of (token, score).
    vocab = rows if isinstance(rows, dict) else {row[0]: n for n, row in enumerate(rows)}
    added = {token["content"]: token["id"] for token in fields.get("added_tokens") or ()}
    return {**vocab, **added}


def unknown_token(fields: json_files.JsonObject) -> str | None:
    """Returns the token of a tokenizer.json that stands for text without a token, if any."""
    model = fields["model"]
    number = model.get("unk_id")
    return model.get("unk_token") if number is None else model["vocab"][number][0]


def joins_bytes(fields: json_files.JsonObject) -> bool:
    """Returns whether the text of a tokenizer.json's tokens is their bytes one after the other.

    So it is with byte-level BPE, as GPT-2's, Llama 3's and Qwen's, and BPE with byte fallback, as
    Llama 2's and Mistral's. Of others the text of a token may depend on its neighbours.
    """
    model, decoder = fields["model"], fields.get("decoder")
    fallback = bool(model.get("byte_fallback"))
    byte_level = "ByteLevel" in json.dumps(fields.get("pre_tokenizer"))
    kind = "ByteFallback" if fallback else "ByteLevel"
    return (
        model.get("type", "BPE") == "BPE"
        and byte_level != fallback
        and (kind in json.dumps(decoder) or (decoder is None and not fallback))
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
    )


def written(engine: Any, ids: Sequence[int]) -> list[str]:
    """Returns the text that each id adds where it stands between two others.

    It has the space that the decoder writes between words: of "\\u2581a" with Metaspace, and of "a"
    with WordPiece or without a decoder, it is " a"; of "##a" with WordPiece it is "a".
    """
    with failures("decode tokens"):
        alone = engine.decode_batch([[number] for number in ids], skip_special_tokens=False)
        words = [text.strip().isalnum() and text.isascii() for text in alone]
        other = ids[words.index(True) if True in words else 0] if ids else 0
        inside = [[other, number, other] for number in ids]
        around = engine.decode([other, other], skip_special_tokens=False)
        texts = engine.decode_batch(inside, skip_special_tokens=False)
    additions = [_inserted(around, text) for text in texts]
    return [text if new is None else new for text, new in zip(alone, additions, strict=True)]


def _inserted(around: str, text: str) -> str | None:
    """Returns what `text` has more than `around`, near its middle; None where it is another."""
    size, middle = len(text) - len(around), len(around) / 2 - 0.25
    for start in sorted(range(len(around) + 1), key=lambda place: abs(place - middle)):
        if size >= 0 and text[:start] + text[start + size :] == around:
            return text[start : start + size]
    return None


def refuse_beyond(vocab: Mapping[str, int], special: Collection[str], rows: int) -> None:
    """Raises ValueError if a model with so many rows has no row for a token that texts have.

    A special token without a row is legal, as Gemma 3's `<image_soft_token>`: no text encodes to
    it, and the model cannot write it.
    """
    beyond = {n: token for token, n in vocab.items() if n >= rows and token not in special}
    if beyond:
        raise ValueError(
            f"its token {beyond[max(beyond)]!r} has the id {max(beyond)}; legal for a model of "
            f"{rows} tokens: at most {rows - 1}, but for special tokens"
        )


@dataclasses.dataclass(frozen=True)
class Identity:
    """Special ids of an imported tokenizer, and the files that it came with.

    Attributes:
      prefix: ids in front of every text, which the post-processor of tokenizer.json adds.
      ends: ids that end a generated text; () for the end of text alone.
      start: id that an empty prompt becomes where `prefix` is (); None for the end of text.
      files: (name, content) of the other files of the directory that an export writes back, such
        as generation_config.json. A content has one Latin-1 character a byte.
    """

    prefix: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    start: int | None = None
    files: tuple[tuple[str, str], ...] = dataclasses.field(default=(), compare=False)

    def content(self, name: str) -> bytes | None:
        """Returns the bytes of a file; None if the directory had none of this name."""
        text = dict(self.files).get(name)
        return None if text is None else text.encode("latin-1")

    def checked(self, vocab_size: int) -> "Identity":
        """Returns itself; raises ValueError if an id is not in the vocabulary."""
        ids = [*self.prefix, *self.ends, *([] if self.start is None else [self.start])]
        if not all(type(number) is int and 0 <= number < vocab_size for number in ids):
            raise ValueError(f"its special ids {ids} must be whole numbers under {vocab_size}")
        return self

    def moved(self, ids: Mapping[int, int]) -> "Identity":
        """Returns the identity with other numbers for some ids."""
        prefix, ends = ([ids.get(n, n) for n in each] for each in (self.prefix, self.ends))
        start = None if self.start is None else ids.get(self.start, self.start)
        return dataclasses.replace(self, prefix=tuple(prefix), ends=tuple(ends), start=start)

    def to_json(self) -> dict[str, object]:
        """Returns JSON values that `from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: json_files.JsonObject) -> "Identity":
        """Reads what `to_json` returned; raises KeyError, TypeError or ValueError otherwise."""
        files = tuple((str(name), str(content)) for name, content in fields["files"])
        return cls(tuple(fields["prefix"]), tuple(fields["ends"]), fields["start"], files)


NO_IDENTITY = Identity()
"""That of a tokenizer that was not imported."""


def version() -> str:
    """Returns the version of the library, of which another may encode or train otherwise."""
    import tokenizers

    return str(tokenizers.__version__)
