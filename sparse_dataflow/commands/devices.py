"""From a config to devices: the processes join, and the executor is made."""

import contextlib
import sys
from collections.abc import Iterator

import jax
from jax.sharding import AbstractMesh

from sparse_dataflow.cluster import cluster, processes, watch
from sparse_dataflow.commands.request import Request
from sparse_dataflow.compile import array_table as tables
from sparse_dataflow.core import collectives
from sparse_dataflow.core.config.depth import DepthSchedule
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE, Executor, Job, refuse_unsupported
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.training.clock import Clock
from sparse_dataflow.core.training.phases import Variant
from sparse_dataflow.core.training.step import abstract_state
from sparse_dataflow.files.errors import UserError, redact
from sparse_dataflow.pipeline.pipelined import executor_over
from sparse_dataflow.relay.relay import RelayConfig
from sparse_dataflow.relay.relay_executor import RelayExecutor
from sparse_dataflow.runs.parallel import ParallelConfig
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
    exchange = plan.experts == "exchange"
    if exchange and (plan.executor == "relay" or not config.model.experts):
        raise UserError(
            f"parallel.experts=exchange with model.experts={config.model.experts} and "
            f"--executor={plan.executor}; legal: model.experts of 1 or more and another executor "
            "than the relay, or parallel.experts=gather."
        )
    DepthSchedule.parse(plan.depth_schedule)
    if plan.executor == "relay":
        if plan.sub_batches > 1:
            raise _without_sub_batches(plan)
        return relay(plan, described)
    imagined = bool(described) or (described == 0 and plan.mesh != "auto")
    count = (described or None) if imagined else jax.device_count()
    sizes = meshes.parse(plan.mesh, count)
    staged = _pipelines(plan, sizes["stage"])
    if plan.sub_batches > 1 and staged:
        raise _without_sub_batches(plan)
    if count == 1 and not staged:
        return SINGLE_DEVICE
    mesh: meshes.AnyMesh
    if imagined:
        mesh = _imagined(sizes)
    else:
        mesh = meshes.make(sizes)
    return executor_over(
        mesh, plan.zero, config.model.num_layers, plan.schedule, exchange, plan.sub_batches
    )


def _imagined(sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def _without_sub_batches(plan):
    return UserError(
        f"parallel.sub_batches={plan.sub_batches} with stages or the relay; legal: 1, or "
        "--executor=whole."
    )


def relay(plan: ParallelConfig, described: int | None = None) -> RelayExecutor:
    """The relay over the devices of the mesh; "auto" puts all on the axis data.

    Args:
      plan: its mesh, and the settings of the relay.
      described: number of devices that need not be there; None for those of this machine.

    Raises:
      UserError: a mesh that cuts the model.
    """
    count = described or jax.device_count()
    text = f"data:{count}" if plan.mesh == "auto" else plan.mesh
    sizes = meshes.parse(text, count)
    if any(size > 1 for axis, size in sizes.items() if axis != "data"):
        raise UserError(
            f"--mesh={plan.mesh} cuts the model, and the relay keeps each block whole on every "
            f"device; legal: --mesh=data:{count}."
        )
    depth = DepthSchedule.parse(plan.depth_schedule)
    config = RelayConfig(plan.stash, plan.clipping, depth)
    mesh: meshes.AnyMesh | None = None
    if count > 1:
        mesh = _imagined(sizes) if described else meshes.make(sizes)
    return RelayExecutor(config, plan.server_dir, mesh)


def _pipelines(plan, stages):
    """Whether the executor is the pipeline; UserError where settings contradict it."""
    if plan.executor == "pipeline" and stages == 1:
        raise UserError(
            f"--executor=pipeline on --mesh={plan.mesh}, which has no stages; legal: a mesh with "
            "stage:2 or more, such as --mesh=stage:2,fsdp."
        )
    if plan.executor == "whole" and stages > 1:
        raise UserError(
            f"--mesh={plan.mesh} cuts the model by layers, and --executor=whole keeps them "
            "together; legal: --executor=pipeline, or the axes data, fsdp, feature, tensor."
        )
    if stages == 1 and plan.schedule != ParallelConfig().schedule:
        raise UserError(
            "parallel.schedule without a pipeline; legal with stage:2 or more in --mesh."
        )
    return stages > 1


def arrays(executor: Executor, variant: Variant) -> list[dict]:
    """`Executor.arrays` of each model that the variant trains in turn."""
    training, described = variant.training, []
    for phase in variant.phase_specs:
        layouts = stacks.layout_tables(stacks.layouts(phase.model))
        state = abstract_state(phase.model, training)._replace(tables=layouts)
        tokens = jax.ShapeDtypeStruct((training.batch, training.sequence + 1), "int32")
        batch = {"tokens": tokens}
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
            blocks.append(tables.table(tables.rows(described), title))
    return "\n\n".join(blocks)


def check(executor: Executor, config: RunConfig, variants: list[Variant]) -> None:
    """Refuses variants that cannot be laid out so.

    Raises:
      UserError: naming what does not fit.
    """
    for variant in variants:
        # Layouts that came with weights are data of the programs too.
        changes = len(variant.phase_specs) > 1 or variant.phase_specs[0].runtime_layouts
        method = variant.evolution.method
        evolution = method if changes and method != "static" else ""
        for phase in variant.phase_specs:
            job = Job(phase.model, variant.training, evolution)
            refuse_unsupported(executor, job)
            executor.check(phase.model, variant.training)
