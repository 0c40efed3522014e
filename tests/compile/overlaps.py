"""Collectives that may run while products do, from the scheduled text of a compiled program.

XLA splits an asynchronous collective into a start and a done instruction; what it schedules between
them runs at the same time.  The TPU compiler has fusions instead, "async-collective-start" and
"-done".  The text says what may overlap, not how much time that saves.
"""

import dataclasses

from sparse_dataflow.compile import hlo

_START, _DONE, _STEP = "async-collective-start", "async-collective-done", "async_collective_fusion"
_KERNELS = ("__cublas", "__cudnn", "__gpu$xla.gpu.triton", "mosaic", "tpu_custom_call")


@dataclasses.dataclass(frozen=True)
class ScheduledCollective:
    """A collective instruction.

    Attributes:
      kind: one of `hlo.KINDS`.
      group: chips per collective.
      bytes: size of the whole gathered or reduced array.
      times: executions per step.
      computation: name of the computation that has it, such as the body of a loop.
      products: products and kernels of libraries or Pallas between its start and its done; 0 for a
        synchronous collective.
    """

    kind: str
    group: int
    bytes: int
    times: float
    computation: str
    products: int = 0


def scheduled_collectives(text: str) -> list[ScheduledCollective]:
    """Returns the collectives over several chips, in order of the schedule of each computation.

    Args:
      text: HLO text of a compiled, and so scheduled, module.
    """
    computations = hlo.read_computations(text)
    times = hlo.executions(computations, {})
    result = []
    for name in hlo.scheduled_computations(computations):
        around = computations[name]
        running: dict[str, ScheduledCollective] = {}
        for label, instruction in around.items():
            if _multiplies(instruction, computations):
                running = {
                    start: dataclasses.replace(collective, products=collective.products + 1)
                    for start, collective in running.items()
                }
            starts = instruction.opcode.endswith("-start") or label.startswith(_START)
            if instruction.opcode.endswith("-done") or label.startswith(_DONE):
                result += [running.pop(s) for s in _starts(instruction, around) if s in running]
            elif _STEP not in instruction.rest:
                for kind, group, size in _collectives(instruction, name, around, computations):
                    if group > 1:
                        started = ScheduledCollective(kind, group, size, times[name], name)
                        running |= {label: started} if starts else {}
                        result += [] if starts else [started]
    return result


def _collectives(instruction, computation, around, computations):
    """Returns (kind, group, bytes) of an instruction, or of the collectives that it fuses."""
    if instruction.opcode != "fusion":
        key = hlo.collective_of(instruction, computation, around)
        return [] if key is None else [key]
    keys = [
        hlo.collective_of(inner, called, computations[called])
        for called in _called(instruction, computations)
        for inner in computations[called].values()
    ]
    return [key for key in keys if key is not None]


def _multiplies(instruction, computations):
    if instruction.opcode in ("dot", "convolution"):
        return True
    if instruction.opcode == "custom-call":
        target = instruction.rest.partition('custom_call_target="')[2]
        return target.startswith(_KERNELS)
    return instruction.opcode == "fusion" and any(
        _multiplies(inner, computations)
        for called in _called(instruction, computations)
        for inner in computations[called].values()
    )


def _called(instruction, computations):
    return [name for name in hlo.CALLED.findall(instruction.rest) if name in computations]


def _starts(done, around):
    """Returns the labels of the instructions that a done instruction may end.

    On a TPU, fusions that continue the collective are between them.
    """
    labels = [name for name in done.operands if name in around]
    for label in labels:
        instruction = around[label]
        if instruction.opcode == "get-tuple-element" or _STEP in instruction.rest:
            labels += [n for n in instruction.operands if n in around and n not in labels]
    return list(dict.fromkeys(labels))
