"""The collectives of a compiled program, read from its HLO text, with loops counted.

Parses the text of an optimised XLA module (https://openxla.org/xla/operation_semantics).
Importing this module does not load jax.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128, "token": 0, "opaque": 0}
_ARRAY = re.compile(rf"\b(?:({'|'.join(_BITS)})|[suf](\d+)\w*)\[([\d,<=]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?<=[\s)}\]])([a-z][\w\-]*)\(")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """The collectives of a step with the same kind, number of chips and array size.

    Attributes:
      kind: one of KINDS.
      group: number of chips in one collective (size of a replica group); 2 for
        "collective-permute".
      times: number of collectives of each chip in a step, with loops and the branches taken.
      bytes: bytes of the whole array that one of them gathers, reduces or sends.
    """

    kind: str
    group: int
    times: float
    bytes: int

    @property
    def moved(self) -> float:
        """Lower bound of the bytes that a chip sends in a step.

        With g chips, an all-gather or reduce-scatter sends (g - 1) / g of the array, an all-reduce
        twice that, a permute the whole array (Thakur, Rabenseifner and Gropp 2005, section 4).
        """
        share = 1.0 if self.kind.startswith("collective") else (self.group - 1) / self.group
        return self.times * self.bytes * share * (2 if self.kind == "all-reduce" else 1)


def collectives(text: str, trip_counts: Mapping[str, float] | None = None) -> list[Collective]:
    """Returns the collectives of a program, most bytes sent first.

    Args:
      text: HLO text of the compiled module.
      trip_counts: name of a `jax.named_scope` -> executions per step and chip of its content, for
        loops whose length is not in the text, and for branches.

    Raises:
      ValueError: the length of a loop around a collective is unknown.
    """
    computations = _computations(text)
    times = _times(computations, trip_counts or {})
    counts: dict[tuple, float] = {}
    for name, instructions in computations.items():
        if not times.get(name):
            continue
        for instruction in instructions.values():
            kind = instruction.opcode.removesuffix("-start")
            if kind not in KINDS:
                continue
            if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"  # The TPU compiler fuses one so.
            size = _array_bytes(instruction, instructions)
            group = 2 if kind == "collective-permute" else _group_size(instruction.rest)
            if group > 1:
                key = kind, group, size
                counts[key] = counts.get(key, 0) + times[name]
    result = [Collective(kind, group, n, size) for (kind, group, size), n in counts.items()]
    if any(math.isnan(c.times) for c in result):
        raise ValueError("The program has a collective in a loop whose length is not known.")
    return sorted(result, key=lambda c: -c.moved)


def by_kind(collectives: Iterable[Collective]) -> dict[str, dict[str, float]]:
    """Returns kind -> totals per step.

    The totals are "times", "bytes" of the arrays and "moved" bytes that a chip sends.
    """
    totals: dict[str, dict[str, float]] = {}
    for c in collectives:
        total = totals.setdefault(c.kind, {"times": 0.0, "bytes": 0.0, "moved": 0.0})
        total["times"] += c.times
        total["bytes"] += c.times * c.bytes
        total["moved"] += c.moved
    return dict(sorted(totals.items(), key=lambda item: -item[1]["moved"]))


@dataclasses.dataclass(frozen=True)
class _Instruction:
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str  # The text from the operands on.


def _computations(text: str) -> dict[str, dict[str, _Instruction]]:
    """Returns computation -> name -> instruction, the entry computation first."""
    computations: dict[str, dict[str, _Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None or not line.startswith(" "):
            head = _COMPUTATION.match(line)
            if head:
                current = computations.setdefault(head[1], {})
                entry = head[1] if line.startswith("ENTRY") else entry
            elif line.rstrip() == "}":  # Other lines at the margin are source text of kernels.
                current = None
            continue
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        body = f" {match[2]}"
        opcode = _OPCODE.search(body)
        if opcode is None:
            continue
        inside = _parenthesised(body, opcode.end())
        operands = tuple(re.findall(r"%([\w.\-]+)", inside))
        rest = body[opcode.end() :]
        current[match[1]] = _Instruction(body[: opcode.start()], opcode[1], operands, rest)
    if entry:
        computations = {entry: computations.pop(entry), **computations}
    return computations


def _parenthesised(text: str, start: int) -> str:
    """Returns the text from `start`, right after a parenthesis, up to the matching one."""
    depth = 1
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return text[start:at]
    return text[start:]


def _times(computations, trip_counts) -> dict[str, float]:
    """Returns how often each computation runs in a step; the first one is the entry."""
    callers: dict[str, list[tuple[str, float, bool]]] = {}
    for name, instructions in computations.items():
        for instruction in instructions.values():
            calls = _calls(instruction, instructions, computations, trip_counts)
            for callee, times, absolute in calls:
                callers.setdefault(callee, []).append((name, times, absolute))
    entry = next(iter(computations), "")

    @functools.cache
    def times_of(name):
        if name == entry:
            return 1.0
        total = 0.0
        for caller, times, absolute in callers.get(name, ()):
            around = times_of(caller)
            if around:
                total += times if absolute else times * around
        return total

    return {name: times_of(name) for name in computations}


def _calls(instruction: _Instruction, instructions, computations, trip_counts):
    """Returns the (computation, times, absolute) that an instruction calls.

    `times` counts executions per step if `absolute`, else per execution of the instruction.
    """
    called = _CALLED.findall(instruction.rest)
    branches = [
        name.strip(" %")
        for names in _BRANCHES.findall(instruction.rest)
        for name in names.split(",")
    ]
    scope = re.search(r'op_name="([^"]*)"', instruction.rest)
    trips = None
    if instruction.opcode in ("while", "conditional") and scope:
        scopes = reversed(scope[1].split("/"))
        trips = next((trip_counts[name] for name in scopes if name in trip_counts), None)
    if instruction.opcode == "while":
        body = _called_as("body", instruction)
        length = _loop_length(instruction, computations)
        if math.isnan(length) and trips is not None:
            return [(body, trips, True)]
        return [(body, length, False)]
    names = [name for name in [*branches, *called] if name in computations]
    if instruction.opcode == "conditional" and trips is not None:
        return [(name, trips, True) for name in names]
    return [(name, 1.0, False) for name in names]


def _called_as(role: str, instruction: _Instruction) -> str:
    """Returns the computation that an instruction calls in a role, or ""."""
    match = re.search(rf"\b{role}=%?([\w.\-]+)", instruction.rest)
    return match[1] if match else ""


def _loop_length(loop: _Instruction, computations) -> float:
    """Returns the iterations of a loop, or NaN.

    Read from XLA's annotation, or from a condition of the form i < constant.
    """
    annotation = re.search(r'known_trip_count":?\{"?n"?:"?(\d+)', loop.rest)
    if annotation:
        return float(annotation[1])
    inside = computations.get(_called_as("condition", loop), {})
    test = next((i for i in inside.values() if i.opcode == "compare"), None)
    if test is None:
        # The comparison may be fused.
        fused = [n for i in inside.values() for n in _CALLED.findall(i.rest)]
        test = next(
            (i for n in fused for i in computations.get(n, {}).values() if i.opcode == "compare"),
            None,
        )
    bounds = [
        i for i in inside.values() if i.opcode == "constant" and i.shape.strip().startswith("s32[]")
    ]
    if test is None or "direction=LT" not in test.rest or len(bounds) != 1:
        return math.nan
    return float(bounds[0].rest.partition(")")[0])


def _array_bytes(collective: _Instruction, instructions) -> int:
    """Returns the bytes of all operands or of all results, whichever is more."""
    operands = [instructions[o] for o in collective.operands if o in instructions]
    operand_bytes = sum(shape_bytes(operand.shape) for operand in operands)
    if collective.opcode.startswith("collective"):
        return operand_bytes
    result_bytes = shape_bytes(collective.shape)
    if collective.opcode.endswith("-start") and collective.opcode != "all-reduce-start":
        result_bytes -= operand_bytes  # Its results include the operands.
    return max(operand_bytes, result_bytes)


def shape_bytes(shape: str) -> int:
    """Returns the bytes of an HLO shape, "bf16[8,128]{1,0}" or a tuple of them; no padding."""
    total = 0
    for dtype, width, dims in _ARRAY.findall(shape):
        bits = _BITS[dtype] if dtype else int(width)
        sizes = [int(d.removeprefix("<=")) for d in dims.split(",") if d]
        total += math.prod(sizes) * bits // 8
    return total


def _group_size(rest: str) -> int:
    """Returns the number of chips in a replica group, written as mesh axes, iota or list."""
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*(?:\{([^}]*)\})?", rest)
    if mesh:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        axes = re.findall(r"'([^']+)'", mesh[2] or "")
        return math.prod(int(sizes[axis]) for axis in axes)
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", rest)
    if iota:
        return int(iota[2])
    members = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    return len(members[1].split(",")) if members else 1
