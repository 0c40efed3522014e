"""Where a model lies: the settings of mesh, executor and processes.

Importing this module loads no jax.
"""

import dataclasses
import re

from sparse_dataflow.core.config.settings import (
    ADOPTED,
    ASKED,
    FRESH,
    MOST_SECONDS,
    Readable,
    between,
    positive,
    setting,
    shown,
    validate,
)
from sparse_dataflow.core.executors.mesh_axes import MOST_SUB_BATCHES
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.relay.clipping import CLIPPINGS

EXECUTORS = ("auto", "whole", "pipeline", "relay")
EXPERTS = ("gather", "exchange")
STASHES = ("device", "host")
MOST_PROCESSES = 2**20
MOST_BYTES = 1e15
ONLY_RELAY = ("stash", "clipping", "server_dir", "depth_schedule")
"""Settings that no other executor reads."""


@dataclasses.dataclass(frozen=True, repr=False)
class ParallelConfig(Readable):
    """The parallel plan of a run; it does not change the results.

    Attributes:
      sub_batches: the overlap of arXiv 2305.13525.
      schedule: rule of the pipeline's table, in `action_tables.RULES`.
      memory_limit: compared with the planner's estimate.
      depth_schedule: see `DepthSchedule`.
    """

    executor: str = setting(
        "auto",
        "whole: all layers in one program. pipeline: micro-batches stream through the stages of "
        "the mesh. relay: one layer at a time on the device, parameters in host memory. auto: "
        "pipeline where the mesh has stages, else whole.",
        choices=EXECUTORS,
        resumed=ADOPTED,
    )
    mesh: str = setting(
        "auto",
        "Devices along each axis, as in data:2,fsdp:4,tensor:8 (data replicates, stage cuts by "
        "layers, fsdp shards, context shards the tokens of a sequence, tensor cuts every layer, "
        "feature cuts it by the features of the residual stream too); one size may be left out. "
        "With auto the planner chooses; on a CPU it is fsdp over all devices.",
        resumed=FRESH,
    )
    zero: int = setting(
        3,
        "What fsdp shards: 0 nothing, 1 moments, 2 gradients too, 3 parameters too.",
        legal=("0 to 3", lambda level: 0 <= level <= 3),
        resumed=FRESH,
    )
    experts: str = setting(
        "gather",
        "What fsdp sends for the experts of a layer: gather sends all weights to every device, "
        "exchange sends each token to the devices of its experts (all-to-all).",
        choices=EXPERTS,
        resumed=FRESH,
    )
    sub_batches: int = setting(
        1,
        "Parts of a micro-batch that pass through each layer in turn, so that collectives of one "
        "can overlap with products of another. Not with experts; no effect on one device and on "
        "the relay, whose layers have no collectives.",
        legal=between(1, MOST_SUB_BATCHES),
        resumed=FRESH,
    )
    schedule: str = setting(
        "1f1b",
        "Pipeline schedule: gpipe, 1f1b, interleaved:V (V model chunks a stage) or zero_bubble.",
        resumed=FRESH,
    )
    memory_limit: str = setting(
        "",
        "Bytes a device that training may use, as in 16GiB or 16e9: the planner then chooses "
        "which layers keep, recompute or offload their activations (model.remat). Empty is no "
        "limit.",
        resumed=ADOPTED,
    )
    stash: str = setting(
        "device",
        "Where the relay stores layer inputs until the backward pass; with host, device memory "
        "does not depend on the depth.",
        choices=STASHES,
        resumed=ADOPTED,
    )
    clipping: str = setting(
        "exact",
        "Gradient clipping of the relay: exact uses the global norm, as whole does; eager clips "
        "and applies each section's gradient at once, which overlaps with compute, and with "
        "training.skip_spikes after the last one.",
        choices=CLIPPINGS,
    )
    server_dir: str = setting(
        "",
        "Folder of the relay's mapped files for masters and moments; empty is host memory.",
        resumed=ASKED,
        path=True,
    )
    depth_schedule: str = setting(
        "constant",
        "Layers in a step of the relay: constant; drop:P leaves each out with probability P; "
        "grow:F starts with the first F of them.",
    )
    coordinator: str = setting(
        "", "host:port of process 0; empty reads JAX_COORDINATOR_ADDRESS.", resumed=FRESH
    )
    processes: int = setting(
        0,
        "Processes of the run; 0 reads JAX_NUM_PROCESSES, else 1.",
        legal=between(0, MOST_PROCESSES),
        resumed=FRESH,
    )
    process: int = setting(
        -1,
        "Number of this process, from 0; -1 reads JAX_PROCESS_ID.",
        legal=between(-1, MOST_PROCESSES - 1),
        resumed=FRESH,
    )
    join_timeout: float = setting(
        300.0,
        "Seconds that processes wait for the last one.",
        legal=positive(MOST_SECONDS),
        resumed=FRESH,
    )
    heartbeat: float = setting(
        30.0,
        "Seconds of silence after which every process names the silent one; after ten times as "
        "long all exit with status 75.",
        legal=positive(MOST_SECONDS),
        resumed=FRESH,
    )

    def __post_init__(self):
        validate(self, "parallel")
        _ = self.memory_limit_bytes  # Refuses an illegal one.

    @property
    def memory_limit_bytes(self) -> int | None:
        """Bytes of `memory_limit`; None without one.

        Raises:
          UserError: it is no number of bytes.
        """
        limit = self.memory_limit
        return byte_count(limit, "parallel.memory_limit") if limit else None


def byte_count(text: str, name: str) -> int:
    """Returns the bytes that a text such as 16GiB, 512MiB or 16e9 names.

    Args:
      name: name of the setting, for the error.

    Raises:
      UserError: it is no number of bytes.
    """
    match = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?)(GiB|MiB)?", text)
    size = float(match[1]) * {"GiB": 2**30, "MiB": 2**20, None: 1}[match[2]] if match else 0
    if not 1 <= size <= MOST_BYTES:
        raise UserError(
            f"{name}={shown(text)} is not legal; legal: bytes from 1 to {MOST_BYTES:g}, as in "
            "16GiB, 512MiB or 16e9."
        )
    return int(size)
