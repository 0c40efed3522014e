"""Which blocks take part in a step: the relay may change its depth from one step to the next.

A block that is left out is the identity for that step: it is neither fetched nor updated.
"""

import dataclasses

import numpy as np

from sparse_dataflow.files.errors import UserError

GROWN_AT = 0.5
"""Fraction of the steps after which a growing network has all its blocks."""


@dataclasses.dataclass(frozen=True)
class DepthSchedule:
    """How the depth changes.

    Attributes:
      kind: "constant"; "drop": every block is left out of a step with probability `value`
        (LayerDrop, arXiv 1909.11556, section 3.2); "grow": the first `value` of the blocks train
        from the start, the others join one after the other until GROWN_AT of the steps.
      value: a fraction, in (0, 1); 0 where the kind is "constant".
    """

    kind: str = "constant"
    value: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "DepthSchedule":
        """The schedule that "constant", "drop:0.1" or "grow:0.25" names.

        Raises:
          UserError: it names none; the legal values are told.
        """
        kind, _, number = text.partition(":")
        try:
            value = float(number) if kind != "constant" else 0.0
        except ValueError:
            value = -1.0
        named = kind in ("drop", "grow") and 0 < value < 1
        if not named and text != "constant":
            raise UserError(
                f"--depth_schedule={text} is no schedule; legal: constant, drop:P (each block is "
                "left out of a step with probability P) or grow:F (training starts with the first "
                "F of the blocks), P and F above 0 and below 1."
            )
        return cls(kind, value)

    def starting_blocks(self, num_layers: int) -> int:
        """How many blocks, the first ones, take part in the first step of a growing network."""
        if self.kind != "grow":
            return num_layers
        return max(1, round(self.value * num_layers))

    def active(self, num_layers: int, step: int, steps: int, seed: int) -> tuple[int, ...]:
        """The blocks of step `step` (from 0) of `steps`, ascending, at least one.

        Depends on nothing else, so that a resumed run takes the same.
        """
        if self.kind == "drop":
            draws = np.random.default_rng([seed, step]).random(num_layers)
            kept = np.flatnonzero(draws >= self.value)
            return tuple(map(int, kept)) or (int(np.argmax(draws)),)
        start = self.starting_blocks(num_layers)
        grown = min(1.0, step / max(1, GROWN_AT * steps))
        return tuple(range(start + int((num_layers - start) * grown)))
