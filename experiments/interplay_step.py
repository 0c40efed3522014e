"""One side of `interplay`: whole steps at every density in a process, or a row of processes.

XLA reads whether it may fuse once, when a process starts. The one argument is the settings as JSON;
the result is JSON too, the last line of standard output.
"""

import dataclasses
import json
import os
import sys
import types

from experiments import prediction
from experiments.planner_flags import DENSITIES
from experiments.planner_flags import model as planned_model
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.distributed import join
from sparse_dataflow.distributed.cluster import Membership
from sparse_dataflow.hardware import detect as hardware
from sparse_dataflow.hardware.host_memory import keep_freed_memory
from sparse_dataflow.parallel import mesh
from sparse_dataflow.parallel.executor import SINGLE_DEVICE, Executor
from sparse_dataflow.parallel.pipeline.pipelined import executor_over

SCHEDULE = "1f1b"
MEET_SECONDS, HEARTBEAT_SECONDS = 120.0, 60.0


def main(asked) -> dict:
    """Measured seconds, and the rates of sections, by density; and the machine's own rates.

    Args:
      asked: scale, sequence, batch (sequences of a micro-batch), micro_batches (of a step), block,
        rounds, whether rates are wanted, cores (numbers of those that this process runs on), stages
        (processes in a row, each a stage), process (this one's number), and coordinator (host:port
        of process 0).
    """
    if asked.cores:
        os.sched_setaffinity(0, asked.cores)
    keep_freed_memory()
    me = Membership(asked.coordinator, asked.stages, asked.process)
    with join.joined(me, {}, MEET_SECONDS, HEARTBEAT_SECONDS):
        return _measured(asked)


def _measured(asked):
    executor: Executor = SINGLE_DEVICE
    if asked.stages > 1:
        stages = mesh.make(mesh.parse(f"stage:{asked.stages}", asked.stages))
        layers = planned_model(asked.scale).num_layers
        executor = executor_over(stages, 0, layers, SCHEDULE)
    one = TrainingConfig(steps=1, batch=asked.batch, sequence=asked.sequence, learning_rate=1e-4)
    step = dataclasses.replace(
        one, batch=asked.batch * asked.micro_batches, micro_batches=asked.micro_batches
    )
    chip = hardware.detect(("float32",)) if asked.rates else None
    found = {}
    for density in DENSITIES:
        config = planned_model(asked.scale, density, asked.block, "float32")
        found[f"{density:g}"] = {
            "seconds": prediction.measured_seconds(config, step, asked.rounds, executor),
            "rates": chip and prediction.measured_rates(config, one, chip),
        }
    return {"densities": found, "chip": chip and _described(chip)}


def _described(chip):
    return {
        "name": chip.name,
        "peak_flops": dict(chip.peak_flops or {}),
        "memory_bytes": chip.memory_bytes,
        "bandwidth": chip.bandwidth,
    }


if __name__ == "__main__":
    print(json.dumps(main(types.SimpleNamespace(**json.loads(sys.argv[1])))))
