"""A training step through the real compiler of chips that need not be there.

Gives what only a compiler knows: whether the step fits, what it takes of a chip's memory, and what
it sends.  Arguments are shapes, so a trillion parameters take no memory here; layers are scanned,
so they take no longer than four.
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
    """Bytes of a training step on one chip, as the compiler lays them out.

    Attributes:
      parameters: masters.
      moments: the optimizer's.
      inputs: layout tables, tokens and scalars.
      gradients: as they are accumulated.
      activations: what the forward pass keeps for the backward.
      temporaries: all else that the program allocates: copies of weights in the compute dtype, the
        working set of a layer, the logits, what collectives need.
      program: the code itself.
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
        """All of them."""
        return sum(dataclasses.astuple(self))


ALLOCATED = ("argument", "output", "alias", "temp", "generated_code")
"""What `memory_analysis` tells of a chip's memory: results share the bytes of "alias" with
arguments."""


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """One training step, compiled.

    Attributes:
      bytes: on a chip, by category.
      flops: of one chip in a step, of products and kernels; recomputation and loops are counted.
      silent: kernels that say no FLOPs, and are not in `flops`.
      collectives: of one chip in a step.
      trace_seconds: tracing and lowering, of one thread.
      compile_seconds: the compiler, on all cores.
      cpu_seconds: processor time of both.
      allocated: name -> bytes, as jax's `memory_analysis` has them.
      program: jax's own object.
    """

    bytes: StepBytes
    allocated: dict[str, int]
    flops: float
    silent: tuple[str, ...]
    collectives: tuple[hlo.Collective, ...]
    trace_seconds: float
    compile_seconds: float
    cpu_seconds: float
    program: Any = dataclasses.field(repr=False, compare=False)


class DoesNotFit(Exception):
    """The compiler finds no room on the chip.

    Attributes:
      needed: bytes that it says it needs, without the arguments; None where it does not say.
    """

    def __init__(self, needed: int | None, said: str):
        super().__init__(said)
        self.needed = needed


def abstract_arguments(
    executor: Executor, model: ModelConfig, training: TrainingConfig, changing: bool
) -> tuple[tuple, dict | None, dict[str, Any]]:
    """A step's arguments as shapes, where its executor lays them out.

    Args:
      executor: that runs it.
      model: the model.
      training: its batch and sequence.
      changing: whether layouts may change without another program.

    Returns:
      ((state, tokens, learning rate), tables that the program is specialised to or None,
      `Executor.arrays`).
    """
    tables = gpt.layout_tables(gpt.layouts(model))
    shape = (training.batch, training.sequence + 1)
    batch = {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)}
    arrays = executor.arrays(abstract_state(model, training), tables, changing, batch)
    given = jax.tree.map(
        lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=getattr(t, "sharding", None)),
        arrays["layout tables"],
    )
    state = executor.placed_shapes(abstract_state(model, training, executor))
    rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=executor.replicated())
    arguments = state._replace(tables=given), arrays["batch"]["tokens"], rate
    return arguments, None if jax.tree.leaves(given) else tables, arrays


def compile_step(
    model: ModelConfig,
    training: TrainingConfig,
    executor: Executor,
    device: jax.Device,
    changing: bool = False,
) -> CompiledStep:
    """Compiles the training step that `executor` would run.

    Args:
      model: the model.
      training: its batch, sequence and micro-batches.
      executor: over described devices, or `ONE_DEVICE`.
      device: one of them.
      changing: whether layouts may change without another program.

    Raises:
      UserError: the executor refuses the model or the batch.
      DoesNotFit: the compiler finds no room.
    """
    executor.check(model, training)
    arguments, fixed, arrays = abstract_arguments(executor, model, training, changing)
    rounds = executor.rounds(model, training.micro_batches)
    began, worked = time.perf_counter(), time.process_time()
    step = jitted_train_step(model, training, fixed, executor, arguments[0])
    if executor.replicated() is None:
        where = jax.sharding.SingleDeviceSharding(device)
        arguments = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), arguments
        )
    platform = "cuda" if device.platform == "gpu" else device.platform
    with targeted(executor, device):
        followed = step.trace(*arguments)
        lowered = followed.lower(lowering_platforms=(platform,))
    begun = time.perf_counter()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        raise _out_of_memory(error) from None
    ended, cpu = time.perf_counter(), time.process_time() - worked
    counted = traced.count(followed.jaxpr, rounds)
    return CompiledStep(
        _bytes(program, followed.jaxpr, arrays, training),
        {name: getattr(program.memory_analysis(), f"{name}_size_in_bytes") for name in ALLOCATED},
        counted.flops,
        counted.silent,
        tuple(hlo.collectives(program.as_text(), rounds)),
        begun - began,
        ended - begun,
        cpu,
        program,
    )


def targeted(executor: Executor, device: jax.Device):
    """What is traced inside is for the device, and for the executor's mesh where it has one."""
    mesh = getattr(executor, "mesh", None)
    if mesh is None:
        return topologies.targeted(device)
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def _bytes(program, jaxpr, arrays, training) -> StepBytes:
    held = {group: describe.bytes_a_chip({group: tree}) for group, tree in arrays.items()}
    found = program.memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    activations, accumulated = traced.kept_bytes(jaxpr, len(jax.tree.leaves(arrays["parameters"])))
    gradients = accumulated
    if gradients is None:
        one = memory.gradient_bytes(1, training.state_dtype)
        all_ = memory.gradient_bytes(training.micro_batches, training.state_dtype)
        gradients = held["gradients"] // one * all_
    known = held["parameters"] + held["moments"]
    # Small arrays may lie in a chip's own memory, which is not counted.
    rest = found.temp_size_in_bytes + results
    gradients = min(gradients, rest)
    activations = min(activations, rest - gradients)
    rest -= gradients + activations
    return StepBytes(
        held["parameters"],
        held["moments"],
        found.argument_size_in_bytes - known,
        gradients,
        activations,
        rest,
        found.generated_code_size_in_bytes,
    )


_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _out_of_memory(error: Exception) -> Exception:
    said = str(error)
    if "RESOURCE_EXHAUSTED" not in said and "memory" not in said.lower():
        return error
    number = re.search(r"(?:temporaries \(|[Uu]sed |requires? )([\d.]+)([KMGT]?)", said)
    needed = number and int(float(number[1]) * _SIZES[number[2]])
    return DoesNotFit(needed, said.partition("\n")[0])
