"""A model card describes the training and only the measurements of its weights."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import numpy_reader
import pytest
import yaml
from make_fixture import BYTES
from marks import some
from models import READABLE, SPARSE, export, random_model

from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.data.tokenizer import id_tokenizer
from sparse_dataflow.evaluation.run_files import RunRecord
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.interchange import huggingface
from sparse_dataflow.interchange.model_card import model_card

CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
RECORD = RunRecord(
    experiment="gpt13b_sparse",
    command=("python -m experiments.gpt13b_sparse", "--steps=7"),
    date="2026-01-01",
    versions={"jax": "1.2.3"},
    machine="a machine",
    corpus="letters",
    corpus_hash="ab" * 32,
    tokenizer=BYTES.content_hash,
    vocab_size=BYTES.vocab_size,
    steps={"sparse": 7},
    id="77",
)


@pytest.fixture
def trained(tmp_path):
    params, tables = random_model(SPARSE)
    training = TrainingConfig(steps=7, batch=4, sequence=16)
    return Model(tmp_path, "sparse", SPARSE, merged(params, tables), BYTES, 7, training, RECORD, {})


def write_evaluation(folder, run_id=RECORD.identity, step=7):
    row = {
        "metric": "acc",
        "items": 1200,
        "documents": 600,
        "chance": 0.25,
        "models": {"sparse": {"value": 0.375, "error": 0.0125}},
    }
    result = {
        "command": "python -m experiments.evaluate --run=RUN",
        "models": {"sparse": {"run": str(folder), "id": run_id, "step": step}},
        "rows": [
            row | {"task": "held-out text", "shots": None, "baselines": {}},
            row | {"task": "cloze", "shots": 5, "baselines": {"unigram": 0.26, "bigram": 0.3}},
        ],
    }
    (Path(folder) / "evaluation.json").write_text(json.dumps(result))


def card(trained, form="dense"):
    return model_card(trained, form, {"safetensors": "9.8"})


@pytest.mark.parametrize("form", huggingface.FORMS)
def test_it_has_data_sizes_density_losses_tasks_command_and_versions(trained, form):
    write_evaluation(trained.folder)
    (trained.folder / "sparse").mkdir()
    final = {"kind": "final", "step": 7, "loss": 1.2345, "bits_per_byte": 2.5}
    (trained.folder / "sparse" / "metrics.jsonl").write_text(json.dumps(final) + "\n")
    text = card(trained, form)
    for fact in (
        *("448 tokens of the corpus `letters`", "2, 32, 4", "density 0.5, blocks of 8", "7 of 7"),
        *(
            "1.2345",
            "2.5000",
            "--steps=7",
            "jax 1.2.3",
            "safetensors 9.8",
            "sparse-dataflow evaluate",
        ),
        "| cloze | 5 | acc | 1,200 | 0.375 | 0.348 to 0.4027 | 0.25 | 0.26 | 0.3 |",
    ):
        assert fact in text, fact
    assert "None" not in CODE.sub("", text) and text.endswith(".\n")


def test_the_program_of_bare_ids_takes_ids(trained):
    ids = dataclasses.replace(trained, tokenizer=id_tokenizer(300))
    cards = [model_card(model, "program", {}) for model in (trained, ids)]
    assert ['run_in_jax.py --ids "1 2" 20' in card for card in cards] == [False, True]
    assert ['run_in_jax.py "A prompt" 20' in card for card in cards] == [True, False]


def test_without_an_evaluation_it_says_so(trained):
    assert "None was evaluated" in card(trained) and "None was measured" in card(trained)


def test_measurements_of_another_model_are_not_shown(trained):
    write_evaluation(trained.folder, run_id="other")  # In the same place.
    assert "None was evaluated" in card(trained)
    write_evaluation(trained.folder, step=3)
    assert "after step 3 only" in card(trained) and "0.375" not in card(trained)


PRIVATE = [
    ("sparse-dataflow train", "--corpus=/home/ann/notes", "--steps=7"),
    ("python /home/ann/work/mine.py", "--set", "data.validation=/home/ann/held out.txt"),
    ("sparse-dataflow train", "--corpus=~/a:0.5,/home/ann/b:0.5", "--out=../ann/run"),
    ("sd.train(sd.preset('pico').change(data__corpus='/home/ann/notes'))",),
    ("python -m experiments.gpt13b_sparse", "--set=run.init_from=/home/ann=2/model/"),
]


@pytest.mark.parametrize("command", PRIVATE)
@pytest.mark.parametrize("form", huggingface.FORMS)
def test_a_card_has_no_path_of_the_machine(trained, command, form):
    start = {"path": "/home/ann/models/base", "weights": "c" * 64}
    corpus = "/home/ann/notes"
    record = dataclasses.replace(RECORD, command=command, init_from=start, corpus=corpus)
    write_evaluation(trained.folder)
    evaluation = trained.folder / "evaluation.json"
    fields = json.loads(evaluation.read_text())
    fields["command"] = f"sparse-dataflow evaluate --run={trained.folder}"
    evaluation.write_text(json.dumps(fields))
    text = card(dataclasses.replace(trained, record=record), form)
    assert "ann" not in re.sub("channel|scanned|planned", "", CODE.sub("", text))
    assert "/" not in re.sub("https?://\\S+|`arXiv.*`", "", text.split("## How it was made")[1])
    assert f"--run={trained.folder.name}" in text and "corpus `notes`" in text
    assert "weights of base" in text


@pytest.mark.parametrize(
    "form, corpus, base, lines",
    [
        ("dense", "hf:allenai/c4/en@abc", None, ["library_name: transformers", "- allenai/c4"]),
        ("sparse", "letters", "hf:Qwen/Qwen3-0.6B@1234", ["base_model: Qwen/Qwen3-0.6B"]),
        ("dense", "hf:a/b", "hf:gpt2@12", ["base_model: gpt2", "base_model_relation: finetune"]),
        ("adapter", "/home/x", "hf:o/n", ["library_name: peft", "base_model_relation: adapter"]),
        ("sparse", "s3://bucket/text", "/home/x", ["library_name: sparse_dataflow"]),
    ],
)
def test_a_card_begins_with_the_block_by_which_the_hub_lists_it(trained, form, corpus, base, lines):
    start = {"path": base, "weights": "c" * 64} if base else None
    record = dataclasses.replace(RECORD, corpus=corpus, init_from=start)
    text = card(dataclasses.replace(trained, record=record), form)
    _, block, _ = text.split("---\n", 2)
    fields = yaml.safe_load(block)
    assert fields["pipeline_tag"] == "text-generation" and "block-sparse" in fields["tags"]
    assert set(lines) <= set(block.splitlines())
    assert ("base_model" in fields) == bool(base and base.startswith("hf:"))
    assert ("datasets" in fields) == corpus.startswith("hf:")


@pytest.mark.parametrize(
    "config",
    some(
        READABLE, "hadamard", "dynamic", "longrope", "gemma3", "gpt_neo", "granite", "smollm3",
        "norms of all heads", "all",
    ),
)  # fmt: skip
def test_numpy_reads_the_logits_of_the_sparse_form(tmp_path, config):
    params, tables = export(tmp_path / "model", "sparse", config)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, config.max_len, np.int32)
    ours = np.asarray(whole.logits(config, weights_of(config, params, tables), ids[None]))[0]
    theirs = numpy_reader.logits(*numpy_reader.load(tmp_path / "model"), ids)
    assert theirs.dtype == np.float32
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-4)
    assert np.abs(ours).max() > 0.5
