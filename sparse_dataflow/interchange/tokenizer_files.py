"""Hugging Face tokenizer files: tokenizer.json, or vocab.json and merges.txt.

BPE of two kinds is read: byte-level, as GPT-2's, Llama 3's and Qwen's, and with byte fallback, as
Llama 2's and Mistral's, whose tokens are characters, with U+2581 for a space and <0xHH> for a byte.

Hugging Face vocabularies may have special tokens at any id. In this project the ids of text come
first and the end-of-text id is last, so an import reorders the vocabulary. An imported
tokenizer.json is stored unchanged: it encodes and decodes, and an export writes it back with its
original ids.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from sparse_dataflow.data import tokenizer_library
from sparse_dataflow.data.chat import ChatTemplate
from sparse_dataflow.data.tokenizer import (
    GPT2_VOCAB_SIZE,
    Tokenizer,
    from_bytes,
    gpt2_tokenizer,
    parse_merges,
    to_byte_alphabet,
)
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError

END_OF_TEXT = "<|endoftext|>"
FILE, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPACE = "\u2581"
_ALPHABET = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")


class Read(NamedTuple):
    """An imported tokenizer and the order of its ids.

    Attributes:
      tokenizer: tokenizer with the model's vocabulary size.
      order: the Hugging Face id of each id of `tokenizer`, int [vocab_size].
    """

    tokenizer: Tokenizer
    order: np.ndarray


def read(folder: Path, config: Mapping[str, Any]) -> Read:
    """Reads the tokenizer of a Hugging Face directory.

    Args:
      folder: folder with tokenizer.json, or vocab.json and merges.txt. Without these files, a
        model with GPT-2's 50,257 tokens gets GPT-2's tokenizer.
      config: fields of its config.json.

    Raises:
      UserError: the tokenizer is missing, damaged, or of another kind.
    """
    folder, size = Path(folder), config["vocab_size"]
    if (folder / FILE).exists():
        path, parse = folder / FILE, _parse_json
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        path, parse = folder / "vocab.json", _parse_lists
    elif size == GPT2_VOCAB_SIZE:
        return Read(gpt2_tokenizer(), np.arange(size))
    else:
        raise UserError(
            f"{folder} has no tokenizer: neither {FILE} nor vocab.json with merges.txt."
        )
    template = _chat_template(folder)
    try:
        vocab, merges, specials, texts, spell = parse(folder)
        if not all(type(number) is int and number >= 0 for number in vocab.values()):
            raise ValueError("each id must be a whole number of 0 or more")
        if sorted(vocab.values()) != sorted(set(vocab.values())):
            raise ValueError("two tokens share an id")
        result = _reorder(vocab, merges, specials, texts, size, config, spell)
        result = _with_original(result, path) if path.name == FILE else result
        tokenizer = dataclasses.replace(result.tokenizer, chat_template=template)
        return Read(tokenizer, result.order)
    except json_files.MALFORMED as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"The tokenizer {path} cannot be read: {error}.") from None


def _chat_template(folder):
    """Returns the chat template of a directory, or None if it has none."""
    path, settings = folder / SETTINGS, {}
    try:
        if path.exists():
            settings = json_files.load(path)
        text = settings.get("chat_template")
        if (folder / TEMPLATE).exists():
            text = json_files.read_bytes(folder / TEMPLATE).decode("utf-8")
        if isinstance(text, list):  # Several, of which one is the default.
            text = {row["name"]: row["template"] for row in text}.get("default")
        if text is None:
            return None
        names = [name for name in settings if name.endswith("_token")]
        specials = {name: settings[name] for name in names if settings[name]}
        specials = {n: t["content"] if isinstance(t, dict) else t for n, t in specials.items()}
        strings = {name: token for name, token in specials.items() if isinstance(token, str)}
        return ChatTemplate(text, tuple(sorted(strings.items())))
    except json_files.MALFORMED as error:
        raise UserError(f"The chat template of {folder} cannot be read: {error}.") from None


def _parse_json(folder):
    """Returns (vocabulary, merges, special tokens, tokens that are text although no merge makes
    them, token -> its bytes in the byte alphabet)."""
    fields = json_files.load(folder / FILE)
    model = fields["model"]
    fallback = bool(model.get("byte_fallback"))
    kind = "ByteFallback" if fallback else "ByteLevel"
    byte_level = "ByteLevel" in json.dumps(fields["pre_tokenizer"])
    if model.get("type", "BPE") != "BPE" or byte_level == fallback:
        raise ValueError("it is neither byte-level BPE nor BPE with byte fallback")
    decoder = fields.get("decoder")
    if (decoder is not None or fallback) and kind not in json.dumps(decoder):
        raise ValueError(f"its decoder is not {kind}")
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(affix):
            raise ValueError(f"it has {affix}={model[affix]!r}; legal: none")
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
    return vocab, merges, specials, texts - specials, _spell_fallback if fallback else str


def _spell_fallback(token):
    """Returns the bytes of a token of a tokenizer with byte fallback, in the byte alphabet."""
    if _BYTE_TOKEN.fullmatch(token):
        return from_bytes(bytes.fromhex(token[3:5]))
    return to_byte_alphabet(token.replace(_SPACE, " "))


def _parse_lists(folder):
    vocab = json_files.load(folder / "vocab.json")
    merges = parse_merges(json_files.read_bytes(folder / "merges.txt").decode("utf-8"))
    return vocab, merges, set(), set(), str


def _with_original(result, path):
    """Adds the file's text to the tokenizer, unless `write` gives the same text without it."""
    text = json_files.read_bytes(path).decode("utf-8")
    if text == _plain_text(result.tokenizer):
        return result
    ids = tuple(result.order.tolist())
    tokenizer = dataclasses.replace(result.tokenizer, original=text, original_ids=ids)
    tokenizer.validate_original()
    return Read(tokenizer, result.order)


