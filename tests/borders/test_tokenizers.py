"""A tokenizer.json that somebody else wrote: it is used or refused, and never grows a text without
end."""

import base64
import copy
import json

import drawn
import pytest
from drawn_inputs import DrawnInputs

from sparse_dataflow.data import tokenizer_growth, tokenizer_library
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import tokenizer_files

TEXTS = [
    "a b",
    "to be or\nnot",
    "é漢😀\u0301",
    " " * 30,
    "a" * 300,
    "\0\ufeff\u202e",
    "<|endoftext|>",
]
REGEXES = [
    "",
    " ",
    "a",
    ".",
    "(?=a)",
    "a*",
    "(a+)+b",
    "(?<!a)",
    "[",
    "(",
    "\\p{L}+",
    "a{5000}",
    "(?:a|aa)+$",
]


def steps(draw, role):
    """Steps of a role, mostly legal ones."""
    pattern = draw.choice(
        [{"String": draw.choice(["", "a", " ", "é", "ab"])}, {"Regex": draw.choice(REGEXES)}]
    )
    content = draw.choice(["", "a", "aa", " ", "▁", "a" * 50, drawn.text(draw)])
    behavior = draw.choice(["Removed", "Isolated", "MergedWithNext", "Contiguous"])
    replace = {"type": "Replace", "pattern": pattern, "content": content}
    piece = {"Sequence": {"id": draw.choice("AAAB"), "type_id": 0}}
    metaspace = {"type": "Metaspace", "replacement": (content or "_")[0], "split": True}
    kinds = {
        "normalizers": [
            replace,
            {"type": "Prepend", "prepend": content},
            {"type": "Strip", "strip_left": True, "strip_right": False},
            {"type": "Precompiled", "precompiled_charsmap": draw.choice(["", "AAAA"])},
            *({"type": name} for name in ("NFKD", "NFC", "Lowercase", "StripAccents", "Nmt")),
        ],
        "pretokenizers": [
            {"type": "Split", "pattern": pattern, "invert": draw.random() < 0.5}
            | {"behavior": behavior},
            {"type": "Punctuation", "behavior": behavior},
            {"type": "Digits", "individual_digits": True},
            {"type": "FixedLength", "length": draw.choice([0, 1, 5, 2**40])},
            metaspace | {"prepend_scheme": "always"},
            *({"type": name} for name in ("Whitespace", "UnicodeScripts", "WhitespaceSplit")),
        ],
        "decoders": [
            replace,
            {"type": "Strip", "content": (content or "_")[0], "start": draw.choice([0, 1, 10**9])}
            | {"stop": draw.choice([0, 1, 2**63])},
            {"type": "CTC", "pad_token": content, "word_delimiter_token": "", "cleanup": True},
            metaspace | {"prepend_scheme": "never"},
            {"type": "Fuse"},
            {"type": "ByteFallback"},
        ],
        "processors": [
            {"type": "TemplateProcessing", "pair": [piece], "special_tokens": {}}
            | {"single": [piece] * draw.choice([0, 1, 3, 9**5])},
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
        ],
    }
    chosen = []
    for _ in range(draw.choice([0, 1, 1, 2, 30])):
        chosen_step = dict(draw.choice(kinds[role]))
        if draw.random() < 0.05:
            chosen_step[draw.choice(sorted(chosen_step))] = drawn.value(draw)
        chosen.append(chosen_step)
    return chosen


@pytest.fixture(scope="module")
def fields():
    trained = Tokenizer.from_texts(["to be or not to be a b ab"] * 9, 270)
    return json.loads(tokenizer_files.plain_text(trained))


def changed(draw, fields):
    fields = copy.deepcopy(fields)
    fields_of_steps = {
        "normalizer": "normalizers",
        "pre_tokenizer": "pretokenizers",
        "decoder": "decoders",
        "post_processor": "processors",
    }
    for name in draw.sample(sorted(fields_of_steps), 2):
        # With the step of bytes that every tokenizer here has.
        present = [fields[name]] * bool(fields[name])
        fields[name] = {
            "type": "Sequence",
            fields_of_steps[name]: steps(draw, fields_of_steps[name]) + present,
        }
    if draw.random() < 0.2:
        fields["added_tokens"] += [
            {
                "id": draw.choice([0, 268, 268, 269, 270, 2**40]),
                "content": drawn.text(draw),
                "single_word": False,
                "lstrip": True,
                "rstrip": True,
                "normalized": True,
                "special": draw.random() < 0.5,
            }
        ]
    for _ in range(draw.choice([0] * 6 + [1])):
        model = fields["model"]
        name = draw.choice(sorted(model))
        model[name] = draw.choice([drawn.value(draw), True, "a", 0.5, 1e9])
    for name in ("truncation", "padding"):
        if draw.random() < 0.1:
            fields[name] = draw.choice(
                [
                    {"strategy": "LongestFirst", "max_length": 0, "stride": 9, "direction": "Left"},
                    {
                        "strategy": {"Fixed": 10**12},
                        "direction": "Left",
                        "pad_id": 0,
                        "pad_type_id": 0,
                        "pad_token": "",
                        "pad_to_multiple_of": None,
                    },
                ]
            )
    if draw.random() < 0.05:
        fields[draw.choice(sorted(fields))] = drawn.value(draw)
    text = json.dumps(fields).encode()
    return drawn.damaged(draw, text) if draw.random() < 0.1 else text


