"""The config that a checkpoint compares; one that is older than a setting has its default."""

import dataclasses

import numpy as np
import pytest

from sparse_dataflow.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.config.evolution import EvolutionConfig
from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.training.saved_state import IDENTITY_DEFAULTS, identity

PARTS = {
    "model": ModelConfig(num_layers=2, d_model=32, num_heads=4, d_ff=64, vocab_size=40, max_len=16),
    "training": TrainingConfig(),
    "evolution": EvolutionConfig(),
}
STATE = {"weight": np.arange(3.0, dtype=np.float32)}


def checkpoints(folder, config):
    return Checkpoints(folder, config=config, defaults=IDENTITY_DEFAULTS)


@pytest.mark.parametrize(
    ("part", "name", "other"),
    [
        ("model", "window", 3),
        ("model", "biases", ("qkv",)),
        ("model", "guided", True),
        ("training", "adapter_alpha", 8.0),
        ("training", "teacher_weight", 0.25),
        ("evolution", "plateau", 2),
    ],
)
def test_a_checkpoint_older_than_a_setting_fits_its_default_alone(part, name, other, tmp_path):
    older = identity(**PARTS, tokenizer_hash="")
    del older[part][name]
    with checkpoints(tmp_path, older) as folder:
        folder.save(1, STATE, {})
    with checkpoints(tmp_path, identity(**PARTS, tokenizer_hash="")) as folder:
        assert folder.restore(STATE) is not None
    changed = {part: dataclasses.replace(PARTS[part], **{name: other})}
    with checkpoints(tmp_path, identity(**PARTS | changed, tokenizer_hash="")) as folder:
        with pytest.raises(UserError, match=f"was made under another config: {part}.{name} is"):
            folder.restore(STATE)


def test_the_remat_of_a_checkpoint_may_be_another():
    fields = identity(**PARTS, tokenizer_hash="")
    other = {"model": dataclasses.replace(PARTS["model"], remat="full")}
    assert identity(**PARTS | other, tokenizer_hash="") == fields
