"""Collectives and memory traffic of a compiled program, from its HLO text.

The text is that of an optimised XLA module (https://openxla.org/xla/operation_semantics).
Importing this module loads no jax.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

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
# A layout with a memory space, S(n), is of an array on the chip.
_ON_CHIP = re.compile(r"\b\w+\[[\d,<=]*\]\{[^}]*S\(\d+\)[^}]*\}")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?<=[\s)}\]])([a-z][\w\-]*)\(")
CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of a step of one kind, group size and array size.

    Attributes:
      kind: one of KINDS.
      group: chips per collective; 2 for "collective-permute".
      times: executions per step on each chip, including loops and taken branches.
      bytes: size of the whole gathered or reduced array.
    """

    kind: str
    group: int
    times: float
    bytes: int

    @property
    def moved(self) -> float:
        """Smallest number of bytes that a chip sends per step (Thakur, Rabenseifner and Gropp
        2005, section 4): (g - 1) / g of the array in an all-gather or reduce-scatter, twice that in
        an all-reduce, and the whole array in a permute."""
        share = 1.0 if self.kind.startswith("collective") else (self.group - 1) / self.group
        return self.times * self.bytes * share * (2 if self.kind == "all-reduce" else 1)


def collectives(text: str, rounds: Mapping[str, float] | None = None) -> list[Collective]:
    """Returns the collectives of a program, largest traffic first.

    Args:
      text: HLO text of the compiled module.
      rounds: name of a `jax.named_scope` -> executions of its content per step and chip, for
        branches, and for loops without a known trip count.

    Raises:
      ValueError: a collective is in a loop without a known trip count.
    """
    computations = read_computations(text)
    times = executions(computations, rounds or {})
    totals: dict[tuple, float] = {}
    continuing = _continuing(computations)
    for name, instructions in computations.items():
        if not times.get(name) or name in continuing:
            continue
        for instruction in instructions.values():
            key = collective_of(instruction, name, instructions)
            # A group of one chip sends nothing.
            if key is not None and key[1] > 1:
                totals[key] = totals.get(key, 0) + times[name]
    result = [Collective(kind, group, n, size) for (kind, group, size), n in totals.items()]
    if any(math.isnan(c.times) for c in result):
        raise ValueError("The program has a collective in a loop without a known trip count.")
    return sorted(result, key=lambda c: -c.moved)


def collective_of(instruction, computation, around) -> tuple[str, int, int] | None:
    """Returns (kind, chips per group, bytes) of an instruction; None if it is no collective.

    Args:
      around: the instructions of that computation.
    """
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # The TPU compiler fuses it this way.
    group = 2 if kind == "collective-permute" else _group(instruction.rest)
    return kind, group, _largest(instruction, around)


def _continuing(computations) -> set[str]:
    """Returns computations whose collective another fusion has started.

    The TPU compiler splits an asynchronous collective over fusions: a first and a last one, and
    between them products that continue it ("async_collective_fusion").  Each has the instruction.
    """
    return {
        called
        for instructions in computations.values()
        for name, instruction in instructions.items()
        for called in CALLED.findall(instruction.rest)
        if called.startswith("async_collective_fusion") or name.startswith("async-collective-done")
    }


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of a program.

    Attributes:
      name: of its instruction.
      target: custom-call target; "triton:" or "tpu:" and its name for a Pallas kernel in Triton or
        Mosaic; "gemm_fusion" or "convolution" for a product that XLA compiles itself; else the
        opcode.
      times: executions per run of the program, including loops.
      bytes: read and written by one execution, if each operand is read once.  Operands that are
        sliced or gathered count with what is taken, buffers that are updated in place with the
        update; rows that are added to are read, too.  Arrays in a TPU's vector memory count
        nothing; the copies that bring them there do.
      cycles: the TPU compiler's estimate of one execution; 0 where it gives none.
      scope: path of `jax.named_scope`s and primitives that it comes from; "" if unknown.
    """

    name: str
    target: str
    times: float
    bytes: int
    scope: str = ""
    cycles: int = 0

    @property
    def multiplies(self) -> bool:
        """Whether it is a product: of XLA, of a vendor's library, or a Pallas kernel."""
        return self.target.startswith(_PRODUCTS)


