"""Reads tokens for a fit from batches on meshes of eight devices; prints {axes: equal}."""

import json

import jax
import numpy as np

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors.sharded import Sharded
from sparse_dataflow.pruning import run_start


def is_equal(axes):
    """Returns whether they are those of the batches on the host."""
    windows = np.arange(288, dtype=np.int32).reshape(2, 16, 9)
    batches = [Batch.from_windows(rows) for rows in windows]
    executor = Sharded(meshes.make(meshes.parse(axes, 8), jax.devices()), 3)
    placed = [executor.put(batch, 16) for batch in batches]
    tokens, expected = (run_start.calibration(each, 2, 3) for each in (placed, batches))
    return len(tokens) == 6 and all(map(np.array_equal, tokens, expected))


if __name__ == "__main__":
    print(json.dumps({axes: is_equal(axes) for axes in ("fsdp:4,tensor:2", "tensor:8")}))
