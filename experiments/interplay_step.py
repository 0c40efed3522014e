"""One side of `interplay`: whole steps at every density in a process of its own.

XLA reads whether it may fuse once, when a process starts. Reads its settings as JSON from standard
input and writes the result as JSON, the last line of standard output.
"""

import json
import sys
import types

from experiments import prediction
from experiments.interplay import DENSITIES
from experiments.planner_flags import model as planned_model
from sparse_dataflow.execution.host_memory import keep_freed_memory
from sparse_dataflow.planning import hardware
from sparse_dataflow.training.optimizer import TrainingConfig


def main(asked) -> dict:
    """Measured seconds, and the rates of sections, by density; and the machine's own rates.

    Args:
      asked: scale, sequence, batch, block, rounds, and whether rates are wanted.
    """
    keep_freed_memory()
    chip = hardware.detect(("float32",))
    training = TrainingConfig(
        steps=1, batch=asked.batch, sequence=asked.sequence, learning_rate=1e-4
    )
    found = {}
    for density in DENSITIES:
        config = planned_model(asked.scale, density, asked.block, "float32")
        found[f"{density:g}"] = {
            "seconds": prediction.measured_seconds(config, training, asked.rounds),
            "rates": asked.rates and prediction.measured_rates(config, training, chip),
        }
    return {
        "densities": found,
        "chip": {
            "name": chip.name,
            "peak_flops": dict(chip.peak_flops or {}),
            "memory_bytes": chip.memory_bytes,
            "bandwidth": chip.bandwidth,
        },
    }


if __name__ == "__main__":
    print(json.dumps(main(types.SimpleNamespace(**json.load(sys.stdin)))))
