"""Machines: so many chips of one kind, as `--chips=h100:8` names them; loads no jax."""

import dataclasses
import math
import re

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import chips
from sparse_dataflow.hardware.chips import Chip

LEGAL = (
    "KIND:NUMBER, as in h100:8, a100-40gb:8, v5p:16 or mi300x:8; a TPU as Google names it, as in "
    "v5litepod-64 or v5p-8 (8 cores, 4 chips); with @DOLLARS for the price of a chip hour"
)
MOST_CHIPS = 2**17

_TPU = re.compile(r"(v4|v5e|v5p|v5litepod|v6e|v7x|tpu7x)-(\d{1,6})")
_CORES = {"v4": 2, "v5p": 2}
"""Cores of a chip where Google's name of a slice counts cores; its other names count devices of
JAX, which are chips, and the two halves of a TPU7x."""
_MACHINE = re.compile(r"([\w./~-]+?)(?::(\d{1,6}(?:x\d{1,6})*))?(?:@(\d{1,9}(?:\.\d{1,9})?))?")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Chips of one kind that train one model together.

    Attributes:
      host: whether the chips are the CPU of this host.
      cores: cores of a process's host; None where they are not known.
      price: dollars of a chip hour; None where it is not given.
    """

    chip: Chip
    count: int
    host: bool = False
    price: float | None = None
    cores: int | None = None

    @property
    def name(self) -> str:
        """Returns the kind and number, such as "h100:8"."""
        return f"{self.chip.name}:{self.count}"


def parse(text: str) -> Machine:
    """Returns the machine of a text such as "h100:8", "v5p-8" or "a100:8@1.5".

    Raises:
      UserError: no such chip, or no legal number or price of them; names the legal texts.
    """
    match = _MACHINE.fullmatch(text.strip())
    if match is None:
        raise UserError(f"--chips={text[:60]} is not legal; legal: {LEGAL}.")
    kind, sides, price = match.groups()
    # A path keeps its case; names of chips have none.
    kind = kind if kind.endswith(".toml") else kind.lower()
    count = math.prod(map(int, sides.split("x"))) if sides else 1
    if slice_name := _TPU.fullmatch(kind):
        if sides:
            raise UserError(f"--chips={text} names the number of chips twice; legal: {LEGAL}.")
        kind, count = slice_name[1], int(slice_name[2])
        cores = _CORES.get(kind, 1)
        if count % cores:
            raise UserError(
                f"--chips={text}: the number in a name of {kind} counts cores, {cores} a chip; "
                f"legal: even numbers, or {kind}:{count} for so many chips."
            )
        count //= cores
    if not 1 <= count <= MOST_CHIPS:
        raise UserError(f"--chips={text} has {count:,} chips; legal: 1 to {MOST_CHIPS:,}.")
    if price is not None and not float(price):
        raise UserError(f"--chips={text} has a price of 0; legal: more, or none.")
    chip = chips.lookup(kind, "--chips")
    return Machine(chip, count, price=float(price) if price else None)


def parse_all(text: str) -> list[Machine]:
    """Returns the machines of a comma list.

    Raises:
      UserError: see `parse`.
    """
    return [parse(part) for part in text.split(",")]
