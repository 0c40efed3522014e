"""Tokenizers in the metadata of GGUF files, as files of a Hugging Face directory, and back."""

import json
from collections.abc import Mapping, Sequence

from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.data.tokenizer_library import BYTE_TOKEN
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import special_tokens, tokenizer_files, tokenizer_json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of a token in a GGUF file."""

_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_SPECIALS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Name of a token in tokenizer_config.json -> its name in a GGUF file."""

_TURN_ENDS = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|end|>", "<|end_of_text|>",
              "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>")  # fmt: skip
"""Control tokens that end a text in llama.cpp, whatever the metadata name."""

_SPACE = "\u2581"
_GPT2, _LLAMA = "gpt2", "llama"

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _byte_level(use_regex):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
            "use_regex": use_regex}  # fmt: skip


def _split(*patterns):
    steps: list[json_files.JsonObject] = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*steps, _byte_level(False)]}


_DIGITS = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(True)],
}
_LLAMA3 = _split(rf"{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}")
_QWEN2 = _split(rf"{_WORDS}|\p{{N}}|{_OTHERS}")
_UPPER, _LOWER = _CASED
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_LAST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

STEPS: Mapping[str, json_files.JsonObject] = {
    "gpt-2": _byte_level(True),
    "smollm": _DIGITS,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "tekken": _split(rf"{_CASES[0]}|{_CASES[1]}|\p{{N}}|{_LAST}"),
    "gpt-4o": _split(rf"{_CASES[0]}{_ENDS}|{_CASES[1]}{_ENDS}|\p{{N}}{{1,3}}|{_LAST}"),
    "default": _split(
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    ),
}
"""Name of a pre-tokenizer in llama.cpp -> the steps of tokenizer.json that cut a text so."""

_SAME_STEPS = {
    "starcoder": "smollm", "refact": "smollm", "command-r": "smollm", "codeshell": "smollm",
    "exaone": "smollm", "phi-2": "gpt-2", "olmo": "gpt-2", "jina-es": "gpt-2", "jina-de": "gpt-2",
    "mpt": "gpt-2", "gigachat": "gpt-2", "llama3": "llama-bpe", "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe", "pixtral": "llama-bpe", "dbrx": "llama-bpe", "smaug-bpe": "llama-bpe",
    "deepseek-r1-qwen": "qwen2", "stablelm2": "qwen2", "granite-docling": "smollm",
    "megrez": "qwen2", "smollm2": "smollm",
}  # fmt: skip
"""Other names of the same steps."""

_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"}
"""Names whose words that are tokens stay whole, whatever the merges are."""

_BEGINS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"}
"""Names with which texts begin with the begin of text where no key says so."""


def read(metadata: json_files.JsonObject, rows: int) -> dict[str, bytes]:
    """Returns the files of the tokenizer in metadata: name -> content.

    Args:
      metadata: of the file.
      rows: of the embedding.

    Raises:
      UserError: the kind of tokenizer is not supported.
      Exception: one of `json_files.MALFORMED` where the metadata are damaged.
    """
    kind = metadata.get(f"{_KEY}model")
    if kind not in (_GPT2, _LLAMA):
        raise UserError(f"{_KEY}model={kind!r}; legal: {_GPT2}, {_LLAMA}.")
    tokens, types = metadata[f"{_KEY}tokens"], metadata.get(f"{_KEY}token_type")
    types = [NORMAL] * len(tokens) if types is None else types
    if len(types) != len(tokens) or len(tokens) > rows:
        raise ValueError(f"it has {len(tokens)} tokens of {len(types)} types, and {rows} rows")
    vocab = {token: n for n, (token, t) in enumerate(zip(tokens, types)) if t != UNUSED}
    added = [
        tokenizer_json.added_token(n, token, kind == CONTROL)
        for n, (token, kind) in enumerate(zip(tokens, types))
        if kind in (CONTROL, USER_DEFINED)
    ]
    names = {name: _token(metadata, tokens, theirs) for name, theirs in _SPECIALS.items()}
    # Without the key llama.cpp goes by the kind of tokenizer.
    adds_bos = metadata.get(f"{_KEY}add_bos_token", kind == _LLAMA or _pre(metadata) in _BEGINS)
    start_token = names["bos"] if adds_bos else None
    fields = (_byte_level_fields if kind == _GPT2 else _sentence_fields)(
        metadata, tokens, types, vocab, added, start_token
    )
    settings: json_files.JsonObject = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {f"{name}_token": text for name, text in names.items() if text is not None}
    if _TEMPLATE in metadata:
        settings["chat_template"] = metadata[_TEMPLATE]
    return {
        tokenizer_json.FILE: json.dumps(fields, ensure_ascii=False).encode(),
        special_tokens.SETTINGS: special_tokens.as_json(settings),
        special_tokens.GENERATION: special_tokens.as_json(_generation(metadata, tokens, types)),
    }


