"""Ahead-of-time compilation for NVIDIA GPUs, without one."""

import described_tpus

from sparse_dataflow.compile import topologies


def devices(number=1):
    """Return the abstract devices of one machine with `number` H200s."""
    return topologies.devices(topologies.parse(f"h200:{number}"))


def compiled(function, arguments, donated=(), kind="h200"):
    """Compile `function` for a GPU of a kind in `gpu_targets.TARGETS`, given shapes and dtypes."""
    return described_tpus.compiled(function, arguments, topologies.gpu_devices(kind)[0], donated)
