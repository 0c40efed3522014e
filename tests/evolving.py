"""Small trainings whose layouts or model change; each method is compiled once per process."""

import dataclasses
import functools

import jax
import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.layouts.evolution import phase_specs
from sparse_dataflow.core.training import hooks
from sparse_dataflow.core.training.loop import Trainer, advance_side_by_side
from sparse_dataflow.core.training.phases import Variant
from sparse_dataflow.core.training.programs import TrainingData, compile_programs
from sparse_dataflow.data.batches import EvalBatches, TrainBatches
from sparse_dataflow.monitoring.metrics import MetricsWriter
from sparse_dataflow.pruning.changes import change_of

SPARSE = LinearSpec("block_sparse", "monarch", density=0.25, block=4, rank=2, hadamard=8)
MODEL = ModelConfig(2, 32, 2, 64, vocab_size=40, max_len=8).with_linears(SPARSE)
TRAINING = TrainingConfig(steps=10, batch=4, sequence=8, learning_rate=3e-2)
TOKENS = (np.arange(400) * 7 % 40).astype(np.uint16)
WINDOWS = EvalBatches(TOKENS[:100], 4, 8, 4)
DATA = TrainingData(TrainBatches(TOKENS, 4, 8), WINDOWS, 99, WINDOWS, 99, "hash")
EVOLUTIONS = {
    "set": EvolutionConfig("set", every=2, share=0.3),
    "rigl": EvolutionConfig("rigl", every=3, at=0.9, share=0.5),
    "gradual": EvolutionConfig("gradual", at=0.6),
    "sparse_to_dense": EvolutionConfig("sparse_to_dense", at=0.5),
    "mlp_dense_first": EvolutionConfig("sparse_to_dense", at=0.4, first=("mlp_in", "mlp_out")),
    "shared_to_own": EvolutionConfig("shared_to_own", at=0.5),
    "rigl_by_depth": EvolutionConfig("rigl", every=3, at=0.9, share=0.5),
    "dense_by_depth": EvolutionConfig("sparse_to_dense", at=0.5),
    "gradual_by_depth": EvolutionConfig("gradual", at=0.6),
}
BY_DEPTH = dataclasses.replace(MODEL, density_by_depth=(2.0, 1.0))
MODELS = {name: BY_DEPTH if "by_depth" in name else MODEL for name in EVOLUTIONS}


@functools.cache
def programs_of(method):
    evolution = EVOLUTIONS[method]
    specs, change = phase_specs(MODELS[method], evolution), change_of(evolution, TRAINING)
    return compile_programs(specs, TRAINING, DATA, evolution, change=change)


def trainer(folder, method, evolution=None, **options):
    every = {"eval_every": 5, "checkpoint_every": 20} | options
    evolution = evolution or EVOLUTIONS[method]
    model, programs = MODELS[method], programs_of(method)
    variant = Variant("sparse", model, TRAINING, evolution)
    usual = hooks.usual(**every, change=change_of(evolution, TRAINING))
    return Trainer(variant, folder, DATA, programs, usual, metrics=MetricsWriter)


def train(t, until=10):
    try:
        for _ in advance_side_by_side([t], lambda: t.step >= until):
            pass
    finally:
        t.close()
    return t


def compiled_while(function):
    """Returns the events of compiling while a function runs."""
    events = []

    def note(event, seconds, **facts):
        if "compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        jax.jit(lambda x: x * 3.25)(1.0)
        assert events  # The listener works.
        events.clear()
        function()
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    return events
