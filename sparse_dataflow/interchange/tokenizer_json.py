"""The tokenizer.json of a Hugging Face directory, whichever files it has.

vocab.json with merges.txt, and BERT's vocab.txt, are turned into one.  What other files say of the
tokens is then part of it, as in `transformers`: the tokens of added_tokens.json and of
`added_tokens_decoder`, and the settings of the tokenizer's class in tokenizer_config.json.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tokenizers

from sparse_dataflow.data import tokenizer_library
from sparse_dataflow.data.tokenizer import parse_merges
from sparse_dataflow.files import json_files
from sparse_dataflow.interchange import special_tokens

FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
_LISTS = ("vocab.json", "merges.txt")
_WORDS = "vocab.txt"
_SOURCES = ((FILE,), _LISTS, (_WORDS,))

LEGAL = f"{FILE}, nor {' with '.join(_LISTS)}, nor {_WORDS}"
"""The files of a tokenizer, after "neither" or "no"."""

_BERT, _GPT2 = "BertTokenizer", "GPT2Tokenizer"
_WITH_PREFIX_SPACE = (_GPT2, "GPTNeoXTokenizer", "CodeGenTokenizer")
"""Classes of which `add_prefix_space` counts, "no" where it is left out."""

_LOG = logging.getLogger(__name__)


def source(folder: Path) -> Path | None:
    """Returns the file with the tokens of a directory; None without one."""
    present = (names for names in _SOURCES if all((folder / name).exists() for name in names))
    return next((folder / names[0] for names in present), None)


def names(path: Path, files: Mapping[str, bytes]) -> dict[str, str]:
    """Returns the text of each named token; see `special_tokens.names`.

    Args:
      path: see `source`.
      files: see `special_tokens.read_files`.
    """
    return special_tokens.names(files, path.parent, _BERT if path.name == _WORDS else "")


def text_of(path: Path, files: Mapping[str, bytes]) -> str:
    """Returns a tokenizer.json: that of the directory, unchanged where other files add nothing.

    Args:
      path: see `source`.
      files: see `special_tokens.read_files`.

    Raises:
      Exception: one of `json_files.MALFORMED` where a file is damaged or of another class.
    """
    folder, named = path.parent, names(path, files)
    settings = special_tokens.fields_of(files, special_tokens.SETTINGS, folder)
    kind = special_tokens.tokenizer_class(settings)
    text, added = "", special_tokens.added(files, named, folder)
    if path.name == FILE:
        text = json_files.read_bytes(path).decode("utf-8")
        fields = json_files.parse(text)
    else:
        make = _words_json if path.name == _WORDS else _lists_json
        fields = make(folder, settings, kind, named)
        vocab = tokenizer_library.vocabulary(fields)
        special = [t for t in dict.fromkeys([END_OF_TEXT, *named.values()]) if t in vocab]
        listed = {row["content"] for row in added}
        added += [added_token(vocab[t], t, True) for t in special if t not in listed]
        kind = kind or (_BERT if path.name == _WORDS else "")
    changes = [*_set_by_class(fields, kind, settings), *_added_tokens(fields, added, folder)]
    if text and changes:
        _LOG.warning("%s: %s of other files, as in transformers", path, ", ".join(changes))
    return json.dumps(fields, ensure_ascii=False) if changes or not text else text


def added_token(number: int, text: str, special: bool, **options: bool) -> json_files.JsonObject:
    """Returns a row of `added_tokens` of a tokenizer.json."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **plain, **options, "special": special}


def _lists_json(folder, settings, kind, named) -> json_files.JsonObject:
    """Returns the tokenizer.json of a vocab.json with merges.txt, GPT-2's form of a tokenizer."""
    if kind not in ("", _GPT2, "PreTrainedTokenizer"):
        raise ValueError(f"it is a {kind} without a {FILE}; legal: {_GPT2}, or add {FILE}")
    vocab = json_files.load(folder / _LISTS[0])
    merges = parse_merges(json_files.read_bytes(folder / _LISTS[1]).decode("utf-8"))
    bos = named.get("bos_token")
    start_token = bos if settings.get("add_bos_token") and bos in vocab else None
    return byte_level(vocab, merges, bool(settings.get("add_prefix_space")), start_token)


