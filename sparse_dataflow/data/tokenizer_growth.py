"""How much longer the steps of a tokenizer.json can make a text, by what each kind of step does.

A step of a kind that is not known here is refused, as it may do anything. What Unicode's own forms
do to a text, such as 18 characters for one, is not counted at their first use.
"""

import base64
import itertools
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import first_line

MOST_GROWTH = 16
"""Tokens that a byte of text may become; those of published tokenizers are at most 4."""

MOST_BYTES = 64
"""Bytes that a byte of text may become on the way."""

MOST_STEPS = 64
LONGEST_TOKEN = 2**14
"""Characters of a token."""

LONGEST_WORD = 2000
"""Characters of a word of WordPiece."""

_FORM_CHARACTERS, _FORM_BYTES = 18, 33
"""Longest Unicode form of one character."""


_PIECE = (
    r"(?:\\(?:[sSdDwWntrf]|[^\w\s]|[pP]\{\w+\})|\[(?:\\.|[^\]\[\\])+\]|[\w\s.])"
    r"(?:\+|\{[1-9]\d*(?:,\d*)?\})?"
)
_SOLID = re.compile(rf"(?:{_PIECE})+(?:\|(?:{_PIECE})+)*")
"""Regular expressions of which each match has a character, as far as one sees at once."""


class Growth(NamedTuple):
    """What a byte of text becomes, at most.

    Attributes:
      characters: characters.
      bytes: bytes of UTF-8.
      spread: whether a Unicode form would lengthen it again.
    """

    characters: float = 1.0
    bytes: float = 1.0
    spread: bool = False

    def times(self, characters: float, bytes: float) -> "Growth":
        """Returns the growth where each character or byte becomes several."""
        factors = max(1.0, characters), max(1.0, bytes)
        return Growth(self.characters * factors[0], self.bytes * factors[1], self.spread)

    def plus(self, text: str, count: float = 1.0) -> "Growth":
        """Returns the growth where a text comes in addition."""
        more = count * len(text), count * len(_utf8(text))
        return Growth(self.characters + more[0], self.bytes + more[1], self.spread)


def refuse_growth(fields: json_files.JsonObject) -> None:
    """Refuses a tokenizer.json that makes texts endlessly long.

    Raises:
      ValueError: it does, or has a step that is not known.
    """
    try:
        _refuse_model(fields)
        encoded = Growth()
        for name in ("normalizer", "pre_tokenizer", "post_processor"):
            encoded = _after(name, fields.get(name), encoded)
        decoded = _after("decoder", fields.get("decoder"), Growth())
        by_bytes = fields["model"].get("byte_fallback")
    except ValueError:
        raise
    except json_files.MALFORMED as error:
        raise ValueError(f"its fields are damaged: {first_line(error)}") from None
    for growth in (encoded, decoded):
        tokens = growth.bytes if by_bytes else growth.characters
        if tokens > MOST_GROWTH or growth.bytes > MOST_BYTES:
            raise ValueError(
                f"its steps can make a text {max(tokens, growth.bytes):.3g} times as long; legal: "
                f"{MOST_GROWTH} tokens for a byte, or {MOST_BYTES} bytes"
            )


def _refuse_model(fields: json_files.JsonObject) -> None:
    """Refuses a model whose tokens or words have no end."""
    model, added = fields["model"], fields.get("added_tokens") or ()
    rows = model.get("vocab") or ()
    tokens = rows if isinstance(rows, dict) else (row[0] for row in rows)
    longest = max(
        map(len, itertools.chain(tokens, (token["content"] for token in added))), default=0
    )
    if longest > LONGEST_TOKEN:
        raise ValueError(f"it has a token of {longest:,} characters; legal: {LONGEST_TOKEN:,}")
    word = model.get("max_input_chars_per_word")
    if isinstance(word, int) and word > LONGEST_WORD:
        raise ValueError(
            f"max_input_chars_per_word={str(word)[:20]}, and its time is the square of it; legal: "
            f"up to {LONGEST_WORD:,}"
        )


def _after(section: str, step: object, growth: Growth) -> Growth:
    """Returns the growth after the steps of a section of a tokenizer.json."""
    steps = _flat(step)
    if len(steps) > MOST_STEPS:
        raise ValueError(f"its {section} has {len(steps)} steps; legal: {MOST_STEPS}")
    for each in steps:
        kind = str(each.get("type"))
        effect = _EFFECTS[section].get(kind)
        if effect is None:
            raise ValueError(
                f"its {section} has a step {kind[:80]}; legal: {', '.join(_EFFECTS[section])}"
            )
        growth = effect(each, growth)
        # No character has more than 4 bytes.
        growth = growth._replace(bytes=min(growth.bytes, 4 * growth.characters))
    return growth


