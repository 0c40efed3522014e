"""From flags to devices: the processes join, and the executor is made."""

import contextlib
import sys
from collections.abc import Iterator

import jax
from jax.sharding import AbstractMesh
from sparse_dataflow.config.presets import SIZES

from experiments import contradictions, execution_flags, flags
from experiments.recipes import Variant
from sparse_dataflow.distributed import cluster, join, watch
from sparse_dataflow.distributed.clock import Clock
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.redaction import redacted
from sparse_dataflow.hardware.detect import GIB
from sparse_dataflow.models import gpt
from sparse_dataflow.parallel import describe
from sparse_dataflow.parallel import mesh as meshes
from sparse_dataflow.parallel.executor import ONE_DEVICE, Executor
from sparse_dataflow.parallel.pipeline.pipelined import executor_over
from sparse_dataflow.planning import memory
from sparse_dataflow.training.step import abstract_state


@contextlib.contextmanager
def joined(experiment: str, values, groups, clock: Clock) -> Iterator[None]:
    """Inside, jax has the devices of all processes that the flags name, and they watch each other.

    Args:
      experiment: its name.
      values: the flags.
      groups: those that the experiment has.
      clock: says what this process is doing.

    Raises:
      UserError: they do not meet, or were told different things.
    """
    me = cluster.membership(values.coordinator, values.processes, values.process)
    if me.found:
        # Each process for itself: which one speaks is not settled before they have met.
        print(redacted(me.describe()), file=sys.stderr, flush=True)
    told = flags.as_dict(values, groups) | {
        name: values[name].value
        for name in ("out", "resume", "mesh", "zero", "executor", "schedule", "describe")
    }
    facts = {"experiment": experiment, "jax": jax.__version__}
    facts |= {f"--{name}": value for name, value in told.items()}
    with join.joined(me, facts, values.join_timeout, values.heartbeat) as group:
        watching = watch.Watch(clock, values.heartbeat, group)
        try:
            yield
        finally:
            watching.stop()


def executor(values) -> Executor:
    """The one that the flags describe, for the scale that they name.

    With --describe the devices need not be there.

    Raises:
      UserError: no such mesh, schedule or division of the layers; names the legal values.
    """
    if values.executor == "relay":
        return execution_flags.relay(values)
    imagined = values.describe == "yes" and values.mesh != "auto"
    sizes = meshes.parse(values.mesh, None if imagined else jax.device_count())
    staged = _pipelines(values, sizes["stage"])
    if not (imagined or staged) and jax.device_count() == 1:
        return ONE_DEVICE
    mesh: meshes.AnyMesh
    if imagined:
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    else:
        mesh = meshes.make(sizes)
    layers = SIZES[values.scale].num_layers
    return executor_over(mesh, values.zero, layers, values.schedule)


def _pipelines(values, stages):
    """Whether the executor is the pipeline; UserError where flags contradict it."""
    if values.executor == "pipeline" and stages == 1:
        raise UserError(
            f"--executor=pipeline on --mesh={values.mesh}, which has no stages; legal: a mesh with "
            "stage:2 or more, such as --mesh=stage:2,fsdp."
        )
    if values.executor == "whole" and stages > 1:
        raise UserError(
            f"--mesh={values.mesh} cuts the model by layers, and --executor=whole keeps them "
            "together; legal: --executor=pipeline, or the axes data, fsdp, tensor."
        )
    if stages == 1 and contradictions.given(values, "schedule"):
        raise UserError("--schedule without a pipeline; legal with stage:2 or more in --mesh.")
    return stages > 1


def arrays(executor: Executor, variant: Variant) -> list[dict]:
    """`Executor.arrays` of each model that the variant trains in turn."""
    training, found = variant.training, []
    for phase in variant.phase_specs:
        state = abstract_state(phase.model, training)
        tables = gpt.layout_tables(gpt.layouts(phase.model))
        tokens = jax.ShapeDtypeStruct((training.batch, training.sequence + 1), "int32")
        batch = {"tokens": tokens}
        found.append(executor.arrays(state, tables, phase.runtime_layouts, batch))
    return found


def printed(executor: Executor, variants: list[Variant]) -> str:
    """What --describe prints."""
    parts = []
    for variant in variants:
        for number, found in enumerate(arrays(executor, variant)):
            phase = f", model {number + 1}" if len(variant.phase_specs) > 1 else ""
            title = f"{variant.name}{phase}: {executor.devices} chips, {executor.describe()}"
            parts.append(describe.table(describe.rows(found), title))
    return "\n\n".join(parts)


def check(executor: Executor, values, variants: list[Variant], memory_bytes: int | None) -> None:
    """Refuses variants that cannot be laid out so, or whose arrays alone overflow a chip.

    Raises:
      UserError: naming what does not fit.
    """
    for variant in variants:
        for phase in variant.phase_specs:
            executor.check(phase.model, variant.training)
    if memory_bytes is None or executor == ONE_DEVICE or values.executor == "relay":
        return
    need = sum(max(map(describe.bytes_a_chip, arrays(executor, v))) for v in variants)
    if need > memory_bytes * memory.USABLE:
        raise UserError(
            f"Training --scale={values.scale} keeps {need / GIB:,.1f} GiB on each chip with "
            f"{executor.describe()}, and a chip has {memory_bytes / GIB:,.1f}; legal: more "
            "devices along fsdp or tensor, --zero=3, or a smaller --scale."
        )
