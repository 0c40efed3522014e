"""Instructions of a TPU program, from the text of a `final_bundles` dump of libtpu.

A line is a bundle: instructions that one cycle starts.  Values have names in single-assignment form
(`%s12_s3`), also after register allocation.  Importing this module loads no jax.
"""

import dataclasses
import re


class ScheduleError(Exception):
    """The text has an instruction or a control flow that this reader does not know."""


@dataclasses.dataclass
class Op:
    """An instruction.

    Attributes:
      result: name of its value; "" for none.
      opcode: its name.
      operands: their text, without comments.
      predicate: "" or a Python expression of a value; it executes only if this is true.
      otherwise: name of the value that the result takes if the predicate is false; "" for none.
    """

    result: str
    opcode: str
    operands: list[str]
    predicate: str
    otherwise: str


_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_PREDICATE = re.compile(r"\((!?)%(\w+)(?:, (%\w+))?\),?")
_OP = re.compile(r"(?:%(\w+) = )?([a-z][\w.]*)(.*)", re.S)


def parse(text: str) -> tuple[list[list[Op]], dict[str, int]]:
    """Return the bundles of a program, and region number -> index of its first bundle.

    Raises:
      ScheduleError: the text is not understood.
    """
    lines = re.split(r"^ *(0x[0-9a-f]+|0) +(?:[A-Z]{2})?:?[ ]?:?[ >]*(?=\{)", text, flags=re.M)
    bundles: list[list[Op]] = []
    regions: dict[str, int] = {}
    for number, (address, body) in enumerate(zip(lines[1::2], lines[2::2], strict=True)):
        if int(address, 16) != number:
            raise ScheduleError(f"bundle {address} follows bundle {number - 1:#x}.")
        comments = " ".join(_COMMENT.findall(body))
        for region in _REGION.findall(comments):
            regions.setdefault(region, number)
        content = _COMMENT.sub(" ", body).strip()
        if not (content.startswith("{") and content.endswith("}")):
            raise ScheduleError(f"bundle {address} is not understood: {content[:80]}")
        parts = (part.strip() for part in content[1:-1].split(";;"))
        bundles.append([parse_op(part) for part in parts if part])
    if not bundles:
        raise ScheduleError("the text has no bundles.")
    return bundles, regions


def parse_op(text: str) -> Op:
    """Return an instruction from its text.

    Raises:
      ScheduleError: the text is not understood.
    """
    match = _OP.fullmatch(text)
    if match is None:
        raise ScheduleError(f"instruction is not understood: {text[:120]}")
    result, opcode, rest = match.groups()
    predicate, otherwise = "", ""
    if condition := _PREDICATE.search(rest):
        predicate = f"{'not ' if condition[1] else ''}%{condition[2]}"
        otherwise = (condition[3] or "")[1:]
        rest = rest[: condition.start()] + rest[condition.end() :]
    rest = re.sub(r"\[(?:thread|resolvable|shape)[^\]]*\]*", "", rest)
    rest = re.sub(r"\[smem:(\[[^\]]*\])\]", r"\1,", rest)
    operands = [operand.strip() for operand in rest.split(",") if operand.strip()]
    return Op(result or "", opcode, operands, predicate, otherwise)


def signed(value: int) -> int:
    """Wrap to a signed 32-bit integer; addresses (2**40 and more) stay."""
    if -(2**31) <= value < 2**31 or abs(value) >= 2**36:
        return value
    return (value + 2**31) % 2**32 - 2**31


BASE = 2**40
"""Distance of the addresses of allocations."""

MASK = 2**32 - 1

# Python expressions of scalar instructions; {0}, {1}, {2} are the operands.
_EXPRESSIONS = {
    "smov.u32": "{0}",
    "pmov": "{0}",
    "sadd.s32": "w({0} + {1})",
    "ssub.s32": "w({0} - {1})",
    "smul.u32": "w({0} * {1})",
    "smulhi.u32": "w((({0} & M) * ({1} & M)) >> 32)",
    "sshll.u32": "w({0} << {1})",
    "sshrl.u32": "w(({0} & M if abs({0}) < 2**36 else {0}) >> {1})",
    "sshra.s32": "({0} >> {1})",
    "sand.u32": "w({0} & {1})",
    "sor.u32": "w({0} | {1})",
    "sxor.u32": "w({0} ^ {1})",
    "smin.u32": "min({0}, {1})",
    "smax.u32": "max({0}, {1})",
    "smin.s32": "min({0}, {1})",
    "smax.s32": "max({0}, {1})",
    "por": "({0} or {1})",
    "pand": "({0} and {1})",
    "pnand": "(not ({0} and {1}))",
    "pnor": "(not ({0} or {1}))",
    "pxor": "(bool({0}) != bool({1}))",
    "pneg": "(not {0})",
    "scalar_select": "({1} if {0} else {2})",
    "scalar_lea.vmem": "({0} + {1})",
    "scalar_lea.hbm": "({0} + {1})",
    "scalar_lea.smem": "({0} + {1})",
    "scalar_lea.sflag": "({0} + {1})",
}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


def expression(op: Op) -> str | None:
    """Return a scalar instruction as a Python expression of {0}, {1}, {2}, its operands; w wraps to
    32 bits and M is MASK.  None if the instruction is not known."""
    if compare := re.fullmatch(r"scmp\.(\w\w)\.([su])32\.totalorder", op.opcode):
        unsigned = compare[2] == "u" and compare[1] not in ("eq", "ne")
        form = "(({0} & M) {c} ({1} & M))" if unsigned else "({0} {c} {1})"
        return form.replace("{c}", _COMPARE[compare[1]])
    if op.opcode.startswith("int_to_ptr"):
        return "{0}"
    return _EXPRESSIONS.get(op.opcode)


def names(text: str) -> list[str]:
    """Return the names of values in a text."""
    return re.findall(r"%(\w+)", text)


def allocation(address: str) -> str:
    """Return the allocation that an address begins with; "" if a value says it."""
    match = re.match(r"\[#(allocation\w+)", address)
    return match[1] if match else ""