_PRODUCTS = (
    "gemm_fusion",
    "convolution",
    "__cublas",
    "triton:block_sparse",
    "mosaic",
    "tpu:block_sparse",
    "tpu:grouped",
)
_TRITON, _MOSAIC = "__gpu$xla.gpu.triton", "tpu_custom_call"
TRANSFERS = ("copy-start", "slice-start")
"""Opcodes of copies to and from a TPU's vector memory, which run beside its kernels."""

_NO_KERNELS = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "copy-done",
    "fusion-done",
    "slice-done",
    "custom-call-start",
    "custom-call-update",
    "after-all",
    "opt-barrier",
)
_NO_WORK = re.compile('custom_call_target="(AllocateBuffer|ConcatBitcast)"')
# Layouts of TPUs have tiles, such as T(8,128).
_TILED = re.compile(r":T\(")
# The last result of a library's call is its workspace.
_WORKSPACE = re.compile(r", s8\[\d+\]\{0\}\)")


def kernels(text: str, counted: bool = True) -> list[Kernel]:
    """Returns the kernels of a compiled GPU or TPU program.

    Args:
      counted: whether `Kernel.times` is needed.

    Raises:
      ValueError: a kernel whose times are needed is in a loop without a known trip count.
    """
    computations = read_computations(text)
    times = executions(computations, {})
    result = [
        Kernel(
            name,
            _target(name, kernel, computations),
            times[of],
            _moved(kernel, computations[of], computations),
            _scope(name, computations[of], computations),
            _cycles(kernel),
        )
        for of in scheduled_computations(computations)
        for name, kernel in computations[of].items()
        if kernel.opcode not in _NO_KERNELS and not _NO_WORK.search(kernel.rest)
    ]
    if counted and any(math.isnan(kernel.times) for kernel in result):
        raise ValueError("The program has a kernel in a loop without a known trip count.")
    return result


def scheduled_computations(computations) -> list[str]:
    """Returns the entry and the bodies of loops and branches, which have a schedule."""
    # The list grows while it is read: bodies of loops have loops of their own.
    scheduled = [next(iter(computations))]
    for name in scheduled:
        loops = [i for i in computations[name].values() if i.opcode in ("while", "conditional")]
        scheduled += [c for i in loops for c in CALLED.findall(i.rest) if c in computations]
    return scheduled


def _scope(name, around, computations):
    """Returns the path of an instruction.

    Of a fusion without one, the path of its last instruction with one; of a copy to or from a TPU's
    vector memory without one, that of the kernel that reads the copy or wrote the array.
    """
    kernel = around[name]
    called = [c for c in CALLED.findall(kernel.rest) if c in computations]
    inside = (i for c in called for i in reversed(computations[c].values()))
    for instruction in (kernel, *inside):
        if path := re.search(r'op_name="([^"]*)"', instruction.rest):
            return path[1]
    if kernel.opcode not in TRANSFERS:
        return ""
    moved = {name}
    for other, i in around.items():
        if not moved.isdisjoint(i.operands):
            if _renames(i):
                moved.add(other)
            elif _computes(i) and (path := _scope(other, around, computations)):
                return path
    [source, *_] = kernel.operands
    while source in around and _renames(around[source]):
        source = around[source].operands[0]
    computed = source in around and _computes(around[source])
    return _scope(source, around, computations) if computed else ""


def _renames(instruction):
    return instruction.opcode in ("bitcast", "copy-done", "slice-done") or (
        "ConcatBitcast" in instruction.rest
    )


def _computes(instruction):
    return instruction.opcode not in (*_NO_KERNELS, *TRANSFERS)


