"""The cost model against one machine: rates of sections measured on the spot, and whole steps."""

import dataclasses

import numpy as np

from sparse_dataflow.commands import measurement
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE, TracedExecutor
from sparse_dataflow.core.training.step import initial_state
from sparse_dataflow.hardware import detect as hardware
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.hardware.detect import keep_freed_memory
from sparse_dataflow.planner.efficiency import PRIOR
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.planner.step_time import optimizer_bytes, step_time
from sparse_dataflow.runs.run_config import SIZES

from . import paired
from .benchmark import named_model
from .section_times import section_seconds
from .steps import compiled_step, random_tokens

LONGEST = 512
"""Most tokens of a sequence by default: on a CPU, attention of longer ones hides the rest."""


def check_predictions(options) -> None:
    """Predicts and measures every scale; see `experiments.predict_check`.

    Raises:
      UserError: a model has no layout, before anything is measured.
    """
    keep_freed_memory()
    models = {
        (scale, density): check_model(scale, density, options.block)
        for scale in options.scales
        for density in (1.0, options.density)
    }
    chip = hardware.detect(("float32",))
    peak, bandwidth = chip.rates("float32")
    print(f"{chip.name}: {peak / 1e9:,.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s")
    rows = []
    for (scale, density), model in models.items():
        row = check(model, options.tokens, options.sequence, options.rounds, chip)
        rows.append({"scale": scale, "density": density, **row})
        print(
            f"{scale:>6} {'dense' if density == 1 else f'{density:g}':>6}: measured "
            f"{row['measured_ms']:8.1f} ms, predicted {row['predicted_ms']:8.1f} ms, "
            f"{row['error']:+.1%}",
            flush=True,
        )
    print(f"largest error {max(abs(row['error']) for row in rows):.1%}")
    measurement.keep(options.keep, f"predict_check_{chip.name}", chip.name, [{"rows": rows}])


def check_model(scale: str, density: float, block: int) -> ModelConfig:
    """The model of a row; a block of 0 is a sixteenth of the scale's width.

    Raises:
      UserError: block and density have no layout; names the legal values.
    """
    return named_model(scale, density, block or SIZES[scale].d_model // 16)


def check(config: ModelConfig, tokens: int, sequence: int, rounds: int, chip: Chip) -> dict:
    """A row: the step predicted from measured rates beside the step measured.

    Args:
      config: of the model.
      tokens: tokens of a step: as many sequences as fit, at least one.
      sequence: tokens of a sequence; 0 is the longest of the model, at most LONGEST.
      rounds: timed steps.
      chip: this machine.
    """
    sequence = sequence or min(config.max_len, LONGEST)
    training = TrainingConfig(
        steps=1, batch=max(1, tokens // sequence), sequence=sequence, learning_rate=1e-4
    )
    rates = measured_rates(config, training, chip)
    plan = plan_of(config, training)
    time = step_time(config, sequence, plan, chip, PRIOR, rates=rates)
    measured = measured_seconds(config, training, rounds)
    return {
        "batch": training.batch,
        "sequence": sequence,
        "measured_ms": 1e3 * measured,
        "predicted_ms": 1e3 * float(time.total),
        "error": float(time.total) / measured - 1,
        "terms_ms": {name: 1e3 * float(seconds) for name, seconds in time.terms.items()},
        "rates": rates,
    }


def plan_of(config: ModelConfig, training: TrainingConfig) -> ParallelPlan:
    """One device's parallel plan; XLA on a CPU keeps attention's scores."""
    return ParallelPlan(
        micro_batch=training.batch // training.micro_batches,
        accumulation=training.micro_batches,
        remat=config.remat,
        fused_attention=False,
        state_dtype=training.state_dtype,
        optimizer=training.optimizer,
    )


def measured_rates(config: ModelConfig, training: TrainingConfig, chip: Chip) -> dict[str, float]:
    """Rates of one layer's sections, the head and the optimizer, as `step_time` takes them."""
    one = dataclasses.replace(config, num_layers=1)
    state = initial_state(one, training)
    seconds = section_seconds(one, training, state, 0.0)
    plan = dataclasses.replace(plan_of(config, training), accumulation=1)
    sections = step_time(one, training.sequence, plan, chip, PRIOR).sections
    seconds = {name: s / training.micro_batches for name, s in seconds.items()}
    rates = {
        n: 3 * float(sections[n].flops) / seconds[n] for n in (*config.projections, "attention")
    }
    rates["head"] = 3 * float(sections["head"].flops) / seconds["head and loss"]
    passes = 3 * float(sections["norms"].bytes + sections["gelu"].bytes)
    rates["norms"] = rates["gelu"] = passes / seconds["norms and GELU"]
    updated = float(optimizer_bytes(one, plan))
    rates["optimizer"] = updated / (seconds["optimizer"] * training.micro_batches)
    return rates


def measured_seconds(
    config: ModelConfig,
    training: TrainingConfig,
    rounds: int,
    executor: TracedExecutor = SINGLE_DEVICE,
) -> float:
    """Median seconds of a whole training step; in several processes each calls this."""
    step = compiled_step(config, training, random_tokens(config, training), executor)
    return float(np.median(paired.paired_seconds({"step": step.run}, rounds)["step"]))
