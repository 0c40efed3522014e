"""Runs begin with the weights of mixtures of experts."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from make_fixture import BYTES, FOLDERS
from marks import some
from models import logits, random_model

import sparse_dataflow as sd
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.data import cache
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import huggingface
from sparse_dataflow.interchange.starting_point import StartingPoint, initial_state_from
from sparse_dataflow.monitoring.metrics import read_metrics

MIXTURE = ModelConfig(
    num_layers=2,
    d_model=32,
    num_heads=4,
    d_ff=64,
    vocab_size=BYTES.vocab_size,
    max_len=16,
    experts=4,
    top_k=2,
)
STORED = LinearSpec("block_sparse", "monarch", density=0.5, block=8)
ATTENTION = ("qkv", "attn_out")
TRAINING = TrainingConfig(steps=2, batch=2, sequence=8, learning_rate=1e-3)
IDS = np.random.default_rng(0).integers(0, BYTES.vocab_size, (2, 16), np.int32)


def start_of(config, seed=0):
    return StartingPoint(config, merged(*random_model(config, seed)), BYTES, {})


@pytest.mark.parametrize("experts", [LinearSpec(), STORED], ids=["dense", "stored blocks"])
def test_experts_of_equal_storage_keep_every_bit(experts):
    config = MIXTURE.with_linears(experts, ("mlp_in", "mlp_out"))
    start = start_of(config)
    trained_otherwise = dataclasses.replace(config, expert_capacity=1.0, balance_loss=0.1)
    state = initial_state_from(start, trained_otherwise, TRAINING)
    same = jax.tree.map(np.array_equal, state.merged, start.params)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("prune_by", some(["weights", "rebuild"], "rebuild"))
def test_attention_of_a_mixture_is_pruned(prune_by):
    start, model = start_of(MIXTURE), MIXTURE.with_linears(STORED, ATTENTION)
    state = initial_state_from(start, model, TRAINING, calibration=[IDS], prune_by=prune_by)
    same = jax.tree.map(
        np.array_equal, state.params["blocks"]["experts"], start.params["blocks"]["experts"]
    )
    assert all(jax.tree.leaves(same))
    assert state.params["blocks"]["qkv"]["values"].shape == (2, 24, 8, 8)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (LinearSpec(), STORED, "mlp_in of the experts is dense .* and block-sparse at density 0.5"),
        (STORED, dataclasses.replace(STORED, density=0.25), "density 0.5 .* at density 0.25"),
        (STORED, dataclasses.replace(STORED, block=4), r"\(block 8, monarch\) .* \(block 4, mon"),
        (STORED, dataclasses.replace(STORED, hadamard=4), r"\(block 8, monarch, hadamard 4\)"),
    ],
)
def test_other_storage_of_experts_is_refused(before, after, message):
    start = start_of(MIXTURE.with_linears(before))
    with pytest.raises(UserError, match=message):
        initial_state_from(start, MIXTURE.with_linears(after), TRAINING)


@pytest.mark.parametrize("change", [{"experts": 8}, {"top_k": 1}, {"shared_expert": 1}])
def test_another_mixture_is_refused(change):
    ((name, value),) = change.items()
    message = f"{name} is {getattr(MIXTURE, name)} in the initial weights and {value} in this run"
    with pytest.raises(UserError, match=message):
        initial_state_from(start_of(MIXTURE), dataclasses.replace(MIXTURE, **change), TRAINING)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "FOLDER", tmp_path / "cache")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"{n} and {n + 1} are {2 * n + 1}. " * 20 for n in range(40)))
    return text


def changes_of(corpus, init_from, out):
    return {
        "data.corpus": str(corpus),
        "training.steps": 4,
        "training.batch": 4,
        "training.sequence": 32,
        "training.learning_rate": 1e-2,
        "run.init_from": str(init_from),
        "run.trackers": "none",
        "run.twin": "no",
        "run.out": str(out),
    }


@pytest.mark.slow
def test_a_directory_begins_a_run_that_is_exported_again(tmp_path, corpus):
    changes = changes_of(corpus, FOLDERS["mixtral"], tmp_path / "run") | {
        "sparsity.projections": ("q", "attn_out"),
        "sparsity.block": 4,
        "sparsity.density": 0.5,
        "model.balance_loss": 0.05,
    }
    run = sd.train(Request(changes=changes).config())
    rows = read_metrics(run.folder / "sparse" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses[-1] < losses[0]
    trained = sd.load(run.folder)
    assert trained.model.experts == 5
    folder = sd.save(trained, tmp_path / "exported", form="dense")
    assert json.loads((folder / "config.json").read_text())["model_type"] == "mixtral"
    again = huggingface.read(folder)
    np.testing.assert_allclose(
        logits(again.model, again.params, {}, IDS), sd.logits(trained, IDS), atol=1e-4
    )
