"""What a training's steps are planned to cost."""

import numpy as np
import pytest

from sparse_dataflow.commands.preflight.settling import step_seconds
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.training.phases import Variant
from sparse_dataflow.core.training.programs import TrainingData
from sparse_dataflow.data.batches import EvalBatches, TrainBatches

SPARSE = LinearSpec("block_sparse", "random", density=0.25, block=4)
MODEL = ModelConfig(1, 16, 2, 32, vocab_size=40, max_len=8).with_linears(SPARSE)
TRAINING = TrainingConfig(steps=10, batch=4, sequence=8)
TOKENS = (np.arange(400) * 7 % 40).astype(np.uint16)
HELD_OUT = EvalBatches(TOKENS[:100], 4, 8, 4)
DATA = TrainingData(TrainBatches(TOKENS, 4, 8), HELD_OUT, 99, HELD_OUT, 99, "hash")


@pytest.mark.slow
def test_a_step_is_the_mean_of_its_phases_and_equal_phases_cost_the_same():
    """So, of ways that differ in their switch alone, the time is linear in it, to rounding."""
    ways = {
        at: Variant("sparse", MODEL, TRAINING, EvolutionConfig("sparse_to_dense", at=at))
        for at in (0.2, 0.5, 0.8)
    }
    early, half, late = step_seconds(ways, DATA, TRAINING.steps).values()
    assert early > 0 and (early + late) / 2 == pytest.approx(half, rel=1e-9)