def test_a_foreign_tokenizer_is_used_or_refused(fields, tmp_path):
    counts = DrawnInputs("tokenizers")
    for _ in counts:
        (tmp_path / "tokenizer.json").write_bytes(changed(counts.draw, fields))
        with counts.one("a tokenizer.json"):
            tokenizer = tokenizer_files.read(tmp_path, {"vocab_size": 270}).tokenizer
            for text in TEXTS:
                ids = tokenizer.encode(text)
                assert len(ids) <= tokenizer_growth.MOST_GROWTH * (len(text.encode()) + 100)
                tokenizer.decode(ids)
            tokenizer.encode_chat(TEXTS)


def section(name, *steps):
    inner = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
    return {name: {"type": "Sequence", inner[name]: list(steps)}}


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
CHARSMAP = base64.b64encode(bytes(4) + b"a" * 9 + b"\0" + b"x" * 5000 + b"\0").decode()
TEMPLATE = {"single": [{"SpecialToken": {"id": "a", "type_id": 0}}], "pair": []}
MULTIPLY = {
    "bytes of bytes": section("pre_tokenizer", *[LEVEL] * 9),
    "bytes of bytes in both": section("pre_tokenizer", *[LEVEL] * 3)
    | section("normalizer", *[{"type": "ByteLevel"}] * 4),
    "forms of bytes": section("normalizer", *[{"type": "ByteLevel"}, {"type": "NFKD"}] * 4),
    "a prefix": {"normalizer": {"type": "Prepend", "prepend": "x" * 10**4}},
    "a prefix of each piece": section(
        "pre_tokenizer",
        *[{"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}] * 9,
    ),
    "a map of characters": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}
    },
    "no mark of words": section("decoder", *[{"type": "BPEDecoder", "suffix": ""}] * 9),
    "no delimiter": section(
        "decoder",
        *[{"type": "CTC", "pad_token": "_", "word_delimiter_token": "", "cleanup": False}] * 9,
    ),
    "a template": {
        "post_processor": {
            "type": "TemplateProcessing",
            "special_tokens": {"a": {"id": "a", "ids": [0] * 9999, "tokens": ["a"] * 9999}},
            **TEMPLATE,
        }
    },
    "many steps": section("normalizer", *[{"type": "BertNormalizer"}] * 200),
    "a word without end": {"model": {"max_input_chars_per_word": 10**9}},
    "an unknown step": {"pre_tokenizer": {"type": "Doubles"}},
}


@pytest.mark.parametrize("name", MULTIPLY)
def test_no_step_multiplies_a_text(fields, tmp_path, name):
    changes = {
        n: {**fields[n], **step} if n == "model" else step for n, step in MULTIPLY[name].items()
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields | changes))
    with pytest.raises(
        UserError, match=r"times as long|has a step|steps; legal|has 200 steps|square of it"
    ):
        tokenizer_files.read(tmp_path, {"vocab_size": 270})


def test_a_token_of_millions_of_characters_is_refused(fields, tmp_path):
    changed = copy.deepcopy(fields)
    changed["added_tokens"].append(
        {**changed["added_tokens"][0], "id": 270, "content": "x" * 10**6}
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match="a token of 1,000,000 characters"):
        tokenizer_files.read(tmp_path, {"vocab_size": 271})


REPLACE = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}
PUBLISHED = {
    "Llama 2": section(
        "normalizer",
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ),
    "T5": section("normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}, REPLACE)
    | {"pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}},
    "BERT": {"normalizer": {"type": "BertNormalizer"}, "decoder": {"type": "WordPiece"}},
    "many replacements": section("normalizer", *[REPLACE] * 20),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_steps_of_published_tokenizers_are_legal(name):
    tokenizer_growth.refuse_growth(PUBLISHED[name] | {"model": {"byte_fallback": "Llama" in name}})


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.mark.parametrize("name", ["normalizer", "decoder"])
@pytest.mark.parametrize("count", [7, 40])
def test_replacements_that_grow_a_text_without_end_are_refused(fields, tmp_path, name, count):
    inner = {"normalizer": "normalizers", "decoder": "decoders"}[name]
    steps = [DOUBLE] * count + [fields[name]] * bool(fields[name])
    text = json.dumps({**fields, name: {"type": "Sequence", inner: steps}})
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match="times as long"):
        tokenizer_files.read(tmp_path, {"vocab_size": 270})


def test_a_panic_is_a_user_error():
    class PanicException(BaseException):
        pass

    with pytest.raises(UserError, match="cannot encode a text: index out of range"):
        with tokenizer_library.failures("encode a text"):
            raise PanicException("index out of range\nmore")
    with pytest.raises(KeyboardInterrupt), tokenizer_library.failures("encode a text"):
        raise KeyboardInterrupt