def _token(metadata, tokens, name):
    """Returns the text of a named token; None without one."""
    number = metadata.get(f"{_KEY}{name}_token_id")
    return tokens[number] if type(number) is int and 0 <= number < len(tokens) else None


def _generation(metadata, tokens, types):
    """Returns the fields of generation_config.json: where texts begin and end."""
    ends = [metadata.get(f"{_KEY}{name}_token_id") for name in ("eos", "eot", "eom")]
    ends += [
        number
        for number, (token, kind) in enumerate(zip(tokens, types))
        if kind in (CONTROL, USER_DEFINED) and token in _TURN_ENDS
    ]
    ends = [number for number in dict.fromkeys(ends) if type(number) is int]
    fields = {"eos_token_id": special_tokens.listed(ends)} if ends else {}
    start_token = metadata.get(f"{_KEY}bos_token_id")
    return fields if start_token is None else {**fields, "bos_token_id": start_token}


def _pre(metadata):
    return metadata.get(f"{_KEY}pre", "default")


def _byte_level_fields(metadata, tokens, types, vocab, added, start_token):
    name = _pre(metadata)
    steps = STEPS.get(_SAME_STEPS.get(name, name))
    if steps is None:
        legal = ", ".join((*STEPS, *_SAME_STEPS))
        raise UserError(f"{_KEY}pre={name!r}; legal: {legal}.")
    merges = [tuple(merge.split(" ")) for merge in metadata[f"{_KEY}merges"]]
    if not all(len(merge) == 2 for merge in merges):
        raise ValueError(f"{_KEY}merges has one that is not of two tokens")
    merges = [merge for merge in merges if "".join(merge) in vocab]  # See `_merges_of`.
    fields = tokenizer_json.byte_level(vocab, merges, start_token=start_token)
    fields["added_tokens"] = added
    fields["pre_tokenizer"] = steps
    fields["model"]["ignore_merges"] = name in _WHOLE_WORDS
    if _SAME_STEPS.get(name, name) == "qwen2":
        fields["normalizer"] = {"type": "NFC"}
    return fields


