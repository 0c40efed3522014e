"""Prints the number of all devices and the relay's losses over them, as one of several processes.

python relay_process.py PROCESSES NUMBER PORT
"""

import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh
from small_models import DENSE, QUARTER

from sparse_dataflow.cluster import rendezvous
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.relay.host_state import fresh_state
from sparse_dataflow.relay.relay import Relay

MODEL = DENSE.with_linears(QUARTER)
TRAINING = TrainingConfig(
    steps=8, batch=8, sequence=11, micro_batches=2, learning_rate=5e-3, clip=0.7
)


def losses(mesh, ready=lambda: None):
    """Returns the losses of all steps; calls `ready` after compiling."""
    relay = Relay(MODEL, TRAINING, mesh=mesh)
    ready()
    state, values = fresh_state(MODEL, TRAINING), []
    for step in range(TRAINING.steps):
        windows = np.random.default_rng(step).integers(0, MODEL.vocab_size, (8, 12), np.int32)
        state, report = relay.train_step(state, Batch.from_windows(windows), 5e-3)
        values.append(float(report.loss))
    return values


if __name__ == "__main__":
    processes, number, port, other = map(int, sys.argv[1:])
    jax.config.update("jax_disable_most_optimizations", True)
    group = []

    def meet():
        """The first collective waits 30 seconds for the others: less than compiling may take."""
        if processes > 1:
            group.append(rendezvous.meet(f"localhost:{other}", processes, number, {}, 500))

    if processes > 1:
        jax.distributed.initialize(f"localhost:{port}", processes, number)
    devices = jax.devices()
    result = len(devices), losses(Mesh(np.array(devices), ("data",)), meet)
    print(json.dumps(result), flush=True)
    for each in group:
        each.leave()
