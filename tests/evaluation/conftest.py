"""Small models in memory and in run folders, and modules that import lm-eval."""

import importlib
import pathlib
import random
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import arbitrary_params, tables_of

from sparse_dataflow.commands import run_folder
from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig, SparsityConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.training.saved_state import SavedState, identity
from sparse_dataflow.core.training.step import initial_state
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.tokenizer import train_tokenizer
from sparse_dataflow.evaluation.run_files import RunRecord
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.runs.run_config import RunConfig, RunSettings

sys.path.insert(0, str(pathlib.Path(__file__).parent))

CONTEXT = 32


@pytest.fixture(scope="session")
def prose():
    """An in-memory corpus of 30 + 6 documents with a small vocabulary."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(4, 8))) for _ in range(60)]
    words += ["dünn", "λογος", "the", "of", "f(x)", "é 疎"]

    def document(name):
        lines = (" ".join(draw.choices(words, k=9)) for _ in range(draw.randint(8, 30)))
        return Document(name, "\n".join(lines) + "\n")

    train = [document(f"t{i}") for i in range(30)]
    return Corpus("prose", train, [document(f"v{i}") for i in range(6)], "ab" * 32)


@pytest.fixture(scope="session")
def harness():
    """The module; imported on first use because lm-eval takes seconds to import."""
    return importlib.import_module("sparse_dataflow.evaluation.harness")


@pytest.fixture(scope="session")
def lm_eval_tasks():
    """The module; imported on first use because lm-eval takes seconds to import."""
    return importlib.import_module("sparse_dataflow.evaluation.tasks.lm_eval_tasks")


@pytest.fixture(scope="session")
def tokenizer(prose, tmp_path_factory):
    return train_tokenizer(prose, 400, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def models(tokenizer):
    """{variant: config}, all of one size."""
    dense = ModelConfig(2, 32, 4, 64, tokenizer.vocab_size, CONTEXT)
    spec = LinearSpec("block_sparse", "monarch", density=0.5, block=8)
    return {"dense": dense, "sparse": dense.with_linears(spec)}


@pytest.fixture(scope="session")
def trained(models, tokenizer):
    """trained(variant) -> a model with random weights large enough for confident predictions."""

    def make(variant):
        model = models[variant]
        params = jax.tree.map(jnp.asarray, arbitrary_params(model, scale=1))
        tables = tables_of(model)
        training = TrainingConfig(steps=1, batch=4, sequence=CONTEXT)
        folder = pathlib.Path("missing")
        return Model(
            folder, variant, model, merged(params, tables), tokenizer, 1, training, None, {}
        )

    return make


@pytest.fixture(name="run_folder")
def trained_run(models, tokenizer, tmp_path):
    """A run folder with checkpoints of steps 1, 2 (the best) and 3 of both variants."""
    folder, evolution = tmp_path / "run", EvolutionConfig()
    training = TrainingConfig(steps=3, batch=4, sequence=CONTEXT)
    config = RunConfig(
        models["dense"],
        SparsityConfig(density=0.5, block=8),
        training=training,
        run=RunSettings(twin=True),
    )
    record = RunRecord(
        experiment="gpt13b_sparse",
        command=("python -m experiments.gpt13b_sparse",),
        date="2026-01-01",
        versions={},
        machine="a machine",
        corpus="prose",
        corpus_hash="ab" * 32,
        tokenizer=tokenizer.content_hash,
        vocab_size=tokenizer.vocab_size,
        steps={"sparse": 3, "dense": 3},
    )
    run_folder.start(folder, config, record, tokenizer)
    states = {}
    for name, model in models.items():
        config_identity = identity(model, training, evolution, tokenizer.content_hash)
        with Checkpoints(folder / name / "checkpoints", config=config_identity) as checkpoints:
            for step, metric in ((1, 3.0), (2, 1.0), (3, 2.0)):
                state = initial_state(model, training)
                params = jax.tree.map(lambda a, step=step: a + step, state.params)
                state = state._replace(step=np.int32(step), params=params)
                states[name, step] = state
                extra = {"bits_per_byte": metric, "starts": [0], "seconds": 1.0}
                checkpoints.save(step, SavedState.of(state), extra, metric)
    return SimpleNamespace(path=folder, states=states)
