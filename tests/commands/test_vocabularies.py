"""Runs that add tokens to those of their weights: new rows, resumed runs, exports."""

import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from marks import some
from safetensors.numpy import load_file, save_file

import sparse_dataflow as sd

sys.path.insert(0, str(Path(__file__).parents[1] / "interchange"))

import base_tokenizers
import directories

from sparse_dataflow.commands import request
from sparse_dataflow.data import cache
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import huggingface, starting_point
from sparse_dataflow.monitoring.metrics import read_metrics
from sparse_dataflow.runs.variants import variants

pytestmark = pytest.mark.usefixtures("reports_without_continuations")
TOKENS = 24
KINDS = {"gpt2": False, "llama2": True}
"""Kind of tokenizer -> whether the model has one matrix for embedding and output."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a base of each kind and with texts in two languages."""
    folder = tmp_path_factory.mktemp("vocabularies")
    for kind, tied in KINDS.items():
        base = folder / kind
        _, rows = base_tokenizers.write(base, kind, padding=5)
        arrays = directories.weights(seed=3)
        rng = np.random.default_rng(1)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            arrays[name] = rng.normal(0, 0.1, (rows, directories.WIDTH)).astype("f4")
        if tied:
            del arrays["lm_head.weight"]
        save_file(arrays, base / "model.safetensors")
        fields = json.loads((base / "config.json").read_text())
        fields = directories.config(tie_word_embeddings=tied) | fields
        (base / "config.json").write_text(json.dumps(fields))
    for name, texts in (("new", base_tokenizers.HUNGARIAN), ("old", base_tokenizers.ENGLISH)):
        (folder / name).mkdir()
        for number in range(40):
            (folder / name / f"{number}.txt").write_text(
                " ".join(texts[number % 5 :]) + str(number)
            )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "FOLDER", folder / "cache")
        yield folder


def config_of(place, kind, out, **changes):
    changes = {
        "data.corpus": f"{place / 'new'}:0.7,{place / 'old'}:0.3",
        "data.extend_vocabulary": TOKENS,
        "training.steps": 4,
        "training.batch": 4,
        "training.sequence": 16,
        "training.learning_rate": 1e-2,
        "run.init_from": str(place / kind),
        "run.checkpoint_every": 2,
        "run.trackers": "none",
        "run.out": str(place / out),
    } | {name.replace("__", "."): value for name, value in changes.items()}
    starting_point.read.cache_clear()
    return request.Request(changes=changes).config(sparse=False)


@pytest.fixture(scope="module", params=some([*KINDS], "gpt2"))
def run(request, place):
    return request.param, sd.train(config_of(place, request.param, f"run_{request.param}"))


def old_and_new(place, kind, tokenizer):
    """Returns the library's tokenizers of the base and of a run."""
    text = (place / kind / "tokenizer.json").read_text()
    engines = (tokenizers.Tokenizer.from_str(t) for t in (text, tokenizer.original))
    return tuple(engines)


def test_a_run_adds_rows_that_begin_as_the_mean_of_what_they_join(place, run):
    kind, trained = run
    start = starting_point.read(str(place / kind))
    tokenizer = trained.model().tokenizer
    extended = starting_point.with_vocabulary(start, tokenizer)
    old, new = old_and_new(place, kind, tokenizer)
    before = load_file(place / kind / "model.safetensors")
    names = {"model.embed_tokens.weight": extended.params["embed"]["tokens"]}
    if not KINDS[kind]:
        names["lm_head.weight"] = extended.params["head"]["output"]
    assert ("output" in extended.params["head"]) != KINDS[kind]
    added = set(new.get_vocab().items()) - set(old.get_vocab().items())
    assert len(added) == TOKENS and extended.model.vocab_size == tokenizer.vocab_size
    for name, rows in names.items():
        rows = rows[tokenizer.ids_from_original]  # In the order of tokenizer.json.
        for token, number in old.get_vocab().items():
            np.testing.assert_array_equal(rows[number], before[name][number], err_msg=token)
        for token, number in added:
            ids = old.model.tokenize(token)
            expected = before[name][[t.id for t in ids]].mean(0)
            np.testing.assert_allclose(rows[number], expected, atol=1e-6, err_msg=token)


def test_the_report_says_tokens_a_word_before_and_after(place, run):
    kind, trained = run
    record = json.loads((trained.folder / "run.json").read_text())
    vocabulary = record["init_from"]["vocabulary"]
    assert vocabulary["tokens"] == TOKENS
    figures = vocabulary["corpora"]
    old, new = old_and_new(place, kind, trained.model().tokenizer)
    assert vocabulary["first_id"] == max(old.get_vocab().values()) + 1
    for name in ("new", "old"):
        documents = [p.read_text() for p in sorted((place / name).iterdir())]
        (key,) = [key for key in figures if key.endswith(name)]
        before, after = figures[key]["tokens_per_word"]
        held_out = [
            engine_tokens / sum(len(text.split()) for text in documents)
            for engine_tokens in (
                sum(len(engine.encode(text, add_special_tokens=False).ids) for text in documents)
                for engine in (old, new)
            )
        ]
        np.testing.assert_allclose([before, after], held_out, rtol=0.2)
        assert after < before if name == "new" else after <= before
    report = (trained.folder / "report.html").read_text()
    assert f"{TOKENS} more tokens than that of the weights" in report
    assert f"{figures[key]['tokens_per_word'][0]:.2f} tokens a word before" in report