def _cycles(kernel):
    estimate = re.search(r'"estimated_cycles":"(\d+)"', kernel.rest)
    return int(estimate[1]) if estimate else 0


def _target(name, kernel, computations):
    called = [c for c in CALLED.findall(kernel.rest) if c in computations]
    inside = [i for c in called for i in computations[c].values()]
    for call in (kernel, *inside):
        # Of the kernel, or of a library's product that reads or writes slices.
        if target := re.search(r'custom_call_target="([^"]*)"', call.rest):
            if target[1] == _MOSAIC:
                return f"tpu:{name.partition('.')[0]}"
            kernel_name = re.search(r', name = "(\w+)"', call.rest)
            return f"triton:{kernel_name[1]}" if target[1] == _TRITON and kernel_name else target[1]
    if any(i.opcode == "convolution" for i in (kernel, *inside)):
        return "convolution"
    return "gemm_fusion" if name.startswith("gemm_fusion") else kernel.opcode


def _moved(kernel, around, computations):
    """Returns the bytes that an instruction of a computation reads and writes."""
    called = next((c for c in CALLED.findall(kernel.rest) if c in computations), None)
    if kernel.opcode.startswith("fusion") and called:
        inside = computations[called]
        nested = [i for i in inside.values() if i.opcode == "fusion"]
        if nested and not _TILED.search(kernel.shape):  # A TPU's are parts of one kernel.
            return sum(_moved(i, inside, computations) for i in nested)
        operands = [around[n].shape if n in around else "" for n in kernel.operands]
        parameters = _parameters(inside)
        reads = sum(
            _read(name, inside, computations)
            for name, shape in zip(parameters, operands, strict=True)
            if not shape or _stored_bytes(shape)
        )
        return reads + _written(next(reversed(inside)), inside)
    operands = [around[n].shape for n in kernel.operands if n in around]
    # In place: the update is read and written, the rest of the buffer stays.
    if kernel.opcode == "dynamic-update-slice":
        return 2 * _stored_bytes(operands[1])
    if kernel.opcode == "custom-call-done":
        return 2 * _stored_bytes(kernel.shape)  # Rows that a TPU's sparse cores gather.
    if kernel.opcode == "copy-start":
        return _stored_bytes(kernel.shape)  # Of the copy and of what is copied.
    if kernel.opcode == "slice-start":
        # The shape is ((operand), slice, ...). The slice is read, and written to main memory unless
        # it stays on the chip.
        part = kernel.shape.partition("),")[2]
        return array_bytes(part.partition("}")[0]) + _stored_bytes(part)
    return _stored_bytes(_WORKSPACE.sub(")", kernel.shape)) + sum(map(_stored_bytes, operands))


def _parameters(inside):
    """Returns the names of a computation's parameters, by their number."""
    numbers = {
        name: int(i.rest.partition(")")[0]) for name, i in inside.items() if i.opcode == "parameter"
    }
    return sorted(numbers, key=lambda name: numbers[name])


def _stored_bytes(shape):
    """Returns the bytes of the arrays of a shape that are in the chip's main memory."""
    return array_bytes(_ON_CHIP.sub("", shape))


def _read(name, inside, computations):
    """Returns the bytes of a fused computation's value that its users read."""
    users = [(user, i) for user, i in inside.items() if name in i.operands]
    whole = array_bytes(inside[name].shape)
    results = _results(next(reversed(inside)), inside)
    total = 0
    for user_name, user in users:
        first = user.operands[0] == name
        if first and user.opcode in ("dynamic-slice", "gather", "slice"):
            total += array_bytes(user.shape)
        elif user.opcode == "bitcast":
            total += _read(user_name, inside, computations)
        elif user.opcode == "fusion":
            total += _read_by_fusion(user_name, name, inside, computations)
        elif first and user.opcode == "scatter":
            total += array_bytes(inside[user.operands[2]].shape)
        # A buffer that is updated in place is not read.
        elif not (first and user.opcode == "dynamic-update-slice" and user in results):
            total += whole
    # Several users within a fusion read an operand once.
    return min(whole, total)


