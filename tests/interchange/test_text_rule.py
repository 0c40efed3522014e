"""Exported programs read prompts and write texts as `generate` does, with all tokenizers."""

import json

import base_tokenizers
import numpy as np
import other_tokenizers
import pytest
import tokenizers

from sparse_dataflow.data.tokenizer import byte_tokenizer
from sparse_dataflow.evaluation.stopping import StreamDecoder
from sparse_dataflow.interchange import tokenizer_files
from sparse_dataflow.interchange.serving.prompts import Text
from sparse_dataflow.interchange.serving.text_rule import text_rule

BASE = (*base_tokenizers.BYTE_LEVEL, *base_tokenizers.FALLBACK)


def with_everything(engine, ends):
    """Gives a tokenizer what only a program with rules of its own would obey: padding, truncation,
    and tokens around a text."""
    first, last = ends
    numbers = [(token, engine.token_to_id(token)) for token in ends]
    engine.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} $B {last}", special_tokens=numbers
    )
    engine.enable_padding(length=40, pad_id=numbers[1][1], pad_token=last)
    engine.enable_truncation(3)


@pytest.fixture(scope="module", params=["ours", *BASE, *other_tokenizers.KINDS])
def pair(request, tmp_path_factory):
    """(tokenizer, `Text` of an export of it, id in the export of each id)."""
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "ours":
        tokenizer = byte_tokenizer(300)
    else:
        if request.param in BASE:
            engine = tokenizers.Tokenizer.from_str(
                json.dumps(base_tokenizers.fields(request.param))
            )
            names = ["<first>", "<last>"]
            engine.add_special_tokens(names)
        else:
            names = other_tokenizers.SPECIALS
            engine = tokenizers.Tokenizer.from_str(other_tokenizers.text_of(request.param))
        with_everything(engine, names)
        (folder / "given").mkdir()
        engine.save(str(folder / "given" / "tokenizer.json"))
        last = engine.token_to_id(names[1])
        generation = {"eos_token_id": [last, 0]} if request.param in BASE else {}
        (folder / "given" / "generation_config.json").write_text(json.dumps(generation))
        config = {"vocab_size": engine.get_vocab_size() + 3, "eos_token_id": last}
        tokenizer = tokenizer_files.read(folder / "given", config).tokenizer
    tokenizer_files.write(folder, tokenizer, 64)
    theirs = np.asarray(tokenizer.original_ids or range(tokenizer.vocab_size))
    rule = json.loads(json.dumps(text_rule(tokenizer)))
    return tokenizer, Text(folder, rule), theirs


def test_prompts_have_the_ids_of_generate(pair):
    tokenizer, program, theirs = pair
    names = [f"the {name} dog" for name in tokenizer.special_ids]
    texts = [
        "",
        " ",
        "the brown dog",
        " dog\n",
        "caf\u00e9 \U0001f642",
        *other_tokenizers.TEXTS.values(),
    ]
    for text in (*texts, *names):
        [ids] = tokenizer.encode_prompts([text])
        assert program.ids(text) == theirs[ids].tolist(), text


def test_texts_are_those_of_generate(pair):
    tokenizer, program, theirs = pair
    rng = np.random.default_rng(0)
    prompts = [tokenizer.encode_prompts([text])[0] for text in ("", "the brown", "dog ")]
    for number in range(90):
        before = prompts[number % 3]
        new = rng.integers(0, tokenizer.vocab_size, 12).tolist()
        decoder = StreamDecoder(tokenizer, (), before)
        ours = "".join(map(decoder.add, new)) + decoder.end("length")
        assert program.added(theirs[before].tolist(), theirs[new].tolist()) == ours, (before, new)
