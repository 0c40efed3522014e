"""One side of `interplay`: whole steps at every density in a process, or a row of processes.

XLA reads whether it may fuse once, when a process starts. The one argument is the settings as JSON;
the result is JSON too, the last line of standard output.
"""

import dataclasses
import json
import os
import sys

from sparse_dataflow.cluster import processes
from sparse_dataflow.cluster.cluster import Membership
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import mesh
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE, TracedExecutor
from sparse_dataflow.hardware import detect as hardware
from sparse_dataflow.hardware.detect import keep_freed_memory
from sparse_dataflow.pipeline.pipelined import executor_over

from . import prediction
from .benchmark import named_model

DENSITIES = (1.0, 1 / 2, 1 / 4, 1 / 8)
SCHEDULE = "1f1b"
MEET_SECONDS, HEARTBEAT_SECONDS = 120.0, 60.0


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one process.

    Attributes:
      scale: named size.
      sequence: tokens of a sequence.
      batch: sequences of a micro-batch.
      micro_batches: of a step.
      block: side of a square block.
      rounds: timed steps.
      rates: whether the rates of the sections and of the machine are measured too.
      stages: stages of the pipeline, one a process; 1 where each process has its own model.
      cores: the cores that this process runs on; any where empty.
      process: number of this process.
      coordinator: host:port of process 0.
    """

    scale: str
    sequence: int
    batch: int
    micro_batches: int
    block: int
    rounds: int
    rates: bool = False
    stages: int = 1
    cores: tuple[int, ...] = ()
    process: int = 0
    coordinator: str = ""


def main(work: Work) -> dict:
    """Measured seconds and rates of sections, by density; and the machine's rates."""
    if work.cores:
        os.sched_setaffinity(0, work.cores)
    keep_freed_memory()
    me = Membership(work.coordinator, work.stages, work.process)
    with processes.joined(me, {}, MEET_SECONDS, HEARTBEAT_SECONDS):
        return _measured(work)


def _measured(work):
    executor: TracedExecutor = SINGLE_DEVICE
    if work.stages > 1:
        stages = mesh.make(mesh.parse(f"stage:{work.stages}", work.stages))
        layers = named_model(work.scale).num_layers
        executor = executor_over(stages, 0, layers, SCHEDULE)
    one = TrainingConfig(steps=1, batch=work.batch, sequence=work.sequence, learning_rate=1e-4)
    step = dataclasses.replace(
        one, batch=work.batch * work.micro_batches, micro_batches=work.micro_batches
    )
    chip = hardware.detect(("float32",)) if work.rates else None
    by_density = {}
    for density in DENSITIES:
        config = named_model(work.scale, density, work.block)
        by_density[f"{density:g}"] = {
            "seconds": prediction.measured_seconds(config, step, work.rounds, executor),
            "rates": chip and prediction.measured_rates(config, one, chip),
        }
    names = ("name", "peak_flops", "memory_bytes", "bandwidth")
    described = chip and {name: getattr(chip, name) for name in names}
    return {"densities": by_density, "chip": described}


if __name__ == "__main__":
    print(json.dumps(main(Work(**json.loads(sys.argv[1])))))
