"""The shapes in which weights are pruned: blocks of any two sides, and N of M."""

import dataclasses
import re

from sparse_dataflow.core.config.settings import block_sides
from sparse_dataflow.files.errors import UserError

LEGAL_BLOCKS = (
    "16 or 16x16 (squares), 1x16 (1 input x 16 outputs), 1 (single weights), 2:4 (N of M), "
    "narrow (of a language model)"
)


@dataclasses.dataclass(frozen=True)
class Groups:
    """Weights that are kept or removed together.

    Attributes:
      rows: input features of a group.
      cols: output features of a group.
      pool: consecutive groups of one output of which equally many stay; 0 for all of them, so that
        every output reads equally many inputs.
      stay: groups of a pool that stay, for N of M; 0 where a density says so.
    """

    rows: int
    cols: int
    pool: int = 0
    stay: int = 0

    @classmethod
    def parse(cls, text: str | int) -> "Groups":
        """Returns the groups of a text such as "16", "1x16" or "2:4".

        Raises:
          UserError: no such shape.
        """
        given, text = text, str(text).replace(" ", "")
        if match := re.fullmatch(r"(\d+):(\d+)", text):
            stay, pool = map(int, match.groups())
            if 1 <= stay < pool:
                return cls(1, 1, pool, stay)
        elif sides := block_sides(text):
            return cls(*sides)
        shown = given if isinstance(given, int) else repr(text[:40])
        raise UserError(f"block={shown} is not legal; legal: {LEGAL_BLOCKS}.")

    def __str__(self):
        if self.pool:
            return f"{self.stay}:{self.pool}"
        return f"{self.rows}x{self.cols}"

    @property
    def is_square(self) -> bool:
        """Whether the groups are squares of several weights, which a layout stores as blocks."""
        return self.rows == self.cols > 1

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Returns the numbers of groups along the inputs and outputs of a matrix.

        Raises:
          UserError: the groups do not divide it.
        """
        ins, outs = shape
        if ins % (self.rows * (self.pool or 1)) or outs % self.cols:
            raise UserError(
                f"Groups of {self} do not divide a {ins} x {outs} matrix; legal: divisors of "
                f"{ins} inputs and {outs} outputs."
            )
        return ins // self.rows, outs // self.cols

    def count(self, shape: tuple[int, int], density: float | None) -> int:
        """Returns the number of groups of each pool that stay at a density.

        Raises:
          UserError: the groups do not divide the matrix, or have no such density.
        """
        rows, _ = self.grid(shape)
        if self.pool:
            if density not in (None, self.stay / self.pool):
                raise UserError(
                    f"density={density:g} with block={self}; legal: {self.stay / self.pool:g}, or "
                    "none."
                )
            return self.stay
        density = 0.5 if density is None else density
        count = density * rows
        if not (1 <= round(count) <= rows and abs(count - round(count)) < 1e-6):
            raise UserError(
                f"Density {density:g} has no equal number of groups of {self} for each output of a "
                f"{shape[0]} x {shape[1]} matrix; legal: multiples of 1/{rows} up to 1."
            )
        return round(count)
