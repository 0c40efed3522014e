"""A tokenizer as Hugging Face's libraries keep it: tokenizer.json, or vocab.json and merges.txt.

Their byte-level BPE may put special tokens anywhere; here the ids of text come first and the end of
text is last, so an import reorders the vocabulary. A tokenizer.json is kept whole, for its
settings: it encodes and decodes, and an export writes it back with its own ids.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from sparse_dataflow.data.tokenizer import (
    GPT2_VOCAB_SIZE,
    Tokenizer,
    gpt2_tokenizer,
    in_alphabet,
)
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError

END_OF_TEXT = "<|endoftext|>"
FILE = "tokenizer.json"
_ALPHABET = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")


class Read(NamedTuple):
    """A tokenizer and where its ids come from.

    Attributes:
      tokenizer: of the model's vocabulary size.
      order: int [vocab_size], the id there of each id here.
    """

    tokenizer: Tokenizer
    order: np.ndarray


def read(folder: Path, config: Mapping[str, Any]) -> Read:
    """The tokenizer of a Hugging Face directory.

    Args:
      folder: with tokenizer.json, or vocab.json and merges.txt. A model of GPT-2's 50,257 tokens
        without either gets GPT-2's own.
      config: its config.json.

    Raises:
      UserError: there is none, it is damaged, or it is no byte-level BPE.
    """
    folder, size = Path(folder), config["vocab_size"]
    if (folder / FILE).exists():
        path, parts = folder / FILE, _from_json
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        path, parts = folder / "vocab.json", _from_lists
    elif size == GPT2_VOCAB_SIZE:
        return Read(gpt2_tokenizer(), np.arange(size))
    else:
        raise UserError(
            f"{folder} has no tokenizer: neither {FILE} nor vocab.json with merges.txt."
        )
    try:
        vocab, merges, specials, texts = parts(folder)
        if not all(type(number) is int and number >= 0 for number in vocab.values()):
            raise ValueError("an id is no whole number of 0 or more")
        if sorted(vocab.values()) != sorted(set(vocab.values())):
            raise ValueError("two tokens share an id")
        found = _ordered(vocab, merges, specials, texts, size, config)
        return _with_original(found, path) if path.name == FILE else found
    except json_files.MALFORMED as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"The tokenizer {path} cannot be read: {error}.") from None


def _from_json(folder):
    fields = json_files.load(folder / FILE)
    model = fields["model"]
    if model.get("type", "BPE") != "BPE" or "ByteLevel" not in json.dumps(fields["pre_tokenizer"]):
        raise ValueError("it is no byte-level BPE")
    decoder = fields.get("decoder")
    if decoder is not None and "ByteLevel" not in json.dumps(decoder):
        raise ValueError("its decoder is not ByteLevel")
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(affix):
            raise ValueError(f"it has {affix}={model[affix]!r}; legal: none")
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    vocab = dict(model["vocab"])
    specials, texts = set(), set(vocab) if model.get("ignore_merges") else set()
    for token in fields.get("added_tokens") or ():
        name, number = token["content"], token["id"]
        vocab.pop(name, None)
        if token.get("special"):
            specials.add(name)
        else:
            name = in_alphabet(name)
            texts.add(name)
        if vocab.get(name, number) != number:
            raise ValueError(f"two tokens stand for {token['content']!r}")
        vocab[name] = number
    return vocab, merges, specials, texts - specials


def _from_lists(folder):
    vocab = json_files.load(folder / "vocab.json")
    lines = json_files.read_bytes(folder / "merges.txt").decode("utf-8").splitlines()
    merges = [tuple(line.split(" ")) for line in lines if line and line[:8] != "#version"]
    return vocab, merges, set(), set()


def _with_original(found, path):
    """`found` with the file's text, unless that is what `write` makes of the tokenizer alone."""
    text = json_files.read_bytes(path).decode("utf-8")
    if text == _plain_text(found.tokenizer):
        return found
    ids = tuple(found.order.tolist())
    tokenizer = dataclasses.replace(found.tokenizer, original=text, original_ids=ids)
    tokenizer.check_original()
    return Read(tokenizer, found.order)


def _ordered(vocab, merges, specials, texts, size, config):
    ids = {config[name] for name in _SPECIAL_IDS if config.get(name) is not None}
    # A token is text where it is a byte, a merge makes it, or the file says so.
    made = {left + right for left, right in merges} | _ALPHABET | texts
    text = sorted(
        (number, token)
        for token, number in vocab.items()
        if token in made and token not in specials and number not in ids
    )
    if text and max(vocab.values()) >= size:
        raise ValueError(f"it has ids up to {max(vocab.values())}, and the model {size} tokens")
    end = config.get("eos_token_id")
    end = vocab.get(END_OF_TEXT, size - 1) if end is None else end
    taken = {number for number, _ in text}
    if type(end) is not int or end in taken or not 0 <= end < size:
        raise ValueError(f"its end of text has the id {end}, which is no token of its own")
    rest = [number for number in range(size) if number not in taken and number != end]
    order = np.array([number for number, _ in text] + rest + [end])
    tokens = tuple(token for _, token in text)
    known = set(tokens)
    if not all({left, right} <= known for left, right in merges):
        raise ValueError("a merge is not in its vocabulary")
    return Read(Tokenizer(tokens, tuple(merges), size), order)


def write(folder: Path, tokenizer: Tokenizer, context: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json for `AutoTokenizer`.

    Ids stay as they are; with an original it is written to the byte, and ids are the original's.
    """
    end: str | None = END_OF_TEXT
    text, prefix_space = tokenizer.original or _plain_text(tokenizer), False
    if tokenizer.original:
        number = tokenizer.original_ids[tokenizer.eot_id]
        end = tokenizers.Tokenizer.from_str(text).id_to_token(number)
        prefix_space = _adds_prefix_space(json.loads(text)["pre_tokenizer"])
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        # transformers gives this precedence over tokenizer.json.
        "add_prefix_space": prefix_space,
        # Without this list transformers 4 also returns token_type_ids, which GPT-2 adds to its
        # input as embeddings.
        "model_input_names": ["input_ids", "attention_mask"],
    }
    if end is not None:
        about |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), end)
    (folder / FILE).write_bytes(text.encode())
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1) + "\n")


def _adds_prefix_space(pre_tokenizer):
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return any(part.get("add_prefix_space", False) for part in parts)


def _plain_text(tokenizer):
    """The tokenizer.json of the tokens and merges, with GPT-2's settings."""
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
