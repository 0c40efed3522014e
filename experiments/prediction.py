"""The cost model against one machine: rates of sections measured on the spot, and whole steps."""

import dataclasses

import numpy as np

from experiments import measurement
from experiments.planner_flags import model as planned_model
from experiments.step_bench import compiled_step
from sparse_dataflow.config.model import PROJECTIONS, ModelConfig
from sparse_dataflow.config.presets import SIZES
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.models import gpt
from sparse_dataflow.parallel.executor import SINGLE_DEVICE, Executor
from sparse_dataflow.planning import memory
from sparse_dataflow.planning.efficiency import PRIOR
from sparse_dataflow.planning.run_layout import RunLayout
from sparse_dataflow.planning.step_time import OPTIMIZER_BYTES, step_time
from sparse_dataflow.training.sections import section_seconds
from sparse_dataflow.training.step import initial_state

LONGEST = 512
"""Tokens a sequence where none is asked for: attention's square would hide the rest on a CPU."""


def refuse_unfit(scale: str, density: float, block: int) -> None:
    """Refuses a sparse model that has no balanced layout, before anything is measured.

    Raises:
      UserError: names the legal values.
    """
    gpt.layouts(dataclasses.replace(_model(scale, density, block), num_layers=1))


def check(scale: str, density: float, asked, chip: Chip) -> dict:
    """A row: the step predicted from measured rates beside the step measured.

    Args:
      scale: a key of SIZES.
      density: of the blocks; 1 for dense.
      asked: the flags of `predict_check`.
      chip: this machine.
    """
    config = _model(scale, density, asked.block)
    sequence = asked.sequence or min(config.max_len, LONGEST)
    training = TrainingConfig(
        steps=1, batch=max(1, asked.tokens // sequence), sequence=sequence, learning_rate=1e-4
    )
    rates = measured_rates(config, training, chip)
    layout = layout_of(config, training)
    time = step_time(config, sequence, layout, chip, PRIOR, rates=rates)
    measured = measured_seconds(config, training, asked.rounds)
    return {
        "scale": scale,
        "density": density,
        "batch": training.batch,
        "sequence": sequence,
        "measured_ms": 1e3 * measured,
        "predicted_ms": 1e3 * float(time.total),
        "error": float(time.total) / measured - 1,
        "terms_ms": {name: 1e3 * float(seconds) for name, seconds in time.terms.items()},
        "rates": rates,
    }


def _model(scale, density, block):
    return planned_model(scale, density, block or SIZES[scale].d_model // 16, "float32")


def layout_of(config: ModelConfig, training: TrainingConfig) -> RunLayout:
    """One device's layout; XLA on a CPU keeps attention's scores."""
    return RunLayout(
        micro_batch=training.batch // training.micro_batches,
        accumulation=training.micro_batches,
        remat=config.remat,
        fused_attention=False,
        state_dtype=training.state_dtype,
    )


def measured_rates(config: ModelConfig, training: TrainingConfig, chip: Chip) -> dict[str, float]:
    """Rates of one layer's sections, the head and the optimizer, as `step_time` takes them."""
    one = dataclasses.replace(config, num_layers=1)
    state = initial_state(one, training)
    seconds = section_seconds(one, training, state, 0.0)
    layout = dataclasses.replace(layout_of(config, training), accumulation=1)
    sections = step_time(one, training.sequence, layout, chip, PRIOR).sections
    seconds = {name: s / training.micro_batches for name, s in seconds.items()}
    rates = {n: 3 * float(sections[n].flops) / seconds[n] for n in (*PROJECTIONS, "attention")}
    rates["head"] = 3 * float(sections["head"].flops) / seconds["head and loss"]
    passes = 3 * float(sections["norms"].bytes + sections["gelu"].bytes)
    rates["norms"] = rates["gelu"] = passes / seconds["norms and GELU"]
    updated = memory.parameter_count(one) * OPTIMIZER_BYTES[training.state_dtype]
    rates["optimizer"] = updated / (seconds["optimizer"] * training.micro_batches)
    return rates


def measured_seconds(
    config: ModelConfig, training: TrainingConfig, rounds: int, executor: Executor = SINGLE_DEVICE
) -> float:
    """Median seconds of a whole training step; in several processes each calls this."""
    rng = np.random.default_rng(0)
    shape = (training.batch, training.sequence + 1)
    tokens = rng.integers(config.vocab_size, size=shape, dtype=np.int32)
    run, *_ = compiled_step(config, training, tokens, executor)
    return float(np.median(measurement.paired_seconds({"step": run}, rounds)["step"]))