def _words_json(folder, settings, kind, named) -> json_files.JsonObject:
    """Returns the tokenizer.json of a vocab.txt, BERT's form of a tokenizer."""
    if kind not in ("", _BERT):
        raise ValueError(f"it is a {kind} without a {FILE}; legal: {_BERT}, or add {FILE}")
    lines = json_files.read_bytes(folder / _WORDS).decode("utf-8").removesuffix("\n").split("\n")
    vocab = {line.removesuffix("\r"): number for number, line in enumerate(lines)}
    engine = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(vocab, unk_token=named.get("unk_token", "[UNK]"))
    )
    engine.normalizer = tokenizers.normalizers.BertNormalizer()
    engine.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    engine.decoder = tokenizers.decoders.WordPiece()
    around = [named.get(f"{name}_token") for name in ("cls", "sep")]
    if set(around) <= set(vocab):
        engine.post_processor = tokenizers.processors.TemplateProcessing(
            single=" $A ".join(around), special_tokens=[(token, vocab[token]) for token in around]
        )
    return json_files.parse(engine.to_str())


def byte_level(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    prefix_space: bool = False,
    start_token: str | None = None,
) -> json_files.JsonObject:
    """Returns the fields of a tokenizer.json with GPT-2's settings.

    Args:
      vocab: id of each token.
      merges: pairs of tokens.
      prefix_space: whether a space comes before a text.
      start_token: token in front of a text; None for none.
    """
    steps = {"type": "ByteLevel", "add_prefix_space": prefix_space, "trim_offsets": True}
    # The start is added by a template, as an imported tokenizer does, so that other programs add it
    # too.
    processor = None
    if start_token is not None:
        token, text = {"SpecialToken": {"id": start_token, "type_id": 0}}, {"id": "A", "type_id": 0}
        pair = {"Sequence": {"id": "B", "type_id": 0}}
        processor = {
            "type": "TemplateProcessing",
            "single": [token, {"Sequence": text}],
            "pair": [token, {"Sequence": text}, pair],
            "special_tokens": {
                start_token: {
                    "id": start_token,
                    "ids": [vocab[start_token]],
                    "tokens": [start_token],
                }
            },
        }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": steps | {"use_regex": True},
        "post_processor": processor,
        "decoder": steps | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(vocab),
            "merges": [list(merge) for merge in merges],
        },
    }


def _set_by_class(fields, kind, settings) -> Iterator[str]:
    """Gives steps of a tokenizer.json the settings of the class; yields the name of each change.

    Settings that a tokenizer_config.json leaves out have the defaults of the class.
    """
    values_by_step: dict[str, json_files.JsonObject] = {}
    if kind in _WITH_PREFIX_SPACE:
        space = bool(settings.get("add_prefix_space"))
        values_by_step["ByteLevel"] = {"add_prefix_space": space}
    if kind == _BERT:
        values_by_step["BertNormalizer"] = {
            "handle_chinese_chars": bool(settings.get("tokenize_chinese_chars", True)),
            "strip_accents": settings.get("strip_accents"),
            "lowercase": bool(settings.get("do_lower_case", True)),
        }
    for step in _steps([fields.get("normalizer"), fields.get("pre_tokenizer")]):
        for name, value in values_by_step.get(str(step.get("type")), {}).items():
            if step.get(name) != value:
                step[name] = value
                yield f"{name}={value}"


def _steps(step) -> Iterator[json_files.JsonObject]:
    """Yields the steps of a normalizer or pre-tokenizer, those inside a sequence as well."""
    if isinstance(step, list):
        for each in step:
            yield from _steps(each)
    elif isinstance(step, dict):
        yield step
        yield from _steps([step.get("normalizers"), step.get("pretokenizers")])


def _added_tokens(fields, added, folder) -> list[str]:
    """Adds tokens to a tokenizer.json; returns words for what was added."""
    vocab, rows = tokenizer_library.vocabulary(fields), list(fields.get("added_tokens") or ())
    present = {row["content"] for row in rows}
    new = sorted((r for r in added if r["content"] not in present), key=lambda row: row["id"])
    for row in added:
        token, number = row["content"], row["id"]
        if vocab.get(token, number) != number:
            _LOG.warning(
                "%s: the token %r has the id %d, and %d in another file, which does not count",
                folder, token, vocab[token], number,
            )  # fmt: skip
    size, whole = len(vocab), {row["content"]: row["id"] for row in new} | vocab
    numbers = [whole[row["content"]] for row in new if row["content"] not in vocab]
    follow = list(range(size, size + len(numbers)))
    if numbers != follow or set(vocab.values()) != {*range(size)}:
        # The library gives a token that its model lacks the next id.
        if numbers and not isinstance(fields["model"]["vocab"], dict):
            raise ValueError(f"its added tokens have the ids {numbers}; legal: {follow}")
        fields["model"]["vocab"] = whole if numbers else fields["model"]["vocab"]
    rows += [{**row, "id": whole[row["content"]]} for row in new]
    fields["added_tokens"] = sorted(rows, key=lambda row: row["id"])
    return [f"{len(new)} tokens such as {new[0]['content']!r}"] if new else []
