"""Special tokens of a Hugging Face directory: which files name them, and what they mean.

Several files name the same token. Where they disagree, the one that `transformers` obeys counts,
and a line says so.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from sparse_dataflow.data import tokenizer_library
from sparse_dataflow.data.chat import ChatTemplate
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_files import JsonObject

SETTINGS, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
GENERATION, MAP, ADDED = "generation_config.json", "special_tokens_map.json", "added_tokens.json"
FILES = (GENERATION, SETTINGS, MAP, ADDED, TEMPLATE, "chat_template.json", "vocab.json",
         "merges.txt", "vocab.txt", "tokenizer.model")  # fmt: skip
"""Files that an import keeps and an export writes back."""

LARGEST_FILE = 64 * 2**20
"""Bytes of a file that is kept. Vocabularies have a few million."""

MOST_IDS = 1000
"""Ids of a field, such as those that end a text."""

_LOG = logging.getLogger(__name__)

_GPT2 = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_OF_CLASS = {
    "BertTokenizer": {
        f"{name.lower()}_token": f"[{name}]" for name in ("UNK", "SEP", "PAD", "CLS", "MASK")
    },
    "GPT2Tokenizer": _GPT2,
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": _LLAMA,
    "Qwen2Tokenizer": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
}
"""Tokens that a class of `transformers` has where no file names them."""


def read_files(folder: Path) -> dict[str, bytes]:
    """Returns the content of each of FILES that the folder has.

    Raises:
      UserError: one cannot be read or has more than LARGEST_FILE bytes.
    """
    files = {}
    for name in FILES:
        path = folder / name
        if not path.is_file():
            continue
        if path.stat().st_size > LARGEST_FILE:
            raise UserError(f"{path} has more than {LARGEST_FILE >> 20} MiB; legal: a smaller one.")
        try:
            files[name] = json_files.read_bytes(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error}.") from None
    return files


def fields_of(files: Mapping[str, bytes], name: str, folder: Path) -> JsonObject:
    """Returns the JSON object in a file; {} where there is no such file.

    Raises:
      UserError: it is not a JSON object.
    """
    if name not in files:
        return {}
    try:
        fields = json_files.parse(files[name].decode("utf-8-sig"))
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as error:
        raise UserError(f"{folder / name} cannot be read: {error}.") from None
    return fields


def tokenizer_class(settings: Mapping[str, object]) -> str:
    """Returns the class that tokenizer_config.json names, without "Fast"; "" for none."""
    return str(settings.get("tokenizer_class") or "").removesuffix("Fast")


def names(files: Mapping[str, bytes], folder: Path, kind: str = "") -> dict[str, str]:
    """Returns the text of each named token, such as "bos_token".

    As in `transformers`, special_tokens_map.json comes before a tokenizer_config.json without
    `added_tokens_decoder`, and the defaults of the tokenizer's class come last.

    Args:
      files: see `read_files`.
      folder: for messages.
      kind: class of a tokenizer whose files name none.
    """
    settings, listed = (fields_of(files, name, folder) for name in (SETTINGS, MAP))
    given: JsonObject = dict(_OF_CLASS.get(tokenizer_class(settings) or kind, {}))
    given |= {name: token for name, token in settings.items() if name.endswith("_token")}
    for name, token in listed.items():
        before = _text(given.get(name))
        first = "added_tokens_decoder" in settings and name in settings
        if not name.endswith("_token") or first:
            if name.endswith("_token") and _text(token) != before:
                _LOG.warning("%s: %s is %r; %s has %r", folder, name, before, MAP, _text(token))
            continue
        if name in settings and _text(token) != before:
            _LOG.warning("%s: %s is %r of %s, not %r", folder, name, _text(token), MAP, before)
        given[name] = token
    texts = {name: _text(token) for name, token in given.items()}
    return {name: text for name, text in texts.items() if text}


def _text(token):
    """Returns the text of a token, which may be an object; None where there is none."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def ids_of(value: Any, name: str) -> list[int]:
    """Returns the ids of a field that has one, several or none.

    Raises:
      ValueError: one is no whole number, or they are more than MOST_IDS.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > MOST_IDS:
        raise ValueError(f"{name} has {len(ids):,} ids (legal: up to {MOST_IDS:,})")
    if not all(type(number) is int for number in ids):
        raise ValueError(f"{name}={value!r} (legal: a whole number, or a list of them)")
    return ids


def ends(
    config: JsonObject,
    generation: JsonObject,
    tokens: Mapping[str, str],
    vocab: Mapping[str, int],
    end_of_text: str,
    folder: Path,
) -> list[int]:
    """Returns the ids that end a text; the first divides documents.

    They are those of generation_config.json, else of config.json, else the eos_token of the
    tokenizer's files, else `end_of_text`, else the sep_token, which ends the texts of models with
    BERT's tokens. Ids that are not in the vocabulary do not count.

    Args:
      config: fields of config.json.
      generation: fields of generation_config.json.
      tokens: see `names`.
      vocab: id of each token.
      end_of_text: a token that ends texts in GPT-2's vocabulary.
      folder: for messages.

    Raises:
      ValueError: none names an end, or an id is no whole number.
    """
    config_ids, generation_ids = (
        ids_of(fields.get("eos_token_id"), "eos_token_id") for fields in (config, generation)
    )
    token_ids = [vocab.get(tokens.get(name, "")) for name in ("eos_token", "sep_token")]
    named = token_ids[0]
    # transformers reads generation_config.json first.  So the same folder ends its texts at the
    # same ids here and there, and what contradicts is said in the log.
    found = generation_ids or config_ids
    size = config["vocab_size"]
    beyond = [number for number in found if not 0 <= number < size]
    found = [number for number in found if number not in beyond]
    if beyond:
        _LOG.warning("%s: the ends %s are not in the vocabulary of %d", folder, beyond, size)
    if generation_ids and config_ids and set(generation_ids) != set(config_ids):
        _LOG.warning(
            "%s: texts end at the ids %s of %s, as in transformers; config.json has %s",
            folder, generation_ids, GENERATION, config_ids,
        )  # fmt: skip
    if found and named is not None and named not in found:
        _LOG.warning(
            "%s: texts end at the ids %s, as in transformers; the tokenizer's eos_token %r (%d) is "
            "none of them", folder, found, tokens["eos_token"], named,
        )  # fmt: skip
    if not found:
        named_ids = (named, vocab.get(end_of_text), token_ids[1])
        found = [number for number in named_ids if number is not None and number < size][:1]
        if not found:
            raise ValueError(
                "no file names the end of text; legal: eos_token_id in config.json or "
                f"generation_config.json, from 0 to {size - 1}, or an eos_token of the vocabulary "
                "in tokenizer_config.json"
            )
        _LOG.warning(
            "%s: config.json has no eos_token_id of the vocabulary; texts end at id %d, %r; set "
            "another eos_token_id if they end elsewhere", folder, found[0],
            next(token for token, number in vocab.items() if number == found[0]),
        )  # fmt: skip
    # The first end divides documents of a corpus.  generation_config.json may begin with the end
    # of a chat's turn, which no document has.
    first = next((number for number in config_ids if number in found), found[0])
    return [first, *(number for number in found if number != first)]


def start(
    config: JsonObject,
    generation: JsonObject,
    tokens: Mapping[str, str],
    vocab: Mapping[str, int],
) -> int | None:
    """Returns the id of the begin of text: that of the tokenizer's files, else of
    generation_config.json, else of config.json; None for none."""
    given = [vocab.get(tokens.get("bos_token", ""))]
    for fields in (generation, config):
        given += ids_of(fields.get("bos_token_id"), "bos_token_id")
    return next((n for n in given if n is not None and 0 <= n < config["vocab_size"]), None)


def prefix(
    engine: tokenizers.Tokenizer,
    settings: Mapping[str, object],
    tokens: Mapping[str, str],
    end: int,
    folder: Path,
    text: str = "a",
) -> list[int]:
    """Returns the ids that the library puts in front of a text.

    `add_bos_token` of tokenizer_config.json comes before the post-processor, as in `transformers`.

    Args:
      engine: the library's tokenizer.
      settings: fields of tokenizer_config.json.
      tokens: see `names`.
      end: id that ends a document.
      folder: for messages.
      text: a text that has tokens.
    """
    with tokenizer_library.failures("encode a text"):
        encoded = engine.encode(text, add_special_tokens=True)
    special = encoded.special_tokens_mask
    places = [place for place, mark in enumerate(special) if not mark]
    before = encoded.ids[: places[0]] if places else []
    after = encoded.ids[places[-1] + 1 :] if places else []
    flag, bos = settings.get("add_bos_token"), engine.token_to_id(tokens.get("bos_token", ""))
    if isinstance(flag, bool) and flag != bool(before) and (bos is not None or not flag):
        words = "adds" if flag else "leaves out"
        _LOG.warning(
            "%s: add_bos_token of %s %s the begin of text, unlike tokenizer.json",
            folder, SETTINGS, words,
        )  # fmt: skip
        before = [bos] if flag and bos is not None else []
    if [number for number in after if number != end]:
        _LOG.warning("%s: the tokens %s after a text are not added", folder, after)
    return before


def chat_template(
    files: Mapping[str, bytes], tokens: Mapping[str, str], folder: Path
) -> ChatTemplate | None:
    """Returns the chat template, or None if there is none.

    Raises:
      UserError: it cannot be read.
    """
    text = fields_of(files, SETTINGS, folder).get("chat_template")
    try:
        if isinstance(text, list):  # Several, of which one is the default.
            rows = {row["name"]: row["template"] for row in text}
            text = rows.get("default")
            others = [name for name in rows if name != "default"]
            if others:
                _LOG.warning("%s: the chat templates %s are not used", folder, ", ".join(others))
        if TEMPLATE in files:
            other, text = text, files[TEMPLATE].decode("utf-8")
            if other is not None and other != text:
                _LOG.warning("%s: %s counts, not that of %s", folder, TEMPLATE, SETTINGS)
        return None if text is None else ChatTemplate(text, tuple(sorted(tokens.items())))
    except json_files.MALFORMED as error:
        raise UserError(f"The chat template of {folder} cannot be read: {error}.") from None


def settings_of(
    tokens: Mapping[str, str], context: int, prefix_space: bool, template: ChatTemplate | None
) -> JsonObject:
    """Returns the fields of a tokenizer_config.json for a tokenizer that had none."""
    fields: JsonObject = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        # transformers prefers this value to that of tokenizer.json.
        "add_prefix_space": prefix_space,
        # Without this list transformers 4 also returns token_type_ids, and GPT-2 adds their
        # embeddings to its input.
        "model_input_names": ["input_ids", "attention_mask"],
        **tokens,
    }
    if template:
        fields |= {"chat_template": template.text, **dict(template.special_tokens)}
    return fields


def as_json(fields: Mapping[str, object]) -> bytes:
    """Returns the bytes of a JSON file of an export."""
    return (json.dumps(fields, indent=1) + "\n").encode()


def added(files: Mapping[str, bytes], tokens: Mapping[str, str], folder: Path) -> list[JsonObject]:
    """Returns the tokens that other files than tokenizer.json add, as rows of its `added_tokens`.

    Those of `added_tokens_decoder` in tokenizer_config.json come before those of
    added_tokens.json, of which the named ones are special.

    Raises:
      Exception: one of `json_files.MALFORMED` where a file is damaged.
    """
    rows: dict[str, JsonObject] = {}
    options = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for token, number in fields_of(files, ADDED, folder).items():
        special = token in tokens.values()
        rows[token] = dict.fromkeys(options, False) | {
            "normalized": not special,
            "special": special,
        }
        rows[token] |= {"id": number, "content": token}
    decoder = fields_of(files, SETTINGS, folder).get("added_tokens_decoder") or {}
    for key, token in decoder.items():
        flags = {name: bool(token.get(name)) for name in options}
        rows[token["content"]] = flags | {"id": int(key), "content": token["content"]}
    first = ("id", "content", *options)
    ordered = [{name: row[name] for name in first} for row in rows.values()]
    for row in ordered:
        if type(row["id"]) is not int or not isinstance(row["content"], str) or row["id"] < 0:
            raise ValueError(f"the token {row['content']!r} has the id {row['id']!r}")
    return ordered


def listed(ids: Sequence[int]) -> int | list[int]:
    """Returns one id alone, or several as a list, as files of `transformers` have them."""
    return ids[0] if len(ids) == 1 else list(ids)
