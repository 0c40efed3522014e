"""Compiles a training step ahead of time, with the real compiler of a chip that is not attached.

The compiler tells whether the step fits into the chip's memory, how much memory it uses for what,
and what it communicates.  Arguments are shapes, so a trillion parameters need no memory here;
layers are scanned, so compile time does not grow with their number.
"""

import dataclasses
import re
import time
from typing import Any

import jax
import jax.numpy as jnp

from sparse_dataflow.aot import hlo, topologies, traced
from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.models import gpt
from sparse_dataflow.parallel import describe
from sparse_dataflow.parallel.executor import Executor
from sparse_dataflow.planning import memory
from sparse_dataflow.training.step import abstract_state, jitted_train_step


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes that the compiler allocates on one chip for a training step.

    Attributes:
      parameters: master parameters.
      moments: Adam moments.
      inputs: layout tables, tokens and scalars.
      gradients: accumulated gradients.
      activations: saved by the forward pass for the backward pass.
      temporaries: everything else: weights in the compute dtype, the working set of a layer, the
        logits, buffers of collectives.
      program: machine code.
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


ALLOCATIONS = ("argument", "output", "alias", "temp", "generated_code")
"""Categories of jax's `memory_analysis`; "alias" are bytes that outputs share with arguments."""


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled training step.

    Attributes:
      bytes: bytes on one chip, by category.
      allocations: category of ALLOCATIONS -> bytes, from jax's `memory_analysis`.
      flops: FLOPs of one chip in a step, of matrix products and kernels, with recomputation and
        loops.
      kernels_without_flops: names of kernels without a FLOP count, which `flops` leaves out.
      collectives: collectives of one chip in a step.
      trace_seconds: wall time of tracing and lowering, on one core.
      compile_seconds: wall time of the compiler, on all cores.
      cpu_seconds: processor time of both.
      program: jax's compiled object.
    """

    bytes: StepBytes
    allocations: dict[str, int]
    flops: float
    kernels_without_flops: tuple[str, ...]
    collectives: tuple[hlo.Collective, ...]
    trace_seconds: float
    compile_seconds: float
    cpu_seconds: float
    program: Any = dataclasses.field(repr=False, compare=False)


class DoesNotFit(Exception):
    """The step does not fit into the chip's memory.

    Attributes:
      needed: bytes needed without the arguments; None if the compiler does not say.
    """

    def __init__(self, needed: int | None, message: str):
        super().__init__(message)
        self.needed = needed


def abstract_arguments(
    executor: Executor, model: ModelConfig, training: TrainingConfig, changing: bool
) -> tuple[tuple, dict | None, dict[str, Any]]:
    """Returns the arguments of a step as shapes with the executor's shardings.

    Args:
      executor: runs the step.
      model: config of the model.
      training: batch and sequence.
      changing: whether layouts may change without recompiling.

    Returns:
      ((state, tokens, learning rate), layout tables that the program is specialised to or None,
      `Executor.arrays`).
    """
    tables = gpt.layout_tables(gpt.layouts(model))
    shape = (training.batch, training.sequence + 1)
    batch = {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)}
    arrays = executor.arrays(abstract_state(model, training), tables, changing, batch)
    runtime_tables = jax.tree.map(
        lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=getattr(t, "sharding", None)),
        arrays["layout tables"],
    )
    state = executor.placed_shapes(abstract_state(model, training, executor))
    rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=executor.replicated())
    arguments = state._replace(tables=runtime_tables), arrays["batch"]["tokens"], rate
    return arguments, None if jax.tree.leaves(runtime_tables) else tables, arrays


def compile_step(
    model: ModelConfig,
    training: TrainingConfig,
    executor: Executor,
    device: jax.Device,
    changing: bool = False,
) -> CompiledStep:
    """Compiles the training step that `executor` would run.

    Args:
      model: config of the model.
      training: batch, sequence and micro-batches.
      executor: over described devices, or `ONE_DEVICE`.
      device: one of the described devices.
      changing: whether layouts may change without recompiling.

    Raises:
      UserError: the executor refuses the model or the batch.
      DoesNotFit: the step does not fit into the chip's memory.
    """
    executor.check(model, training)
    arguments, fixed, arrays = abstract_arguments(executor, model, training, changing)
    trip_counts = executor.rounds(model, training.micro_batches)
    start, cpu_start = time.perf_counter(), time.process_time()
    step = jitted_train_step(model, training, fixed, executor, arguments[0])
    if executor.replicated() is None:
        sharding = jax.sharding.SingleDeviceSharding(device)
        arguments = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments
        )
    platform = "cuda" if device.platform == "gpu" else device.platform
    with tracing_for(executor, device):
        trace = step.trace(*arguments)
        lowered = trace.lower(lowering_platforms=(platform,))
    compile_start = time.perf_counter()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        raise _out_of_memory(error) from None
    end, cpu_seconds = time.perf_counter(), time.process_time() - cpu_start
    analysis = program.memory_analysis()
    count = traced.count_flops(trace.jaxpr, trip_counts)
    return CompiledStep(
        _step_bytes(analysis, trace.jaxpr, arrays, training),
        {name: getattr(analysis, f"{name}_size_in_bytes") for name in ALLOCATIONS},
        count.flops,
        count.kernels_without_flops,
        tuple(hlo.collectives(program.as_text(), trip_counts)),
        compile_start - start,
        end - compile_start,
        cpu_seconds,
        program,
    )


def tracing_for(executor: Executor, device: jax.Device):
    """Returns a context in which code is traced for the executor's mesh, or else for the device."""
    mesh = getattr(executor, "mesh", None)
    if mesh is None:
        return topologies.tracing_for(device)
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def _step_bytes(analysis, jaxpr, arrays, training) -> StepBytes:
    """Splits the compiler's temporary memory into gradients, activations and the rest."""
    array_bytes = {group: describe.bytes_a_chip({group: tree}) for group, tree in arrays.items()}
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    gradient_leaves = len(jax.tree.leaves(arrays["parameters"]))
    activations, gradients = traced.saved_bytes(jaxpr, gradient_leaves)
    if gradients is None:
        single = memory.gradient_bytes(1, training.state_dtype)
        accumulated = memory.gradient_bytes(training.micro_batches, training.state_dtype)
        gradients = array_bytes["gradients"] // single * accumulated
    # Small arrays may be in on-chip memory, which the compiler does not count.
    rest = analysis.temp_size_in_bytes + results
    gradients = min(gradients, rest)
    activations = min(activations, rest - gradients)
    rest -= gradients + activations
    return StepBytes(
        array_bytes["parameters"],
        array_bytes["moments"],
        analysis.argument_size_in_bytes - array_bytes["parameters"] - array_bytes["moments"],
        gradients,
        activations,
        rest,
        analysis.generated_code_size_in_bytes,
    )


_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _out_of_memory(error: Exception) -> Exception:
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text and "memory" not in text.lower():
        return error
    number = re.search(r"(?:temporaries \(|[Uu]sed |requires? )([\d.]+)([KMGT]?)", text)
    needed = number and int(float(number[1]) * _SIZES[number[2]])
    return DoesNotFit(needed, text.partition("\n")[0])