def _read_by_fusion(name, operand, inside, computations):
    """Returns the bytes of an operand that a fusion within a fused computation reads.

    If it returns at least as much, it moves data, of which its users may read a part.
    """
    fusion = inside[name]
    [called] = [c for c in CALLED.findall(fusion.rest) if c in computations]
    names = zip(fusion.operands, _parameters(computations[called]), strict=True)
    reads = sum(
        _read(parameter, computations[called], computations)
        for each, parameter in names
        if each == operand
    )
    moves = array_bytes(fusion.shape) >= array_bytes(inside[operand].shape)
    return min(reads, _read(name, inside, computations)) if moves else reads


def _results(name, inside):
    """Returns the instructions whose values a fused computation returns, without bitcasts."""
    result = inside[name]
    if result.opcode not in ("tuple", "bitcast"):
        return [result]
    return [each for operand in result.operands for each in _results(operand, inside)]


def _written(name, inside):
    """Returns the bytes that a fused computation writes for a result."""
    result = inside[name]
    if result.opcode == "tuple":
        return sum(_written(operand, inside) for operand in result.operands)
    if result.opcode == "get-tuple-element" and result.shape.strip().startswith("s8["):
        return 0  # The workspace of a library.
    if result.opcode == "bitcast":
        return _written(result.operands[0], inside)
    if not _stored_bytes(result.shape):
        return 0
    if result.opcode == "dynamic-update-slice":
        return array_bytes(inside[result.operands[1]].shape)
    if result.opcode == "scatter":
        return array_bytes(inside[result.operands[2]].shape)
    return array_bytes(result.shape)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation."""

    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str  # the line from the operands on


def read_computations(text: str) -> dict[str, dict[str, Instruction]]:
    """Returns computation -> name -> instruction, in the order of the text; the entry is first."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None or not line.startswith(" "):
            head = _COMPUTATION.match(line)
            if head:
                current = computations.setdefault(head[1], {})
                entry = head[1] if line.startswith("ENTRY") else entry
            elif line.rstrip() == "}":  # Other unindented lines are code of kernels.
                current = None
            continue
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        whole = f" {match[2]}"
        opcode = _OPCODE.search(whole)
        if opcode is None:
            continue
        inside = _parenthesised(whole, opcode.end())
        operands = tuple(re.findall(r"%([\w.\-]+)", inside))
        rest = whole[opcode.end() :]
        current[match[1]] = Instruction(whole[: opcode.start()], opcode[1], operands, rest)
    # The entry is last in the text, after what it calls.
    if entry:
        computations = {entry: computations.pop(entry), **computations}
    return computations


def _parenthesised(text: str, start: int) -> str:
    depth = 1
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return text[start:at]
    return text[start:]


def executions(computations, rounds) -> dict[str, float]:
    """Returns computation -> executions per step; the first computation is the entry."""
    callers: dict[str, list[tuple[str, float, bool]]] = {}
    for name, instructions in computations.items():
        for instruction in instructions.values():
            calls = _calls(instruction, instructions, computations, rounds)
            for called, times, per_step in calls:
                callers.setdefault(called, []).append((name, times, per_step))
    entry = next(iter(computations), "")

    @functools.cache
    def times_of(name):
        if name == entry:
            return 1.0
        # Calls of HLO have no cycles, so this recursion ends.
        total = 0.0
        for caller, times, per_step in callers.get(name, ()):
            around = times_of(caller)
            if around:
                # Rounds of a scope are already per step, whatever is around it.  Callers that never
                # run count nothing, though, so that a dead branch adds no traffic.
                total += times if per_step else times * around
        return total

    return {name: times_of(name) for name in computations}