def _reorder(vocab, merges, specials, texts, size, config, spell):
    config = {name: _ids(config.get(name)) for name in _SPECIAL_IDS}
    special_ids = {number for numbers in config.values() for number in numbers}
    # A token is text if it is a byte, the result of a merge, or listed as text by the file.
    text_tokens = {left + right for left, right in merges} | _ALPHABET | texts
    text = sorted(
        (number, token)
        for token, number in vocab.items()
        if token in text_tokens and token not in specials and number not in special_ids
    )
    if text and max(vocab.values()) >= size:
        raise ValueError(
            f"its largest id is {max(vocab.values())}; legal for a model of {size} tokens: at most "
            f"{size - 1}"
        )
    ends = config["eos_token_id"]
    end = ends[0] if ends else vocab.get(END_OF_TEXT, size - 1)
    text_ids = {number for number, _ in text}
    if type(end) is not int or end in text_ids or not 0 <= end < size:
        raise ValueError(
            f"its end of text has the id {end}; legal: an id under {size} that no text token has"
        )
    rest = [number for number in range(size) if number not in text_ids and number != end]
    order = np.array([number for number, _ in text] + rest + [end])
    vocabulary = {token for _, token in text}
    for token in (token for merge in merges for token in merge if token not in vocabulary):
        if vocab.get(token) in special_ids:
            named = ", ".join(n for n in _SPECIAL_IDS if vocab[token] in config[n])
            raise ValueError(
                f"config.json gives {named} the id {vocab[token]}, which is the text token "
                f"{token!r}; legal: the id of a special token"
            )
        raise ValueError(f"a merge has the token {token!r}, which is not in the vocabulary")
    tokens = tuple(spell(token) for _, token in text)
    spelled = tuple((spell(left), spell(right)) for left, right in merges)
    return Read(Tokenizer(tokens, spelled, size), order)


def _ids(value):
    """Returns the ids of a field that has one, several or none. The first of several is ours."""
    return value if isinstance(value, list) else [] if value is None else [value]


def write(folder: Path, tokenizer: Tokenizer, context: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json for `AutoTokenizer`.

    An imported tokenizer is written byte for byte with its original ids; any other keeps its ids.

    Args:
      folder: existing folder.
      tokenizer: tokenizer to write.
      context: sequence length of the training, in tokens.
    """
    end: str | None = END_OF_TEXT
    text, prefix_space = tokenizer.original or _plain_text(tokenizer), False
    if tokenizer.original:
        number = tokenizer.original_ids[tokenizer.eot_id]
        end = tokenizer_library.from_text(text).id_to_token(number)
        prefix_space = _adds_prefix_space(json_files.parse(text)["pre_tokenizer"])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        # transformers prefers this value to that of tokenizer.json.
        "add_prefix_space": prefix_space,
        # Without this list transformers 4 also returns token_type_ids, and GPT-2 adds their
        # embeddings to its input.
        "model_input_names": ["input_ids", "attention_mask"],
    }
    if end is not None:
        settings |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), end)
    if tokenizer.chat_template:
        settings["chat_template"] = tokenizer.chat_template.text
        settings |= dict(tokenizer.chat_template.special_tokens)
    (folder / FILE).write_bytes(text.encode())
    (folder / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n")


def _adds_prefix_space(pre_tokenizer):
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    return any(step.get("add_prefix_space", False) for step in steps)


def _plain_text(tokenizer):
    """Returns a tokenizer.json of the tokens and merges, with GPT-2's settings."""
    vocab = {token: number for number, token in enumerate(tokenizer.tokens)}
    special = {
        "content": END_OF_TEXT,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    fields = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": tokenizer.eot_id, **special}],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab | {END_OF_TEXT: tokenizer.eot_id},
            "merges": [list(merge) for merge in tokenizer.merges],
        },
    }
    return json.dumps(fields, ensure_ascii=False)
