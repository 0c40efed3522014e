"""Flags of the relay, and the executor that they describe."""

from experiments.command_line import Flag, Group
from sparse_dataflow.files.errors import UserError

ONLY_RELAY = ("stash", "clipping", "server_dir", "depth_schedule")
RELAY = Group(
    "Relay",
    "how --executor=relay runs",
    (
        Flag(
            "stash",
            "choice",
            "device",
            "Where the relay keeps what enters each block until the backward pass; on the host, "
            "device memory does not depend on the depth.",
            ("device", "host"),
            fixed=False,
        ),
        Flag(
            "clipping",
            "choice",
            "exact",
            "Gradients of the relay: exact clips by the global norm, as whole does, which costs "
            "one more pass that nothing hides, over gradients held until the last is there; eager "
            "clips and applies each section's at once, beside the device's work.",
            ("exact", "eager"),
        ),
        Flag(
            "server_dir",
            "text",
            "",
            "Folder of the relay's mapped files for masters and moments; empty keeps them in host "
            "memory.",
            fixed=False,
        ),
        Flag(
            "depth_schedule",
            "text",
            "constant",
            "Blocks that take part in a step of the relay: constant, drop:P leaves each out with "
            "probability P, grow:F starts with the first F of them.",
        ),
    ),
)


def check(values) -> None:
    """Refuses flags of the relay without the relay, and a schedule that is none.

    Raises:
      UserError: naming the flags and what would be legal.
    """
    if "executor" not in values or "stash" not in values:
        return
    from sparse_dataflow.parallel.relay.depth_schedule import DepthSchedule

    named = [name for name in ONLY_RELAY if name in values and values[name].present]
    if values.executor != "relay" and named:
        raise UserError(
            f"{', '.join(f'--{name}' for name in named)} without the relay, which alone has it; "
            "add --executor=relay."
        )
    if "depth_schedule" in values:
        DepthSchedule.parse(values.depth_schedule)
    staged = "evolution" in values and values.evolution not in ("static", "set", "rigl")
    if staged and "server_dir" in values and values.server_dir:
        raise UserError(
            f"--evolution={values.evolution} changes the shapes of the weights, and the files of "
            "--server_dir keep theirs; legal with it: static, set, rigl."
        )


def relay(values):
    """The relay that the flags describe, over the devices of --mesh; auto is all in "data".

    Raises:
      UserError: a mesh that cuts the model.
    """
    import jax

    from sparse_dataflow.parallel import mesh as meshes
    from sparse_dataflow.parallel.relay.depth_schedule import DepthSchedule
    from sparse_dataflow.parallel.relay.executor import RelayExecutor
    from sparse_dataflow.parallel.relay.relay import RelayConfig

    text = f"data:{jax.device_count()}" if values.mesh == "auto" else values.mesh
    sizes = meshes.parse(text, jax.device_count())
    if any(size > 1 for axis, size in sizes.items() if axis != "data"):
        raise UserError(
            f"--mesh={values.mesh} cuts the model, and the relay keeps each block whole on every "
            f"device; legal: --mesh=data:{jax.device_count()}."
        )
    depth = DepthSchedule.parse(values.depth_schedule)
    config = RelayConfig(values.stash, values.clipping, depth)
    mesh = meshes.make(sizes) if jax.device_count() > 1 else None
    return RelayExecutor(config, values.server_dir, mesh)
