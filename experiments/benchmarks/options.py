"""Options that benchmarks share, and the names that they choose from; loads no jax."""

import dataclasses

from sparse_dataflow.core.config.settings import AT_LEAST_ONE, setting
from sparse_dataflow.runs.parallel import CLIPPINGS

PRODUCTS = ("forward", "input_gradient", "weight_gradient", "forward_backward")
"""y = xW, dx = dy Wᵀ, dW = xᵀ dy (at stored blocks), and the three in one program."""

IMPLEMENTATIONS = {
    "cpu": ("grouped", "xla", "xla_static"),
    "gpu": ("grouped", "xla", "xla_static", "pallas_hopper", "pallas_triton"),
    "tpu": ("grouped", "xla", "xla_static", "pallas_tpu", "pallas_tpu_grouped"),
}
"""Platform -> implementations of the block-sparse product that run there."""

KEEP_HELP = "Folder for the JSON; empty writes none."
RESULTS = "experiments/results"


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """Options of every benchmark."""

    rounds: int = setting(11, "Timed rounds.", legal=AT_LEAST_ONE)
    keep: str = setting(RESULTS, KEEP_HELP, path=True)


@dataclasses.dataclass(frozen=True)
class RelayOptions:
    """Options of the experiments that measure the relay."""

    clipping: str = setting(
        "exact",
        "Gradient clipping of the relay: exact uses the global norm; eager clips and applies each "
        "section's gradient at once.",
        choices=CLIPPINGS,
    )
    steps: int = setting(3, "Timed steps.", legal=AT_LEAST_ONE)
    keep: str = setting(RESULTS, KEEP_HELP, path=True)