def _calls(caller: Instruction, instructions, computations, rounds):
    """Returns (computation, times, per_step) of each computation that an instruction calls.

    `times` is per step if `per_step`, else per execution of the instruction.
    """
    branches = [n.strip(" %") for text in _BRANCHES.findall(caller.rest) for n in text.split(",")]
    callees = [n for n in (*branches, *CALLED.findall(caller.rest)) if n in computations]
    scope = re.search(r'op_name="([^"]*)"', caller.rest)
    per_step = None
    if caller.opcode in ("while", "conditional") and scope:
        # The innermost scope that is known.
        names = reversed(scope[1].split("/"))
        per_step = next((rounds[name] for name in names if name in rounds), None)
    if caller.opcode == "while":
        # Only the body: a condition compares numbers.
        body = _computation_of("body", caller)
        length = _trip_count(caller, instructions, computations)
        if math.isnan(length) and per_step is not None:
            return [(body, per_step, True)]
        return [(body, length, False)]
    if caller.opcode == "conditional" and per_step is not None:
        return [(name, per_step, True) for name in callees]
    return [(name, 1.0, False) for name in callees]


def _computation_of(role: str, instruction: Instruction) -> str:
    """Returns the computation that an instruction names for a role; "" for none."""
    match = re.search(rf"\b{role}=%?([\w.\-]+)", instruction.rest)
    return match[1] if match else ""


def _trip_count(loop: Instruction, instructions, computations) -> float:
    """Returns the trip count of a loop, from XLA's annotation or a condition i < constant.

    NaN if neither gives it.
    """
    annotation = re.search(r'known_trip_count":?\{"?n"?:"?(\d+)', loop.rest)
    if annotation:
        return float(annotation[1])
    inside = computations.get(_computation_of("condition", loop), {})
    # The comparison may be fused.
    called = (name for i in inside.values() for name in CALLED.findall(i.rest))
    fused = (i for name in called for i in computations.get(name, {}).values())
    test = next((i for i in (*inside.values(), *fused) if i.opcode == "compare"), None)
    bounds = [
        i for i in inside.values() if i.opcode == "constant" and i.shape.strip().startswith("s32[]")
    ]
    if test is None or "direction=LT" not in test.rest or len(bounds) != 1:
        return math.nan
    return float(bounds[0].rest.partition(")")[0])


def _largest(collective: Instruction, instructions) -> int:
    """Returns the bytes of all operands or of all results, whichever is larger."""
    names = [name for name in collective.operands if name in instructions]
    operands = sum(array_bytes(instructions[name].shape) for name in names)
    # A permute or broadcast sends its operands.
    if collective.opcode.startswith("collective"):
        return operands
    results = array_bytes(collective.shape)
    if collective.opcode.endswith("-start") and collective.opcode != "all-reduce-start":
        results -= operands  # A start op also returns its operands.
    return max(operands, results)


def array_bytes(shape: str) -> int:
    """Returns the bytes of an HLO shape, "bf16[8,128]{1,0}" or a tuple, without padding."""
    total = 0
    for named, width, dims in _ARRAY.findall(shape):
        bits = _BITS[named] if named else int(width)
        # A dynamic size is written as its bound, such as <=8.
        sizes = [int(d.removeprefix("<=")) for d in dims.split(",") if d]
        total += math.prod(sizes) * bits // 8
    return total


def _group(rest: str) -> int:
    """Returns the chips per group, in any of XLA's three notations of replica groups."""
    # mesh['data'=2,'tensor'=4] {'tensor'}: axes by name.
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*(?:\{([^}]*)\})?", rest)
    if mesh:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        axes = re.findall(r"'([^']+)'", mesh[2] or "")
        return math.prod(int(sizes[axis]) for axis in axes)
    # [2,4]<=[8]: two groups of four.
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", rest)
    if iota:
        return int(iota[2])
    # {{0,1},{2,3}}: each member by its number.
    members = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    return len(members[1].split(",")) if members else 1
