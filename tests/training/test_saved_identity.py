"""The config that a checkpoint compares is that of versions before a family field existed."""

import dataclasses

from sparse_dataflow.config.evolution import EvolutionConfig
from sparse_dataflow.config.model import FAMILY_FIELDS, ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.training.saved_state import identity

MODEL = ModelConfig(num_layers=2, d_model=32, num_heads=4, d_ff=64, vocab_size=40, max_len=16)
OTHER = {"num_kv_heads": 2, "biases": ("qkv",), "window": 3, "norm_epsilon": 1e-6}


def test_training_without_adapters_has_the_fields_of_before_them():
    saved = lambda training: identity(MODEL, training, EvolutionConfig(), "")["training"]  # noqa: E731
    adapters = {"adapter_rank", "adapter_alpha"}
    assert not adapters & set(saved(TrainingConfig()))
    assert set(saved(TrainingConfig(adapter_rank=2))) - set(saved(TrainingConfig())) == adapters


def fields(model):
    return identity(model, TrainingConfig(), EvolutionConfig(), "")["model"]


def test_a_field_at_its_default_is_left_out_and_another_value_is_compared():
    assert not set(FAMILY_FIELDS) & set(fields(MODEL))
    for name, value in OTHER.items():
        changed = fields(dataclasses.replace(MODEL, **{name: value}))
        assert set(changed) - set(fields(MODEL)) == {name}
