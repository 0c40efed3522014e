"""Runs of adapters on a Hugging Face directory: what they save, resume, load, export and refuse."""

import json
import shutil

import jax
import numpy as np
import pytest
from marks import some
from places import TESTS
from safetensors.numpy import load_file, save_file

import sparse_dataflow as sd
from experiments import evaluate as evaluate_experiment
from sparse_dataflow.commands import request
from sparse_dataflow.commands.models.evaluate import evaluate
from sparse_dataflow.commands.models.generate import encoded_prompts
from sparse_dataflow.commands.run_folder import refuse_other_config
from sparse_dataflow.data import cache
from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.examples import encode
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import starting_point
from sparse_dataflow.monitoring.metrics import read_metrics
from sparse_dataflow.runs.run_config import RunConfig

LLAMA = TESTS / "interchange" / "llama"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
IDS = np.arange(24).reshape(2, 12)
SIDE = {"training__adapter_rank": 0, "training__side_width": 4}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a base that has a chat template, and examples."""
    folder = tmp_path_factory.mktemp("finetuning")
    shutil.copytree(LLAMA, folder / "base", ignore=shutil.ignore_patterns("expected*", "made*"))
    settings = json.loads((folder / "base" / "tokenizer_config.json").read_text())
    text = json.dumps(settings | {"chat_template": TEMPLATE})
    (folder / "base" / "tokenizer_config.json").write_text(text)
    lines = [json.dumps({"prompt": f"{n}+1=", "answer": f"{n + 1}"}) for n in range(40)]
    (folder / "qa.jsonl").write_text("\n".join(lines))
    starting_point.read.cache_clear()
    return folder


@pytest.fixture(scope="module", autouse=True)
def cache_folder(place):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "FOLDER", place / "cache")
        yield


def config_of(place, out, **changes):
    changes = {
        "data.corpus": str(place / "qa.jsonl"),
        "data.loss": "answers",
        "training.adapter_rank": 2,
        "training.steps": 4,
        "training.batch": 4,
        "training.sequence": 32,
        "training.learning_rate": 1e-2,
        "run.init_from": str(place / "base"),
        "run.checkpoint_every": 2,
        "run.trackers": "none",
        "run.out": str(place / out),
    } | {name.replace("__", "."): value for name, value in changes.items()}
    return request.Request(changes=changes).config(sparse=False)


@pytest.fixture(scope="module")
def run(place):
    return sd.train(config_of(place, "run"))


def checkpoint(folder, step):
    return folder / "dense" / "checkpoints" / str(step)


@pytest.mark.slow
def test_a_run_names_its_base_and_its_checkpoints_hold_the_adapters_alone(run, place):
    assert run.finished
    record = json.loads((run.folder / "run.json").read_text())["init_from"]
    assert record["path"] == str(place / "base") and len(record["weights"]) == 64
    about = json.loads((checkpoint(run.folder, 4) / "extra.json").read_text())
    assert about["extra"]["base"] == {name: record[name] for name in ("path", "weights")}
    leaves = {name.rpartition(".")[2] for name in about["state"] if "blocks" in name}
    assert leaves == {"a_kernel", "b_kernel"}
    assert not any("embed" in name or "head" in name for name in about["state"])
    losses = [row["loss"] for row in read_metrics(run.folder / "dense" / "metrics.jsonl")
              if row["kind"] == "train"]  # fmt: skip
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_loaded_run_is_its_base_with_adapters_and_an_export_has_them_merged(run, place):
    model, base = sd.load(run.folder), sd.load(place / "base")
    assert np.array_equal(
        model.params["blocks"]["q"]["kernel"], base.params["blocks"]["q"]["kernel"]
    )
    expected = np.asarray(sd.logits(model, IDS))
    assert np.abs(expected - sd.logits(base, IDS)).max() > 1e-3
    for form in ("dense", "sparse"):
        again = sd.load(sd.save(model, place / form, form))
        np.testing.assert_allclose(sd.logits(again, IDS), expected, atol=1e-5)
        assert again.tokenizer == model.tokenizer and again.tokenizer.chat_template
    assert (sd.save(model, place / "adapter", "adapter") / "adapter_config.json").exists()
    (text,) = sd.generate(model, ["1+1="], max_new_tokens=2)
    assert text.text is not None


@pytest.mark.slow
def test_adapters_on_an_int8_base_load_resume_and_export_as_they_were_trained(place):
    trained = sd.train(config_of(place, "int8", training__frozen_dtype="int8"))
    model, base = sd.load(trained.folder), sd.load(place / "base")
    for name, module in model.params["blocks"].items():
        if "a_kernel" in module:
            kernel = np.asarray(base.params["blocks"][name]["kernel"])
            scale = np.abs(kernel).max(-2, keepdims=True) / 127.5
            apart = np.abs(module["kernel"] - kernel)
            assert 0 < apart.max() and (apart <= 0.51 * scale).all()
    expected = np.asarray(sd.logits(model, IDS))
    again = sd.load(sd.save(model, place / "int8_dense", "dense"))
    np.testing.assert_allclose(sd.logits(again, IDS), expected, atol=1e-5)
    with pytest.raises(UserError, match=r"int8 rounded, .* legal: form=dense"):
        sd.save(model, place / "int8_adapter", "adapter")
    assert not (place / "int8_adapter").exists()
    resumed = place / "int8_resumed"
    shutil.copytree(trained.folder, resumed)
    shutil.rmtree(checkpoint(resumed, 4))
    assert sd.train(request.Request(resume=str(resumed)).config(sparse=False), resume=True).finished
    same = jax.tree.map(np.array_equal, sd.load(resumed).params, model.params)
    assert all(jax.tree.leaves(same))
    losses = [
        [row["loss"] for row in read_metrics(f / "dense" / "metrics.jsonl") if row["kind"] == kind]
        for f, kind in ((trained.folder, "train"), (resumed, "final"), (trained.folder, "final"))
    ]
    assert losses[0][-1] < losses[0][0] and losses[1][-1] == losses[2][-1]


def test_a_run_of_prompt_vectors_saves_resumes_loads_and_says_what_has_no_place_for_them(place):
    changes = {"training__adapter_rank": 0, "training__prompt_vectors": 4}
    config = config_of(place, "prompted", **changes)
    trained = sd.train(config)
    about = json.loads((checkpoint(trained.folder, 4) / "extra.json").read_text())
    names = {name for name in about["state"] if name.startswith("params")}
    assert len(names) == 1 and "prompt" in names.pop()
    model, base = sd.load(trained.folder), sd.load(place / "base")
    vectors = model.params["embed"].pop("prompt")
    assert jax.tree.all(jax.tree.map(np.array_equal, model.params, base.params))
    model.params["embed"]["prompt"] = vectors
    # They begin as embeddings of tokens and move.
    distances = np.abs(vectors[:, None] - base.params["embed"]["tokens"]).max(-1).min(-1)
    assert vectors.shape == (4, base.model.d_model) and (distances > 0).all()
    assert np.abs(sd.logits(model, IDS) - sd.logits(base, IDS)).max() > 1e-3
    (text,) = sd.generate(model, ["1+1="], max_new_tokens=2)
    assert len(text.tokens) == 2
    resumed = place / "prompted_resumed"
    shutil.copytree(trained.folder, resumed)
    shutil.rmtree(checkpoint(resumed, 4))
    assert sd.train(request.Request(resume=str(resumed)).config(sparse=False), resume=True).finished
    assert np.array_equal(sd.load(resumed).params["embed"]["prompt"], vectors)
    for form in ("dense", "sparse", "program", "gguf", "adapter"):
        with pytest.raises(UserError, match=r"form has no place .*=4; legal with them: the run"):
            sd.save(model, place / "none", form)
    with pytest.raises(UserError, match=r"init_from=.* has no place"):
        sd.train(config_of(place, "none", run__init_from=str(trained.folder)))
    with pytest.raises(UserError, match="A pruned model has no place"):
        sd.prune(model, batches=[IDS])
    assert not (place / "none").exists()


def test_a_run_of_a_side_network_saves_resumes_generates_and_is_refused_elsewhere(place):
    config = config_of(place, "side", training__frozen_dtype="int8", **SIDE)
    trained = sd.train(config)
    about = json.loads((checkpoint(trained.folder, 4) / "extra.json").read_text())
    names = {name.removeprefix("params.") for name in about["state"] if name.startswith("params")}
    assert len(names) == 7 and all(".side." in name or "'side'" in name for name in names), names
    model, base = sd.load(trained.folder), sd.load(place / "base")
    expected = np.asarray(sd.logits(model, IDS))
    assert np.abs(expected - sd.logits(base, IDS)).max() > 1e-3
    (text,) = sd.generate(model, ["1+1="], max_new_tokens=3)
    tokens = model.tokenizer.encode("1+1=")
    scores = np.asarray(sd.logits(model, np.asarray([[*tokens, *text.tokens]])))[0]
    for new, row in zip(text.tokens, scores[len(tokens) - 1 :]):  # The same tokens as by scoring.
        assert row[new] >= row.max() - 1e-4
    resumed = place / "side_resumed"
    shutil.copytree(trained.folder, resumed)
    shutil.rmtree(checkpoint(resumed, 4))
    assert sd.train(request.Request(resume=str(resumed)).config(sparse=False), resume=True).finished
    assert np.array_equal(sd.logits(sd.load(resumed), IDS), expected)
    for form in ("dense", "sparse", "program", "gguf", "adapter"):
        with pytest.raises(UserError, match=r"form has no place for the side network .*=4; legal"):
            sd.save(model, place / "none", form)
    with pytest.raises(UserError, match=r"init_from=.* has no place for the side network"):
        sd.train(config_of(place, "none", run__init_from=str(trained.folder)))
    with pytest.raises(UserError, match="A pruned model has no place for the side network"):
        sd.prune(model, batches=[IDS])
    assert not (place / "none").exists()


def test_stored_features_serve_later_epochs_seeds_and_runs(place):
    """38 rows in batches of 4: 12 steps read them all, some twice."""
    changes = {"training__stored_features": "int8", "training__steps": 12, **SIDE}
    first = sd.train(config_of(place, "featured", **changes))
    rows = sorted((place / "cache" / "features").glob("*.npy"))
    assert len(rows) == 38
    times = [path.stat().st_mtime_ns for path in rows]
    again = sd.train(config_of(place, "featured_again", training__seed=1, **changes))
    assert times == [path.stat().st_mtime_ns for path in rows] and first.finished
    resumed = place / "featured_resumed"
    shutil.copytree(again.folder, resumed)
    shutil.rmtree(checkpoint(resumed, 12))
    assert sd.train(request.Request(resume=str(resumed)).config(sparse=False), resume=True).finished
    expected = sd.logits(sd.load(again.folder), IDS)
    assert np.array_equal(sd.logits(sd.load(resumed), IDS), expected)
    plain = sd.train(
        config_of(place, "unfeatured", **changes | {"training__stored_features": "no"})
    )
    losses = [
        [row["loss"] for row in read_metrics(r.folder / "dense" / "metrics.jsonl")
         if row["kind"] == "train"]
        for r in (first, plain)
    ]  # fmt: skip
    np.testing.assert_allclose(*losses, rtol=1e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {
                "training__stored_features": "int8",
                "training__side_width": 0,
                "training__adapter_rank": 2,
            },
            "side network reads; legal without .*: no",
        ),
        (
            {"training__stored_features": "int8", "parallel__executor": "relay"},
            "the relay on 1 .*stored_features=int8, which are .*legal: one device",
        ),
        (
            {
                "training__stored_features": "int8",
                "training__objective": "masked",
                "data__loss": "all",
            },
            "which hides other tokens in each epoch; legal with it: no",
        ),
        ({"run__init_from": ""}, "training.side_width adapts given weights; legal with run.init_f"),
        ({"evolution__method": "set"}, "set with training.side_width, which freezes .*: static"),
        ({"training__adapter_rank": 2}, "adapter_rank=2 is trained by; legal with it: 0"),
        ({"training__teacher": "DIR", "data__loss": "all"}, "side_width=4 with training.teacher, "),
        ({"data__extend_vocabulary": 8, "data__loss": "all"}, "side_width=4 with data.extend_voc"),
        ({"training__optimizer": "muon"}, "legal with it: adamw"),
        ({"model__experts": 4}, "side_width=4 with model.experts=4"),
    ],
)
def test_a_side_network_is_refused_before_any_work(place, changes, words):
    with pytest.raises(UserError, match=words):
        sd.train(config_of(place, "none", **SIDE | changes))
    assert not (place / "none").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__mask_documents": True}, "not of each of its documents; legal with it: no"),
        (
            {"run__init_from": ""},
            "training.prompt_vectors adapts given weights; legal with run.init_from",
        ),
        ({"training__optimizer": "muon"}, "legal with it: adamw"),
        (
            {"model__positions": "learned", "model__max_len": 32},
            "training.sequence=32 after training.prompt_vectors=4 is longer .*legal: 1 to 28",
        ),
    ],
)
def test_prompt_vectors_are_refused_before_any_work(place, changes, words):
    vectors = {"training__adapter_rank": 0, "training__prompt_vectors": 4}
    with pytest.raises(UserError, match=words):
        config_of(place, "none", **vectors | changes)


@pytest.mark.parametrize("added", some(["adapters", "side"], "side"))
def test_an_evaluation_counts_the_answers_that_training_counts(run, place, added):
    pytest.importorskip("lm_eval")
    if added == "side":
        run = sd.train(config_of(place, "side_evaluated", training__steps=2, **SIDE))
    task = place / "task.jsonl"
    items = [{"context": f"{n}", "choices": ["a", "b"], "answer": n % 2} for n in range(4)]
    task.write_text("".join(json.dumps(item) + "\n" for item in items))
    evaluate(evaluate_experiment.Options(run=str(run.folder), tasks=str(task), num_fewshot=(0,)))
    result = json.loads((run.folder / "evaluation.json").read_text())
    [row] = [row for row in result["rows"] if row["task"] == "held-out text"]
    rows = read_metrics(run.folder / "dense" / "metrics.jsonl")
    [final] = [row for row in rows if row["kind"] == "final"]
    np.testing.assert_allclose(row["models"]["dense"]["value"], final["loss"], rtol=1e-4)
    bits = row["models"]["dense"]["bits_per_byte"]
    np.testing.assert_allclose(bits, final["bits_per_byte"], rtol=1e-4)


def test_lm_eval_scores_adapters_as_their_merged_export(run, tmp_path):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from sparse_dataflow.commands.lm_eval_model import SparseDataflowLM

    export = sd.save(sd.load(run.folder), tmp_path / "export", form="dense")
    pairs = [("1+1=", "2"), ("a", "b c")]
    requests = [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)]
    scores, export_scores = (
        SparseDataflowLM(run=str(folder)).loglikelihood(requests) for folder in (run.folder, export)
    )
    np.testing.assert_allclose(scores, export_scores, rtol=1e-5)


def test_a_prompt_of_a_chat_has_the_tokens_that_training_has(run, place):
    model = sd.load(run.folder)
    [tokens] = encoded_prompts(model, ["1+1="], chat=True)
    assert model.tokenizer.decode(tokens) == "<user>1+1=<assistant>"
    example = Document("1", json.dumps({"prompt": "1+1=", "answer": "2"}))
    trained_on = encode([example], model.tokenizer)
    assert trained_on.tokens[~trained_on.answers].tolist() == tokens
    other = sd.load(LLAMA)
    with pytest.raises(UserError, match="has no chat template"):
        encoded_prompts(other, ["1+1="], chat=True)


def test_a_resumed_run_has_the_same_bits(run, place):
    again = place / "resumed"
    shutil.copytree(run.folder, again)
    shutil.rmtree(checkpoint(again, 4))
    resumed = request.Request(resume=str(again)).config(sparse=False)
    refuse_other_config(again, RunConfig.from_json(json.loads((again / "config.json").read_text())),
                        resumed)  # fmt: skip
    assert sd.train(resumed, resume=True).finished
    first, second = sd.load(run.folder), sd.load(again)
    assert first.step == second.step == 4
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, first.params, second.params)))


def test_a_base_that_has_changed_or_gone_is_named(run, place):
    other = place / "moved"
    (place / "base").rename(other)
    try:
        starting_point.read.cache_clear()
        with pytest.raises(
            UserError, match=r"began to train adapters of weights that cannot be read: .*"
        ):
            sd.load(run.folder)
        shutil.copytree(other, place / "base")
        path = place / "base" / "model.safetensors"
        tensors = load_file(path)
        next(iter(tensors.values()))[0] += 1
        save_file(tensors, path)
        starting_point.read.cache_clear()
        changed = "The weights in .*base have changed since .*run began to train adapters of them"
        with pytest.raises(UserError, match=changed):
            sd.load(run.folder)
        resumed = request.Request(resume=str(run.folder)).config(sparse=False)
        with pytest.raises(UserError, match=changed):
            sd.train(resumed, resume=True)
    finally:
        shutil.rmtree(place / "base", ignore_errors=True)
        other.rename(place / "base")
        starting_point.read.cache_clear()


@pytest.mark.slow
def test_an_adapter_run_on_a_run_checks_its_checkpoint(place):
    """The base is a run of the same shape, whose newest checkpoint is another one later."""
    whole = sd.train(
        config_of(place, "whole", training__adapter_rank=0, training__steps=2)
    )  # fmt: skip
    config = config_of(place, "on_run", run__init_from=str(whole.folder), training__steps=2)
    run = sd.train(config)
    before = sd.logits(sd.load(run.folder), IDS)
    shutil.copytree(checkpoint(whole.folder, 0), checkpoint(whole.folder, 9))  # Newer, and damaged.
    assert np.array_equal(sd.logits(sd.load(run.folder), IDS), before)
    shutil.rmtree(checkpoint(whole.folder, 2))
    with pytest.raises(UserError, match=r"cannot be read: .* no checkpoint of step 2"):
        sd.load(run.folder)


@pytest.mark.parametrize("executor", ["whole", "relay"])
def test_a_side_network_on_block_sparse_weights_keeps_every_bit_of_them(
    place, sparse_base, executor
):
    folder, changes = sparse_base
    changes = changes | {
        "training.adapter_rank": 0, "training.side_width": 4, "parallel.executor": executor,
        "run.out": str(place / f"sparse_side_{executor}"),
    }  # fmt: skip
    run = sd.train(request.Request(changes=changes).config())
    model, base = sd.load(run.folder), sd.load(folder)
    before, after = (m.params["blocks"]["mlp_in"]["values"] for m in (base, model))
    assert np.array_equal(before, after) and model.model.linear("mlp_in").kind == "block_sparse"
    assert not np.array_equal(sd.logits(model, IDS), sd.logits(base, IDS))


@pytest.fixture(scope="module")
def sparse_base(place):
    """Returns the folder of block-sparse weights, and the settings of a run on them."""
    shape = {"num_layers": 1, "d_model": 32, "num_heads": 2, "d_ff": 64}
    config = sd.preset("pico").change(
        sparsity__block=8, sparsity__density=0.5, **{f"model__{n}": v for n, v in shape.items()}
    )
    base = sd.init(config, jax.random.key(0))
    folder = str(sd.save(base, place / "sparse_base"))
    return folder, {
        "data.corpus": str(place / "qa.jsonl"), "data.loss": "answers", "training.steps": 2,
        "training.batch": 4, "training.sequence": 32, "training.adapter_rank": 2,
        "run.init_from": folder, "run.out": str(place / "sparse_run"), "run.trackers": "none",
    }  # fmt: skip


@pytest.mark.slow
def test_a_block_sparse_base_keeps_its_blocks_and_its_export_has_low_rank_terms(place, sparse_base):
    folder, changes = sparse_base
    base = sd.load(folder)
    run = sd.train(request.Request(changes=changes).config())
    model = sd.load(run.folder)
    before, after = (m.params["blocks"]["mlp_in"]["values"] for m in (base, model))
    assert np.array_equal(before, after) and model.model.linear("mlp_in").kind == "block_sparse"
    expected = np.asarray(sd.logits(model, IDS))
    assert not np.array_equal(expected, sd.logits(base, IDS))
    sparse = sd.load(sd.save(model, place / "sparse_export", "sparse"))
    assert sparse.model == model.model
    assert np.array_equal(sd.logits(sparse, IDS), expected)
    dense = sd.load(sd.save(model, place / "dense_export", "dense"))
    np.testing.assert_allclose(sd.logits(dense, IDS), expected, atol=1e-5)
    with pytest.raises(UserError, match="that transformers does not load"):
        sd.save(model, place / "no_adapter", "adapter")


@pytest.mark.slow
def test_the_relay_trains_adapters_as_one_device_and_resumes_from_its_files(place, run):
    """Also where its masters are in files, which have no frozen weights."""
    changes = {"parallel__executor": "relay", "parallel__server_dir": str(place / "files")}
    relayed = sd.train(config_of(place, "relayed", **changes))
    mine, right = (np.asarray(sd.logits(sd.load(each.folder), IDS)) for each in (relayed, run))
    np.testing.assert_allclose(mine, right, atol=1e-4)
    shutil.rmtree(checkpoint(relayed.folder, 4))
    resumed = request.Request(resume=str(relayed.folder)).config(sparse=False)
    again = sd.train(resumed, resume=True)
    assert again.finished
    assert np.array_equal(sd.logits(sd.load(again.folder), IDS), mine)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run__init_from": ""}, "legal with run.init_from"),
        ({"run__init_from": "", "training__adapter_rank": 0}, "legal with run.init_from"),
        ({"training__optimizer": "muon"}, "legal with it: adamw"),
        ({"training__adapter_rank": 25}, r"above 16, .* legal: 1 to 16"),
    ],
)
def test_settings_that_contradict_adapters_are_named(place, changes, words):
    with pytest.raises(UserError, match=words):
        sd.train(config_of(place, "refused", **changes))
    assert not (place / "refused").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"evolution__method": "set"},
            "set with training.adapter_rank, .*legal with it: st",
        ),
        (
            {"evolution__method": "rigl", "data__loss": "answers"},
            "evolution.method=rigl with data.loss=answers, ",
        ),
        ({"run__twin": "yes"}, "run.twin=yes with training.adapter_rank, .*legal with it: no"),
        ({"run__twin": "no", "sparsity__block": 8, "sparsity__density": 1.0}, "as they are, and "),
    ],
)
def test_a_sparse_run_of_adapters_needs_a_sparse_static_base(place, changes, words):
    config = starting_point.run_config(place / "base").change(run__twin="no")
    changes = {"run__out": str(place / "refused"), "training__adapter_rank": 2} | changes
    texts = ["a document. " * 40] * 4
    with pytest.raises(UserError, match=words):
        sd.train(config.change(training__steps=2, **changes), texts=texts)


def test_texts_are_no_examples(place):
    with pytest.raises(UserError, match="give it, not texts"):
        sd.train(config_of(place, "refused"), texts=["a", "b"])
