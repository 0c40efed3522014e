"""Ahead-of-time compilation for an H200, without one."""

import described_tpus

from sparse_dataflow.aot import topologies


def devices(number=1):
    """Return the abstract devices of one machine with `number` H200s."""
    return topologies.devices(topologies.parse(f"h200:{number}"))


def compiled(function, arguments, donated=()):
    """Compile `function` for an H200, given arguments with shapes and dtypes."""
    return described_tpus.compiled(function, arguments, devices()[0], donated)
