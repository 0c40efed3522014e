"""An H200 that is only described, and programs compiled for it."""

import described_tpus

from sparse_dataflow.aot import topologies


def devices(number=1):
    """So many in one machine."""
    return topologies.devices(topologies.parse(f"h200:{number}"))


def compiled(function, arguments, donated=()):
    """`function` compiled for it, given arguments with shapes and dtypes."""
    return described_tpus.compiled(function, arguments, devices()[0], donated)
