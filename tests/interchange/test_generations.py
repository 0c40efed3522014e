"""Each generation of transformers loads every export, and writes the text that we write.

`make optional` installs the generations (see generations.py); elsewhere these tests are skipped.
"""

import functools
import json
import os
import subprocess

import generations
import numpy as np
import pytest
from directories import SPECIALS, config, engine, weights, write
from generations import GENERATIONS
from make_fixture import FOLDERS
from marks import some

import sparse_dataflow as sd

PROMPTS = ["the man", "def f(x):", "a", "the sea"]
TOKENS = 6
"""As read_exports.py."""
NAMES = {
    # Without a class 4.x takes Llama's, which adds a begin of text; 5.0's asks for <unk>.
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": SPECIALS[0],
    "eos_token": SPECIALS[1],
}
BOS, END, TURN, _, PAD = (engine().token_to_id(token) for token in SPECIALS)

IDENTITIES = {
    "one end": ({"eos_token_id": TURN}, None, TURN),
    "second of several ends": ({"eos_token_id": [END, TURN]}, None, TURN),
    "ends of generation_config.json": ({"eos_token_id": END}, {"eos_token_id": [END, PAD]}, PAD),
    "an end of config.json alone": ({"eos_token_id": [END, TURN]}, {"eos_token_id": END}, TURN),
    "text that goes on": ({"eos_token_id": END}, None, 5),
}
"""Changes of config.json, generation_config.json, and the token that the model always writes."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Each family's fixture and directories with several ends, exported: {name: (model, folder)}"""
    place = tmp_path_factory.mktemp("exports")
    sources = dict(FOLDERS)
    for number, (name, (fields, generation, always)) in enumerate(IDENTITIES.items()):
        files = {"tokenizer_config__json": NAMES}
        if generation:
            files["generation_config__json"] = generation
        # Half of them put a begin of text in front of a prompt.
        arguments = config(**fields), engine(prefixed=number % 2 == 0), weights(always)
        sources[name] = write(place / "in" / f"{number}", *arguments, **files)
    models = {}
    for number, (name, source) in enumerate(sources.items()):
        model = sd.load(source)
        models[name] = model, sd.save(model, place / f"{number}", form="dense")
    return models


@pytest.fixture(scope="module")
def ours(models):
    return functools.cache(lambda name: expected(models[name][0]))


def expected(model):
    """Returns for each prompt the original ids, logits and text, and the tokens until its end."""
    tokenizer = model.tokenizer
    order = np.asarray(tokenizer.original_ids or range(model.model.vocab_size))
    rows = []
    for prompt, text in zip(PROMPTS, sd.generate(model, PROMPTS, max_new_tokens=TOKENS)):
        [ids] = tokenizer.encode_prompts([prompt])
        logits = np.asarray(sd.logits(model, np.asarray([ids])))[0, -1, : len(order)]
        rows.append((order[np.asarray(ids)].tolist(), logits, order, text))
    return rows


@pytest.fixture(scope="module", params=GENERATIONS)
def theirs(request, models):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    name = request.param
    folder = generations.folder(name)
    if folder is None:
        pytest.skip(f"transformers {name} is not installed; `make optional` installs it")
    folders = {family: str(path) for family, (_, path) in models.items()}
    run = subprocess.run(
        generations.read(name, folders, PROMPTS),
        env=os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(run.stdout.splitlines()[-1])
    if GENERATIONS[name].packages:
        assert result["version"].startswith(name)
    return GENERATIONS[name], result["exports"]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FOLDERS, *IDENTITIES])
def test_every_export_has_our_ids_logits_text_and_end(theirs, ours, family):
    generation, exports = theirs
    rows = exports[family]
    if family in generation.refused:
        assert generation.refused[family] in rows
        return
    assert isinstance(rows, list), rows
    for row, mine in zip(rows, ours(family), strict=True):
        ids, logits, order, text = mine
        assert row["ids"] == ids
        assert np.abs(np.asarray(row["logits"])[order] - logits).max() < 1e-4
        assert row["text"] == text.text
        tokens = order[np.asarray(text.tokens, int)].tolist()
        # transformers appends the token that ends a text.
        assert row["output"][: len(tokens)] == tokens
        assert len(row["output"]) == len(tokens) + (text.stopped_by == "end")


@pytest.mark.parametrize("name", some([*IDENTITIES], "ends of generation_config.json"))
def test_the_ends_of_these_directories_differ(ours, name):
    """So that equal texts say something about the ends."""
    stopped = {text.stopped_by for *_, text in ours(name)}
    assert stopped == ({"length"} if name in list(IDENTITIES)[-2:] else {"end"})