def test_an_export_has_the_new_rows_and_a_tokenizer_of_equal_ids(place, run, tmp_path):
    _, trained = run
    model = trained.model()
    folder = sd.save(model, tmp_path / "exported", form="dense")
    fields = json.loads((folder / "config.json").read_text())
    assert fields["vocab_size"] == model.model.vocab_size
    arrays = load_file(folder / "model.safetensors")
    assert len(arrays["model.embed_tokens.weight"]) == fields["vocab_size"]
    engine = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (*base_tokenizers.HUNGARIAN[:3], *base_tokenizers.ENGLISH[:3], "🙂 x  ñ"):
        ids = model.tokenizer.encode(text)
        given = np.asarray(model.tokenizer.original_ids)[ids].tolist()
        assert given == engine.encode(text, add_special_tokens=False).ids
        assert model.tokenizer.decode(ids) == text
    again = huggingface.read(folder)
    assert again.tokenizer.vocab_size == model.tokenizer.vocab_size
    ids = model.tokenizer.encode(base_tokenizers.HUNGARIAN[0])
    other = sd.load(folder)
    np.testing.assert_allclose(
        sd.logits(other, other.tokenizer.encode(base_tokenizers.HUNGARIAN[0])[None]),
        np.asarray(sd.logits(model, ids[None])),
        atol=1e-4,
    )


def losses(folder):
    return [
        (row["step"], row["loss"])
        for row in read_metrics(folder / "dense" / "metrics.jsonl")
        if row["kind"] in ("eval", "final")
    ]


@pytest.mark.parametrize("run", ["gpt2"], indirect=True)
def test_a_resumed_run_ends_at_the_same_bits(place, run):
    kind, trained = run
    folder = place / f"resumed_{kind}"
    shutil.copytree(trained.folder, folder)
    for path in (folder / "dense" / "checkpoints").iterdir():
        if path.name == "4":
            shutil.rmtree(path)
    shutil.rmtree(place / "cache" / "tokenizers")  # The run has its own copy.
    again = sd.train(request.Request(resume=str(folder)).config(sparse=False), resume=True)
    assert losses(again.folder) == losses(trained.folder)
    equal = jax.tree.map(np.array_equal, again.model().params, trained.model().params)
    assert jax.tree.all(equal)


@pytest.mark.slow
def test_new_rows_alone_are_trained_first(place):
    changes = {"training__new_rows_first": 0.5, "training__optimizer": "muon"}
    config = config_of(place, "gpt2", "first", **changes)
    trained = sd.train(config)
    model = trained.model(checkpoint="2")
    start = starting_point.read(str(place / "gpt2"))
    started = starting_point.with_vocabulary(start, model.tokenizer).params
    first, count = trained.config.training.new_rows
    assert count == TOKENS
    changed = jax.tree.map(lambda a, b: np.asarray(a != b), dict(model.params), dict(started))
    for leaf in (changed["embed"].pop("tokens"), changed["head"].pop("output")):
        rows = leaf.any(-1)
        assert rows[first : first + count].all() and rows.sum() == count
    assert not any(map(np.any, jax.tree.leaves(changed)))
    final = trained.model()
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), final.params, model.params)
    assert moved["embed"]["tokens"] and all(jax.tree.leaves(moved["blocks"]))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"run.init_from": ""}, "adds tokens to those of given weights; legal with run.init_from"),
        ({"training.adapter_rank": 2}, "training.adapter_rank=2 with data.extend_vocabulary, "),
        ({"data.loss": "answers"}, "data.loss=answers with data.extend_vocabulary, "),
        (
            {"data.extend_vocabulary": 0, "training.new_rows_first": 0.5},
            "legal with data.extend_vocabulary",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(place, changes, words):
    with pytest.raises(UserError, match=words):
        config_of(place, "gpt2", "refused", **{n.replace(".", "__"): v for n, v in changes.items()})


def test_a_corpus_without_pairs_is_refused(place, tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(chr(ord("A") + number))
    with pytest.raises(UserError, match=r"finds no pair of tokens .* legal: more text, or 0"):
        sd.train(config_of(place, "gpt2", "nothing", data__corpus=str(tmp_path)))


def test_the_plan_has_the_new_rows(place):
    config = config_of(place, "gpt2", "plan")
    [planned] = variants(config)
    assert planned.model.vocab_size == config.model.vocab_size + TOKENS
