"""What a compiled program's text says: its collectives, with the loops around them counted.

Reads the text that XLA prints of an optimised module (https://openxla.org/xla/operation_semantics).
Importing this module loads no jax.
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
    """All collectives of one kind, over groups of one size and of arrays of one size, of a step.

    Attributes:
      kind: one of KINDS.
      group: chips that take part in one of them; for "collective-permute" 2.
      times: how often each chip takes part in a step; loops and the taken branches are counted.
      bytes: of the whole array, once: what is gathered, or what is reduced.
    """

    kind: str
    group: int
    times: float
    bytes: int

    @property
    def moved(self) -> float:
        """Bytes that a chip sends in a step, by the least that such a collective can do: a gather
        or a reduce-scatter (g - 1) / g of the array, an all-reduce both, a permute all of it
        (Thakur, Rabenseifner and Gropp 2005, section 4)."""
        share = 1.0 if self.kind.startswith("collective") else (self.group - 1) / self.group
        return self.times * self.bytes * share * (2 if self.kind == "all-reduce" else 1)


def collectives(text: str, rounds: Mapping[str, float] | None = None) -> list[Collective]:
    """The collectives of a program, most bytes first.

    Args:
      text: of the compiled module.
      rounds: name of a `jax.named_scope` -> how often a step goes through what is in it on one
        chip, for loops whose length the text does not say, and for branches.

    Raises:
      ValueError: a loop around a collective has no length.
    """
    computations = _computations(text)
    times = _times(computations, rounds or {})
    found: dict[tuple, float] = {}
    for name, instructions in computations.items():
        if not times.get(name):
            continue
        for one in instructions.values():
            kind = one.opcode.removesuffix("-start")
            if kind not in KINDS:
                continue
            if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"  # as the TPU's compiler fuses one
            size = _largest(one, instructions)
            group = 2 if kind == "collective-permute" else _group(one.rest)
            if group > 1:
                key = kind, group, size
                found[key] = found.get(key, 0) + times[name]
    result = [Collective(kind, group, n, size) for (kind, group, size), n in found.items()]
    if any(math.isnan(c.times) for c in result):
        raise ValueError("The program has a collective in a loop whose length is not known.")
    return sorted(result, key=lambda c: -c.moved)


def by_kind(found: Iterable[Collective]) -> dict[str, dict[str, float]]:
    """Kind -> {"times": a step, "bytes": of the arrays in all, "moved": that a chip sends}."""
    totals: dict[str, dict[str, float]] = {}
    for c in found:
        one = totals.setdefault(c.kind, {"times": 0.0, "bytes": 0.0, "moved": 0.0})
        one["times"] += c.times
        one["bytes"] += c.times * c.bytes
        one["moved"] += c.moved
    return dict(sorted(totals.items(), key=lambda item: -item[1]["moved"]))


@dataclasses.dataclass(frozen=True)
class _Instruction:
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str  # from the operands on


def _computations(text: str) -> dict[str, dict[str, _Instruction]]:
    found: dict[str, dict[str, _Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None or not line.startswith(" "):
            head = _COMPUTATION.match(line)
            if head:
                current = found.setdefault(head[1], {})
                entry = head[1] if line.startswith("ENTRY") else entry
            elif line.rstrip() == "}":  # other lines at the margin are texts of kernels
                current = None
            continue
        made = _INSTRUCTION.match(line)
        if made is None:
            continue
        whole = f" {made[2]}"
        opcode = _OPCODE.search(whole)
        if opcode is None:
            continue
        inside = _parenthesised(whole, opcode.end())
        operands = tuple(re.findall(r"%([\w.\-]+)", inside))
        rest = whole[opcode.end() :]
        current[made[1]] = _Instruction(whole[: opcode.start()], opcode[1], operands, rest)
    if entry:
        found = {entry: found.pop(entry), **found}
    return found


def _parenthesised(text: str, start: int) -> str:
    depth = 1
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return text[start:at]
    return text[start:]


def _times(computations, rounds) -> dict[str, float]:
    """How often each computation runs in a step; the first is the entry."""
    calls: dict[str, list[tuple[str, float, bool]]] = {}
    for name, instructions in computations.items():
        calls[name] = [
            c
            for one in instructions.values()
            for c in _calls(one, instructions, computations, rounds)
        ]

    callers: dict[str, list[tuple[str, float, bool]]] = {}
    for name, called in calls.items():
        for other, times, absolute in called:
            callers.setdefault(other, []).append((name, times, absolute))
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


def _calls(one: _Instruction, instructions, computations, rounds):
    """(computation, times, whether that is of a step rather than of one run) of what it calls."""
    named = _CALLED.findall(one.rest)
    branches = [n.strip(" %") for text in _BRANCHES.findall(one.rest) for n in text.split(",")]
    scope = re.search(r'op_name="([^"]*)"', one.rest)
    told = None
    if one.opcode in ("while", "conditional") and scope:
        parts = scope[1].split("/")
        told = next((rounds[part] for part in reversed(parts) if part in rounds), None)
    if one.opcode == "while":
        body = _computation_of("body", one)
        length = _trip_count(one, instructions, computations)
        if math.isnan(length) and told is not None:
            return [(body, told, True)]
        return [(body, length, False)]
    if one.opcode == "conditional" and told is not None:
        return [(name, told, True) for name in [*branches, *named] if name in computations]
    return [(name, 1.0, False) for name in [*branches, *named] if name in computations]


def _computation_of(role: str, one: _Instruction) -> str:
    """The computation that an instruction has in a role; "" for none."""
    found = re.search(rf"\b{role}=%?([\w.\-]+)", one.rest)
    return found[1] if found else ""


def _trip_count(one: _Instruction, instructions, computations) -> float:
    """Rounds of a loop, by what XLA notes of it or by its condition, i < a constant; NaN where
    neither says."""
    noted = re.search(r'known_trip_count":?\{"?n"?:"?(\d+)', one.rest)
    if noted:
        return float(noted[1])
    inside = computations.get(_computation_of("condition", one), {})
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


def _largest(one: _Instruction, instructions) -> int:
    """Bytes of all operands or of all results, whichever is more."""
    given = sum(array_bytes(instructions[o].shape) for o in one.operands if o in instructions)
    if one.opcode.startswith("collective"):
        return given
    made = array_bytes(one.shape)
    if one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
        made -= given  # it returns its operands too
    return max(given, made)


def array_bytes(shape: str) -> int:
    """Bytes of a shape as XLA prints it, "bf16[8,128]{1,0}" or a tuple of them; no padding."""
    total = 0
    for named, width, dims in _ARRAY.findall(shape):
        bits = _BITS[named] if named else int(width)
        sizes = [int(d.removeprefix("<=")) for d in dims.split(",") if d]
        total += math.prod(sizes) * bits // 8
    return total


def _group(rest: str) -> int:
    """Chips of one group, in any of the three ways in which XLA writes groups."""
    named = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*(?:\{([^}]*)\})?", rest)
    if named:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
        axes = re.findall(r"'([^']+)'", named[2] or "")
        return math.prod(int(sizes[axis]) for axis in axes)
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]", rest)
    if counted:
        return int(counted[2])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    return len(listed[1].split(",")) if listed else 1
