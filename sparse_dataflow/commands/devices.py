"""From a config to devices: the processes join, and the executor is made."""

import contextlib
import sys
from collections.abc import Iterator

import jax
from jax.sharding import AbstractMesh

from sparse_dataflow.cluster import cluster, processes, watch
from sparse_dataflow.commands.request import Request
from sparse_dataflow.compile import array_table
from sparse_dataflow.core import collectives
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.depth import DepthSchedule
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors.compatibility import ResolvedRun, refuse
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE, Executor
from sparse_dataflow.core.layouts.evolution import METHODS
from sparse_dataflow.core.training.clock import Clock
from sparse_dataflow.core.training.phases import Variant
from sparse_dataflow.core.training.programs import refuse_row_shards
from sparse_dataflow.core.training.step import abstract_state
from sparse_dataflow.files.errors import redact
from sparse_dataflow.pipeline.pipelined import executor_over
from sparse_dataflow.relay.relay import RelayConfig
from sparse_dataflow.relay.relay_executor import RelayExecutor
from sparse_dataflow.runs import compatibility
from sparse_dataflow.runs.run_config import RunConfig
from sparse_dataflow.runs.variants import variants


@contextlib.contextmanager
def joined(experiment: str, request: Request, clock: Clock) -> Iterator[None]:
    """Inside, jax has the devices of all processes of the run, which watch each other.

    Args:
      request: the command line.
      clock: tracks what this process is doing.

    Raises:
      UserError: the processes do not meet, or were told different things.
    """
    plan = request.parallel
    me = cluster.membership(plan.coordinator, plan.processes, plan.process)
    if me.source:
        # Each process for itself: which one prints is not settled before they have met.
        print(redact(me.describe()), file=sys.stderr, flush=True)
    facts = {"experiment": experiment, "jax": jax.__version__, **request.facts}
    with processes.joined(me, facts, plan.join_timeout, plan.heartbeat) as group:
        watching = watch.Watch(clock, plan.heartbeat, group)
        try:
            yield
        finally:
            watching.stop()


def executor(config: RunConfig, described: int | None = None) -> Executor:
    """The executor of a config.

    Args:
      config: its `parallel` part, and the number of layers.
      described: number of devices that need not be there; 0 for that of the mesh, or of this
        machine where the mesh is auto; None for the devices of this machine.

    Raises:
      UserError: no such mesh, schedule or division of the layers; names the legal values.
    """
    plan = config.parallel
    depth = DepthSchedule.parse(plan.depth_schedule)
    imagined = bool(described) or (described == 0 and plan.mesh != "auto")
    if plan.executor == "relay":
        count: int | None = described or jax.device_count()
        sizes = meshes.parse(f"data:{count}" if plan.mesh == "auto" else plan.mesh, count)
    else:
        count = (described or None) if imagined else jax.device_count()
        sizes = meshes.parse(plan.mesh, count)
    compatibility.refuse_devices(config, sizes)
    if plan.executor == "relay":
        return _relay(plan, depth, sizes, bool(described))
    if count == 1 and sizes["stage"] == 1:
        return SINGLE_DEVICE
    return executor_over(
        _imagined(sizes) if imagined else meshes.make(sizes),
        plan.zero,
        config.model.num_layers,
        plan.schedule,
        plan.experts == "exchange",
        plan.sub_batches,
    )


def _imagined(sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def _relay(plan, depth, sizes, imagined):
    """Returns the relay over the axis data."""
    config = RelayConfig(plan.stash, plan.clipping, depth)
    mesh: meshes.AnyMesh | None = None
    if sizes["data"] > 1:
        mesh = _imagined(sizes) if imagined else meshes.make(sizes)
    return RelayExecutor(config, plan.server_dir, mesh)


def arrays(executor: Executor, variant: Variant) -> list[dict]:
    """`Executor.arrays` of each model that the variant trains in turn."""
    training, described = variant.training, []
    for phase in variant.phase_specs:
        state = abstract_state(phase.model, training).with_layouts(phase.model)
        ids = jax.ShapeDtypeStruct((training.batch, training.sequence), "int32")
        batch = Batch(ids, ids)
        described.append(executor.arrays(state, phase.model, phase.runtime_layouts, batch))
    return described


def describe(config: RunConfig, described: int = 0) -> None:
    """Prints every array of a run with its shape, sharding and bytes a chip.

    Args:
      described: see `executor`.

    Raises:
      UserError: the executor cannot train the models.
    """
    chosen, models = executor(config, described), variants(config)
    check(chosen, config, models)
    if collectives.is_first():
        print(printed(chosen, models))


def printed(executor: Executor, variants: list[Variant]) -> str:
    """What `describe` prints."""
    blocks = []
    for variant in variants:
        for number, described in enumerate(arrays(executor, variant)):
            suffix = f", model {number + 1}" if len(variant.phase_specs) > 1 else ""
            title = f"{variant.name}{suffix}: {executor.devices} chips, {executor.describe()}"
            blocks.append(array_table.table(array_table.rows(described), title))
    return "\n\n".join(blocks)


def check(executor: Executor, config: RunConfig, variants: list[Variant]) -> None:
    """Refuses variants that cannot be laid out so.

    Raises:
      UserError: naming what does not fit.
    """
    runs = [run for variant in variants for run in _resolved(executor, config, variant)]
    refuse(runs, compatibility.TABLE)
    for run in runs:
        executor.check(run.model, run.training)
    for variant in variants:
        changes = METHODS[variant.evolution.method].update is not None
        if changes and any(phase.model.sparse_projections for phase in variant.phase_specs):
            refuse_row_shards(variant.evolution, executor)


def _resolved(executor, config, variant):
    """Yields the run of each model that a variant trains in turn."""
    changes = len(variant.phase_specs) > 1 or variant.phase_specs[0].runtime_layouts
    for phase in variant.phase_specs:
        yield ResolvedRun(
            phase.model,
            variant.training,
            executor,
            config.data.loss,
            variant.evolution.method if changes else "",
            changes and variant.evolution.given_layouts,
            config,
        )
