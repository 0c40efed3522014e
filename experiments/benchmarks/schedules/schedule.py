"""Estimated cycles of a TPU kernel, from the final schedule that libtpu writes when it compiles.

A TPU core executes one VLIW bundle per cycle, so the executed bundles are the cycles of a kernel,
except for stalls.  Stalls for busy matrix units are added.  This module reads the text of a
`*final_bundles.txt` dump and executes its scalar instructions: loop counters, branches, and loads
from index tables.  So trip counts are exact, also where they depend on a layout.  Vector
instructions are counted, not executed.

The result is an estimate.  Other stalls (waits for HBM, memory conflicts) are not counted, so
absolute times are optimistic by 5% to 20%; ratios between kernels are good.  HBM traffic is a
separate bound: `Schedule.hbm_bytes`.

`DUMP_FLAGS` makes libtpu write the text.  It must be in LIBTPU_INIT_ARGS before jax is imported:

    export LIBTPU_INIT_ARGS="$(python -m experiments.benchmarks.schedules.schedule --flags DIR)"
    python compile_it.py
    python -m experiments.benchmarks.schedules.schedule DIR

Importing this module loads no jax.
"""

import argparse
import collections
import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from .bundles import (
    BASE,
    MASK,
    ScheduleError,
    allocation,
    expression,
    names,
    parse,
    signed,
)

DUMP_FLAGS = "--xla_jf_dump_to={folder} --xla_jf_dump_llo_pass_label_regex=final_bundles"
"""Value of LIBTPU_INIT_ARGS for dumps into `folder`."""

GRANULE = 32
"""Bytes of a DMA granule."""

DELAY_SLOTS = 4
"""Bundles after a branch that execute whether or not it is taken."""


