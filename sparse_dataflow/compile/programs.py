"""Ahead-of-time compilation of a training step for chips that this machine does not have.

The compiler tells whether the step fits, its memory by category, and its collectives.  Arguments
are abstract shapes, so a trillion parameters take no memory here.  Layers are scanned, so compile
time does not grow with depth.
"""

import dataclasses
import re
import time
from typing import Any

import jax
import jax.numpy as jnp

from sparse_dataflow.compile import array_table as describe
from sparse_dataflow.compile import hlo, topologies, traced
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.executor import Executor, TracedExecutor
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.training.step import abstract_state, jitted_train_step
from sparse_dataflow.planner import memory


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes of a compiled training step on one chip, by category.

    Attributes:
      parameters: master weights.
      moments: optimizer moments.
      inputs: layout tables, tokens and scalars.
      gradients: accumulated gradients.
      activations: saved by the forward pass for the backward pass.
      temporaries: all other allocations: weights in the compute dtype, the working set of a layer,
        logits, buffers of collectives.
      program: generated code.
    """

    parameters: int
    moments: int
    inputs: int
    gradients: int
    activations: int
    temporaries: int
    program: int

    @property
    def total(self) -> int:
        """Sum of all categories."""
        return sum(dataclasses.astuple(self))


ALLOCATED = ("argument", "output", "alias", "temp", "generated_code")
"""Sizes in jax's `memory_analysis`; "alias" bytes are shared by arguments and results."""


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled training step.

    Attributes:
      bytes: bytes on a chip, by category.
      allocated: name in ALLOCATED -> bytes, from jax's `memory_analysis`.
      flops: FLOPs per step and chip of products and kernels, including recomputation and loops.
      uncounted: names of kernels without a known FLOP count.
      trace_seconds: wall-clock seconds of tracing and lowering.
      compile_seconds: wall-clock seconds of the compiler.
      cpu_seconds: CPU seconds of both.
      program: compiled JAX object.
    """

    bytes: StepBytes
    allocated: dict[str, int]
    flops: float
    uncounted: tuple[str, ...]
    collectives: tuple[hlo.Collective, ...]
    trace_seconds: float
    compile_seconds: float
    cpu_seconds: float
    program: Any = dataclasses.field(repr=False, compare=False)


class DoesNotFit(Exception):
    """The step needs more memory than the chip has.

    Attributes:
      needed: bytes that the compiler reports, without the arguments; None if not reported.
    """

    def __init__(self, needed: int | None, message: str):
        super().__init__(message)
        self.needed = needed


def abstract_arguments(
    executor: Executor, model: ModelConfig, training: TrainingConfig, changing: bool
) -> tuple[tuple, dict[str, object]]:
    """Returns the arguments of a training step as shapes with the shardings of an executor.

    Args:
      training: batch and sequence.
      changing: whether layouts may change without recompilation.

    Returns:
      ((state without its rest, the rest, batch, learning rate), `Executor.arrays`).
    """
    ids = jax.ShapeDtypeStruct((training.batch, training.sequence), jnp.int32)
    described = abstract_state(model, training).with_layouts(model)
    arrays = executor.arrays(described, model, changing, Batch(ids, ids))
    layouts = jax.tree.map(
        lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=getattr(t, "sharding", None)),
        arrays["layout tables"],
    )
    state = executor.placed_shapes(abstract_state(model, training, executor), model)
    rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=executor.replicated())
    rest = merged(state.rest, layouts)
    arguments = state._replace(rest=()), rest, arrays["batch"], rate
    return arguments, arrays


def compile_step(
    model: ModelConfig,
    training: TrainingConfig,
    executor: Executor,
    device: jax.Device,
    changing: bool = False,
) -> CompiledStep:
    """Compiles the training step of an executor.

    Args:
      training: batch, sequence and micro-batches.
      executor: over the devices of a topology, or `SINGLE_DEVICE`.
      device: one of these devices.
      changing: whether layouts may change without recompilation.

    Raises:
      UserError: the executor does not support the model or the batch.
      DoesNotFit: the step needs more memory than the chip has.
    """
    executor.check(model, training)
    arguments, arrays = abstract_arguments(executor, model, training, changing)
    rounds = executor.trip_counts(model, training.micro_batches)
    trace_start, cpu_start = time.perf_counter(), time.process_time()
    assert isinstance(executor, TracedExecutor)
    step = jitted_train_step(model, training, executor, arguments[0])
    # Without a mesh nothing says for which device the program is; shardings of the arguments do.
    if executor.replicated() is None:
        where = jax.sharding.SingleDeviceSharding(device)
        arguments = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), arguments
        )
    platform = topologies.lowering_platform(device)
    with tracing_for(executor, device):
        trace = step.trace(*arguments)
        lowered = trace.lower(lowering_platforms=(platform,))
    compile_start = time.perf_counter()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        raise _out_of_memory(error) from None
    end, cpu_end = time.perf_counter(), time.process_time()
    # The traced program is counted, not the compiled one: there fusions hide products, and kernels
    # have no FLOPs.
    flops = traced.count(trace.jaxpr, rounds, executor.devices)
    analysis = program.memory_analysis()
    return CompiledStep(
        bytes=_bytes(analysis, trace.jaxpr, arrays, training),
        allocated={name: getattr(analysis, f"{name}_size_in_bytes") for name in ALLOCATED},
        flops=flops.flops,
        uncounted=flops.uncounted,
        collectives=tuple(hlo.collectives(program.as_text(), rounds)),
        trace_seconds=compile_start - trace_start,
        compile_seconds=end - compile_start,
        cpu_seconds=cpu_end - cpu_start,
        program=program,
    )


def tracing_for(executor: Executor, device: jax.Device):
    """Returns a context in which JAX traces for a device, and for the executor's mesh if any."""
    mesh = getattr(executor, "mesh", None)
    if mesh is None:
        return topologies.tracing_for(device)
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def _bytes(analysis, jaxpr, arrays, training) -> StepBytes:
    sizes = {
        category: describe.bytes_per_chip({category: tree}) for category, tree in arrays.items()
    }
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    activations, gradients = traced.saved_bytes(jaxpr, len(jax.tree.leaves(arrays["parameters"])))
    if gradients is None:
        single = memory.gradient_bytes(1, training.state_dtype)
        accumulated = memory.gradient_bytes(training.micro_batches, training.state_dtype)
        gradients = sizes["gradients"] // single * accumulated
    # On-chip arrays are not in the analysis, so it can be smaller than the traced sizes.
    rest = analysis.temp_size_in_bytes + results
    gradients = min(gradients, rest)
    activations = min(activations, rest - gradients)
    rest -= gradients + activations
    return StepBytes(
        parameters=sizes["parameters"],
        moments=sizes["moments"],
        inputs=analysis.argument_size_in_bytes - sizes["parameters"] - sizes["moments"],
        gradients=gradients,
        activations=activations,
        temporaries=rest,
        program=analysis.generated_code_size_in_bytes,
    )


_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _out_of_memory(error: Exception) -> Exception:
    message = str(error)
    if "RESOURCE_EXHAUSTED" not in message and "memory" not in message.lower():
        return error
    number = re.search(r"(?:temporaries \(|[Uu]sed |requires? )([\d.]+)([KMGT]?)", message)
    needed = number and int(float(number[1]) * _SIZES[number[2]])
    return DoesNotFit(needed, message.partition("\n")[0])