def _flat(step) -> list[dict[str, object]]:
    """Returns the steps of a section one after another."""
    if not isinstance(step, dict):
        return []  # None; the library refuses others.
    inner = next((step[n] for n in ("normalizers", "pretokenizers", "decoders", "processors")
                  if n in step), None)  # fmt: skip
    if step.get("type") == "Sequence" and isinstance(inner, list):
        return [each for nested in inner for each in _flat(nested)]
    return [step]


def _same(step, growth):
    return growth


def _form(step, growth):
    return growth.times(2, 2) if growth.spread else growth


def _bert(step, growth):
    growth = _form(step, growth)  # It puts spaces around Chinese characters, of 3 bytes each.
    return growth.plus("  ", growth.bytes / 3)


def _byte_level(step, growth):
    # Each byte becomes a character of up to two bytes.
    spaces = growth.characters if step.get("add_prefix_space") else 0.0
    return Growth(growth.bytes, 2 * growth.bytes, True).plus(" ", spaces)


def _metaspace(step, growth):
    sign = step.get("replacement")
    sign = sign if isinstance(sign, str) else "\u2581"
    # Each piece may begin with the sign that stands for a space.
    return growth.times(len(sign), len(_utf8(sign))).plus(sign, growth.characters)


def _prepend(step, growth):
    return growth.plus(str(step.get("prepend") or ""))


def _replace(step, growth):
    pattern, content = step.get("pattern"), step.get("content")
    content = content if isinstance(content, str) else ""
    text = pattern.get("String") if isinstance(pattern, dict) else pattern
    if isinstance(text, str) and text:
        return growth.times(len(content) / len(text), len(_utf8(content)) / len(_utf8(text)))
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    if isinstance(regex, str) and _SOLID.fullmatch(regex):
        return growth.times(len(content), len(_utf8(content)))
    # Other regular expressions may match nothing, between any two characters.
    return growth.plus(content, growth.characters + 1)


def _precompiled(step, growth):
    charsmap = base64.b64decode(str(step.get("precompiled_charsmap") or ""))
    # The size of a trie, the trie, and the forms that replace characters, each with a NUL behind
    # it.
    start = 4 + int.from_bytes(charsmap[:4], "little")
    forms = charsmap[start:].split(b"\0")
    longest = max(map(len, forms))
    characters = max(len(form.decode(errors="replace")) for form in forms)
    if growth.spread:
        return growth.times(characters, longest)
    counted = growth.times(characters / _FORM_CHARACTERS, longest / _FORM_BYTES)
    return counted._replace(spread=True)


def _template(step, growth):
    pieces, tokens = step.get("single"), step.get("special_tokens")
    pieces = [each for each in pieces if isinstance(each, dict)] if isinstance(pieces, list) else []
    tokens = tokens if isinstance(tokens, dict) else {}
    count = max(1, sum("Sequence" in each for each in pieces))
    added = 0
    for name in (str(each["SpecialToken"].get("id")) for each in pieces if "SpecialToken" in each):
        added += len(tokens[name].get("ids") or ()) if isinstance(tokens.get(name), dict) else 1
    return growth.times(count, count).plus(" ", added)


def _between(name: str) -> Callable[[Mapping[str, object], Growth], Growth]:
    """Returns the effect of a step that writes a space in the place of a text, which may be ""."""

    def effect(step, growth):
        return growth if step.get(name, " ") else growth.plus(" ", growth.characters + 1)

    return effect


def _pair(step, growth):
    return growth.plus("  ")


def _word_piece(step, growth):
    return growth.plus(" ", growth.characters)


def _utf8(text):
    return text.encode(errors="surrogatepass")


_EFFECTS: dict[str, dict[str, Callable[[Mapping[str, object], Growth], Growth]]] = {
    "normalizer": {
        **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt", "StripAccents"), _form),
        "Strip": _same,
        "BertNormalizer": _bert,
        "ByteLevel": _byte_level,
        "Precompiled": _precompiled,
        "Prepend": _prepend,
        "Replace": _replace,
    },
    "pre_tokenizer": {
        **dict.fromkeys(
            ("BertPreTokenizer", "CharDelimiterSplit", "Delimiter", "Digits", "FixedLength",
             "Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"), _same
        ),
        "ByteLevel": _byte_level,
        "Metaspace": _metaspace,
    },
    "post_processor": {
        "ByteLevel": _same,
        **dict.fromkeys(("BertProcessing", "RobertaProcessing"), _pair),
        "TemplateProcessing": _template,
    },
    "decoder": {
        **dict.fromkeys(("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Strip"), _same),
        "BPEDecoder": _between("suffix"),
        "CTC": _between("word_delimiter_token"),
        "Replace": _replace,
        "WordPiece": _word_piece,
    },
}  # fmt: skip
"""Section of a tokenizer.json -> kind of step -> growth after it, of the step and growth before."""