PRODUCT_CYCLES = {"v4": 16, "v5e": 16, "v5p": 16, "v6e": 8}
"""Chip -> cycles of a vmatmul: 16 rows of bfloat16, one row per cycle, on v6e two."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a kernel.

    Attributes:
      first: address of its first bundle.
      last: address of its last bundle.
      depth: number of loops around it.
      entries: how often it is entered.
      iterations: iterations, over all entries.
      cycles: as in `Schedule`, in it and its inner loops.
      products: matrix-unit instructions (vmatmul) executed in it, including inner loops.
    """

    first: int
    last: int
    depth: int
    entries: int
    iterations: int
    cycles: int
    products: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Executed instructions of a kernel.  An estimate; see the module docstring.

    Attributes:
      cycles: executed bundles, and the matrix units' time where that is longer.
      products: executed vmatmul instructions, over all matrix units.
      hbm_bytes: bytes of executed copies between HBM and on-chip memory.
      copies: number of these copies.
      spills: vector registers that the compiler stores to VMEM because it lacks registers.
      bundles: bundles of the program text.
      loops: loops, in program order.
    """

    cycles: int
    products: int
    hbm_bytes: int
    copies: int
    spills: int
    bundles: int
    loops: tuple[Loop, ...]

    def table(self) -> str:
        """Return a text table of the loop nest."""
        lines = [
            f"{self.cycles:,} cycles (estimate; stalls not counted), {self.products:,} vmatmul, "
            f"{self.hbm_bytes:,} HBM bytes in {self.copies:,} copies, {self.spills} spills, "
            f"{self.bundles:,} bundles",
            f"{'loop':<24}{'entries':>10}{'iterations':>12}{'cycles':>14}{'/iter':>10}{'vmatmul':>12}",
        ]
        for loop in self.loops:
            name = f"{'  ' * loop.depth}{loop.first:#x}-{loop.last:#x}"
            each = loop.cycles / max(1, loop.iterations)
            lines.append(
                f"{name:<24}{loop.entries:>10,}{loop.iterations:>12,}{loop.cycles:>14,}"
                f"{each:>10,.1f}{loop.products:>12,}"
            )
        return "\n".join(lines)


def kernel_dumps(folder: pathlib.Path, kernels: str = "") -> dict[str, pathlib.Path]:
    """Return HLO name -> `final_bundles` file of each compiled instruction in a dump folder.

    Args:
      folder: folder of DUMP_FLAGS.
      kernels: regular expression that the names must contain.
    """
    dumps = {}
    for path in sorted(folder.glob("*final_bundles.txt")):
        name = re.match(r"\d+-(.*)-\d+-final_bundles\.txt", path.name)
        if name and re.search(kernels, name[1]):
            dumps[name[1]] = path
    return dumps


def read_schedule(
    text: str,
    operands: Sequence[Any] = (),
    cores: int = 1,
    product_cycles: int = 0,
    limit: int = 50_000_000,
) -> Schedule:
    """Return the executed instructions of a kernel.

    Args:
      text: contents of a `final_bundles` dump.
      operands: integer arrays, the kernel's first operands: the tables that it copies to scalar
        memory.  Needed only if branches or copies depend on them.
      cores: cores of the device that share the kernel (2 on v4 and v5p).  Copies are summed over
        cores; cycles and loops are those of the core with the most.
      product_cycles: cycles that a matrix unit needs for a vmatmul, see `PRODUCT_CYCLES`.  A basic
        block takes at least the time of its busiest unit.  0 counts only bundles.
      limit: basic blocks executed before the reader gives up.

    Raises:
      ScheduleError: the text is not understood, a needed table is missing, or `limit` is reached.
    """
    program = _Program(*parse(text))
    runs = [program.run(operands, core, product_cycles, limit) for core in range(cores)]
    return dataclasses.replace(
        max(runs, key=lambda run: run.cycles),
        hbm_bytes=sum(run.hbm_bytes for run in runs),
        copies=sum(run.copies for run in runs),
    )


class _Program:
    """Basic blocks of a kernel, compiled to Python functions of the values that branches need."""

    def __init__(self, bundles, regions):
        self.bundles = bundles
        self.phis = {op.result: op.operands for ops in bundles for op in ops if op.opcode == "sphi"}
        self.branches = {}
        for number, ops in enumerate(bundles):
            for op in ops:
                if op.opcode.startswith("sbr"):
                    target = re.search(r"target = \$region(\d+)", " ".join(op.operands))
                    if target is None or target[1] not in regions:
                        raise ScheduleError(f"branch without a known target at {number:#x}.")
                    self.branches[number] = (op.predicate, regions[target[1]])
        starts = {0, *(target for _, target in self.branches.values())}
        starts |= {number + 1 + DELAY_SLOTS for number in self.branches}
        # A loop's first bundle has the values that change with its iterations.
        starts |= {n for n, ops in enumerate(bundles) if any(op.opcode == "sphi" for op in ops)}
        self.starts = sorted(start for start in starts if start < len(bundles))
        self.needed = self._slice()
        self.slots = {name: number for number, name in enumerate(sorted(self.needed))}

    def _slice(self):
        """Return the names of all values that branches, copies and their predicates depend on."""
        writers = {}
        stores = []
        roots = [predicate for predicate, _ in self.branches.values()]
        for ops in self.bundles:
            for op in ops:
                if op.result:
                    writers[op.result] = op
                if op.opcode == "sst":
                    stores.append(op)
                if op.opcode.startswith("dma.hbm_to_smem"):
                    roots += [op.predicate, *op.operands]
                elif op.opcode.startswith(("dma.hbm", "dma.vmem_to_hbm")):
                    roots += [op.predicate, op.operands[1]]
        needed: set[str] = set()
        loads: set[str] = set()
        pending = [name for root in roots for name in names(root)]
        while pending:
            name = pending.pop()
            if name in needed:
                continue
            needed.add(name)
            if name not in writers:
                raise ScheduleError(f"value %{name} has no definition.")
            op = writers[name]
            for operand in (op.predicate, "%" + op.otherwise, *op.operands):
                pending += names(operand)
            if op.opcode == "sld":
                spaces = allocation(op.operands[0])
                for store in stores if spaces not in loads else ():
                    if not spaces or allocation(store.operands[0]) in (spaces, ""):
                        pending += names(" ".join([store.predicate, *store.operands]))
                loads.add(spaces)
        self.loaded = loads
        return needed

    def _value(self, text):
        """Return the Python expression of an operand."""
        text = text.strip()
        if match := re.fullmatch(r"%(\w+)", text):
            return f"v[{self.slots[match[1]]}]"
        if match := re.fullmatch(r"(-?\d+|\$?0x[0-9a-f]+)(?: \[#allocation\d+\w*\])?", text):
            return str(int(match[1].lstrip("$"), 0))
        if match := re.fullmatch(r"\[(.*)\]", text):
            terms = [term.strip() for term in match[1].split(" + ")]
            return "(" + " + ".join(map(self._term, terms)) + ")"
        raise ScheduleError(f"operand is not understood: {text[:80]}")

    def _term(self, term):
        if match := re.fullmatch(r"#allocation(\d+)(?:_spill)?", term):
            return str((int(match[1]) + 1) * BASE)
        return self._value(term)

    def _statement(self, op):
        """Return the Python statement of an instruction; "" if nothing depends on it."""
        statement = ""
        if op.opcode == "sst":
            if self.loaded & {allocation(op.operands[0]), ""}:
                statement = f"m[{self._value(op.operands[0])}] = {self._value(op.operands[1])}"
        elif op.opcode.startswith("dma.hbm_to_smem"):
            hbm, _, smem = map(self._value, op.operands[:3])
            statement = f"copy_table({hbm}, {smem})"
        elif op.opcode.startswith(("dma.hbm", "dma.vmem_to_hbm")):
            statement = f"traffic[0] += {self._value(op.operands[1])}; traffic[1] += 1"
        elif op.result in self.needed and op.opcode != "sphi":
            slot = f"v[{self.slots[op.result]}]"
            if op.opcode.startswith("inlined_call_operand"):
                return ""
            if op.opcode == "sld":
                value = f"load({self._value(op.operands[0])})"
            elif form := expression(op):
                value = form.format(*map(self._value, op.operands))
            else:
                raise ScheduleError(f"a branch depends on an unknown instruction: {op.opcode}.")
            if op.otherwise:
                other = f"v[{self.slots[op.otherwise]}]"
                return f"{slot} = {value} if {self._condition(op.predicate)} else {other}"
            statement = f"{slot} = {value}"
        if statement and op.predicate:
            return f"if {self._condition(op.predicate)}: {statement}"
        return statement

    def _condition(self, predicate):
        if not re.fullmatch(r"(?:%\w+|not|and|or|[\s()])*", predicate):
            raise ScheduleError(f"predicate is not understood: {predicate[:80]}")
        return re.sub(r"%(\w+)", lambda m: f"v[{self.slots[m[1]]}]", predicate)

    def _edge(self, target, which):
        """Return the statement that assigns the phis of a block on entry."""
        if target >= len(self.bundles):
            return ""
        phis = [op for op in self.bundles[target] if op.opcode == "sphi"]
        phis = [op for op in phis if op.result in self.needed]
        if not phis:
            return ""
        left = ", ".join(f"v[{self.slots[op.result]}]" for op in phis)
        right = ", ".join(self._value(op.operands[which]) for op in phis)
        return f"{left} = {right}"

    def _source(self):
        """Return the source of one function per basic block; each returns the next block."""
        numbers = {start: number for number, start in enumerate(self.starts)}
        numbers[len(self.bundles)] = -1
        source = []
        for number, start in enumerate(self.starts):
            end = self.starts[number + 1] if number + 1 < len(self.starts) else len(self.bundles)
            lines = []
            branch = None
            for index in range(start, end):
                if index in self.branches:
                    if branch or index + 1 + DELAY_SLOTS != end:
                        raise ScheduleError(f"a branch in a delay slot at {index:#x}.")
                    branch = self.branches[index]
                    # The delay slots may change the predicate's register, not this value.
                lines += [self._statement(op) for op in self.bundles[index]]
            if branch:
                predicate, target = branch
                lines.append(f"if {self._condition(predicate) or 'True'}:")
                lines.append("  " + (self._edge(target, 1 if target <= start else 0) or "pass"))
                lines.append(f"  return {numbers[target]}")
            lines.append(self._edge(end, 0))
            lines.append(f"return {numbers[end]}")
            body = "\n".join(f"  {line}" for line in lines if line)
            source.append(f"def block{number}(v, m, traffic, load, copy_table, w, M):\n{body}\n")
        return "\n".join(source)

    def run(self, operands, core, product_cycles, limit) -> Schedule:
        """Execute the kernel's scalar instructions; see `read_schedule`."""
        namespace: dict[str, Any] = {}
        # The source consists of numbers, indices and our own words; names of the dump never enter.
        exec(self._source(), namespace)
        blocks = [namespace[f"block{number}"] for number in range(len(self.starts))]
        values: list[Any] = [0] * len(self.slots)
        addresses = {}
        for ops in self.bundles:
            for op in ops:
                if op.opcode.startswith("inlined_call_operand") and op.result in self.slots:
                    index = int(" ".join(op.operands).partition("index: ")[2].split()[0])
                    values[self.slots[op.result]] = address = (index + 1) * BASE * 2**20
                    addresses[address] = index
        memory: dict[int, int] = {BASE: core}  # Allocation 0 has the number of the core.

        def copy_table(hbm, smem):
            index = addresses.get(hbm, addresses.get(hbm >> 4))
            if index is not None and index < len(operands):
                flat = np.asarray(operands[index]).reshape(-1).tolist()
                memory.update(zip(range(smem, smem + len(flat)), flat, strict=True))

        def load(address):
            try:
                return memory[address]
            except KeyError:
                raise ScheduleError(
                    "a branch depends on a table that is not among the operands "
                    f"(allocation {address // BASE - 1})."
                ) from None

        visits = [0] * len(blocks)
        entries = [0] * len(blocks)
        traffic = [0, 0]
        block, previous = 0, -1
        for _ in range(limit):
            visits[block] += 1
            entries[block] += previous < block
            previous = block
            block = blocks[block](values, memory, traffic, load, copy_table, signed, MASK)
            if block < 0:
                break
        else:
            raise ScheduleError(f"no end after {limit} basic blocks.")
        return self._summary(visits, entries, traffic, product_cycles)

    def _summary(self, visits, entries, traffic, product_cycles):
        ends = [*self.starts[1:], len(self.bundles)]
        numbers = {start: number for number, start in enumerate(self.starts)}
        times = np.zeros(len(self.bundles), np.int64)
        stalls = np.zeros(len(self.bundles), np.int64)
        products = np.zeros(len(self.bundles), np.int64)
        for start, end, count in zip(self.starts, ends, visits, strict=True):
            units = collections.Counter(
                op.opcode.rpartition(".")[2]
                for ops in self.bundles[start:end]
                for op in ops
                if op.opcode.startswith("vmatmul")
            )
            busy = product_cycles * max(units.values(), default=0)
            times[start:end] = count
            stalls[end - 1] = count * max(0, busy - (end - start))
            products[end - 1] = count * units.total()
        cycles = times + stalls
        loops = []
        for branch, (_, target) in sorted(self.branches.items(), key=lambda item: item[1][1]):
            if target <= branch:
                block = numbers[target]
                last = branch + DELAY_SLOTS
                loops.append((target, last, entries[block], visits[block]))
        spans = [(first, last) for first, last, _, _ in loops]
        return Schedule(
            cycles=int(cycles.sum()),
            products=int(products.sum()),
            hbm_bytes=traffic[0] * GRANULE,
            copies=traffic[1],
            spills=sum(_is_spill(op) for ops in self.bundles for op in ops),
            bundles=len(self.bundles),
            loops=tuple(
                Loop(
                    first,
                    last,
                    sum(a <= first and last <= b for a, b in spans) - 1,
                    entered,
                    iterations,
                    int(cycles[first : last + 1].sum()),
                    int(products[first : last + 1].sum()),
                )
                for first, last, entered, iterations in loops
            ),
        )


def _is_spill(op):
    return op.opcode.startswith("vst") and "_spill" in " ".join(op.operands)


def main():
    """Print the schedules of a dump folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=pathlib.Path, help="folder of the dumps")
    parser.add_argument("kernels", nargs="?", default="", help="regular expression of names")
    parser.add_argument("--chip", choices=PRODUCT_CYCLES, help="to count busy matrix units too")
    parser.add_argument("--flags", action="store_true", help="print LIBTPU_INIT_ARGS and exit")
    arguments = parser.parse_args()
    if arguments.flags:
        print(DUMP_FLAGS.format(folder=arguments.folder))
        return
    for name, path in kernel_dumps(arguments.folder, arguments.kernels).items():
        try:
            cycles = PRODUCT_CYCLES.get(arguments.chip, 0)
            read = read_schedule(path.read_text(), product_cycles=cycles)
            print(f"{name}: {read.table()}")
        except ScheduleError as error:
            print(f"{name}: not read: {error}")


if __name__ == "__main__":
    main()