def _sentence_fields(metadata, tokens, types, vocab, added, start_token):
    """Returns the fields of a tokenizer of SentencePiece: the pair of the highest score is merged
    first, and a character without a token becomes its bytes."""
    scores = metadata[f"{_KEY}scores"]
    if len(scores) != len(tokens):
        raise ValueError(f"it has {len(tokens)} tokens and {len(scores)} scores")
    texts = {token: n for token, n in vocab.items() if types[n] in (NORMAL, USER_DEFINED)}
    # The file has scores and no merges.  So every cut of a token into two tokens is a merge, with
    # the rank of the token's score.
    merges = []
    for token, number in texts.items():
        if types[number] != NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = texts.get(token[:cut]), texts.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[number], left, right))
    merges.sort()
    pairs = [(tokens[left], tokens[right]) for _, left, right in merges]
    fields = tokenizer_json.byte_level(vocab, pairs, start_token=start_token)
    fields["added_tokens"] = added
    space = metadata.get(f"{_KEY}add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoders: Sequence[object] = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    unknown = next((t for t, n in vocab.items() if types[n] == UNKNOWN), None)
    unknown = unknown or _token(metadata, tokens, _SPECIALS["unk"])
    fields |= {
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]} if space else replace,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*decoders, strip] if space else decoders},
    }
    fields["model"] |= {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    return fields


def write(tokenizer: Tokenizer, rows: int) -> json_files.JsonObject:
    """Returns the metadata of a tokenizer, in its original ids.

    Args:
      tokenizer: the tokenizer.
      rows: of the embedding; ids without a token get a name of their own.

    Raises:
      UserError: llama.cpp has no such tokenizer.
    """
    text = tokenizer.original or tokenizer_files.plain_text(tokenizer)
    fields = json_files.parse(text)
    model = fields["model"]
    if model.get("type", "BPE") != "BPE":
        raise UserError(
            f"The GGUF form has no tokenizer of the kind {model.get('type')}; legal: BPE, with "
            "bytes or with byte fallback."
        )
    vocab = dict(model["vocab"])
    specials = {}
    for token in fields.get("added_tokens") or ():
        vocab[token["content"]] = token["id"]
        specials[token["id"]] = CONTROL if token.get("special") else USER_DEFINED
    # GGUF has a token for each row of the embedding, which may be longer than the vocabulary.
    by_id = {number: token for token, number in vocab.items()}
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(rows)]
    fallback = bool(model.get("byte_fallback"))
    types = [_type(number, by_id, specials, fallback) for number in range(rows)]
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    ids = tokenizer.original_ids or range(tokenizer.vocab_size)
    ends = [ids[number] for number in sorted(tokenizer.ends)]
    metadata: json_files.JsonObject = {
        f"{_KEY}tokens": tokens,
        f"{_KEY}token_type": types,
        f"{_KEY}eos_token_id": ids[tokenizer.eot_id],
        f"{_KEY}bos_token_id": ids[tokenizer.start_id],
        f"{_KEY}add_bos_token": bool(tokenizer.identity.prefix),
    }
    others = [number for number in ends if number != ids[tokenizer.eot_id]]
    # llama.cpp ends at two ids, of the text and of a turn; a third has no key.
    if others:
        metadata[f"{_KEY}eot_token_id"] = others[0]
    if tokenizer.chat_template:
        metadata[_TEMPLATE] = tokenizer.chat_template.text
    if fallback:
        metadata |= _sentence_metadata(fields, tokens, merges)
    else:
        metadata |= {f"{_KEY}model": _GPT2, f"{_KEY}pre": _named_steps(fields)}
        metadata[f"{_KEY}merges"] = _merges_of(merges, tokens)
    return metadata


def _merges_of(merges, tokens):
    """Returns the merges as a file has them. llama.cpp refuses a file without any; one into what is
    no token changes no text."""
    vocabulary = set(tokens)
    pairs = ((left, right) for left in tokens for right in tokens if left + right not in vocabulary)
    return [" ".join(merge) for merge in merges or [next(pairs)]]


def _type(number, by_id, specials, fallback):
    if number not in by_id:
        return UNUSED
    if fallback and BYTE_TOKEN.fullmatch(by_id[number]):
        return BYTE
    return specials.get(number, NORMAL)


def _sentence_metadata(fields, tokens, merges):
    """Returns the metadata of a tokenizer with byte fallback; a token's score is lower the later
    its merge comes."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    scores = [float(-ranks.get(token, len(merges))) for token in tokens]
    prefix = "Prepend" in json.dumps(fields.get("normalizer"))
    metadata = {f"{_KEY}model": _LLAMA, f"{_KEY}pre": "default", f"{_KEY}scores": scores,
                f"{_KEY}add_space_prefix": prefix}  # fmt: skip
    unknown = fields["model"].get("unk_token")
    if unknown in tokens:
        metadata[f"{_KEY}unknown_token_id"] = tokens.index(unknown)
    return metadata


def _named_steps(fields):
    """Returns the name of the pre-tokenizer of a byte-level tokenizer.json."""
    steps = _comparable(fields.get("pre_tokenizer"))
    for name, reference in STEPS.items():
        if steps == _comparable(reference):
            return name
    raise UserError(
        "The GGUF form has no name for the way in which tokenizer.json cuts texts; legal: that of "
        f"{', '.join(STEPS)}."
    )


def _comparable(steps):
    """Returns the steps without the fields that change no text."""
    if isinstance(steps, dict):
        fields = {
            n: _comparable(v) for n, v in steps.items() if n not in ("trim_offsets", "invert")
        }
        steps_inside = fields.get("pretokenizers")
        return (
            steps_inside[0] if isinstance(steps_inside, list) and len(steps_inside) == 1 else fields
        )
    return [_comparable(step) for step in steps] if isinstance(steps, list) else steps
