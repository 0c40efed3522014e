"""When a held-out loss stops falling: the trigger that lets the next phase of a training begin."""

import dataclasses
import math
from typing import Any

from sparse_dataflow.training.phases import Phase

GAIN = 0.005
"""What an evaluation must gain on the best one before it, as a fraction, to count as progress."""


@dataclasses.dataclass(frozen=True)
class Plateau:
    """What the evaluations of a phase have shown so far.

    Attributes:
      best: lowest bits per byte of the phase; infinite before its first evaluation.
      stale: evaluations since then that gained less than GAIN on it.
    """

    best: float = math.inf
    stale: int = 0

    def after(self, bits_per_byte: float) -> "Plateau":
        """What they show with one more."""
        if bits_per_byte < self.best * (1 - GAIN):
            return Plateau(bits_per_byte)
        return Plateau(self.best, self.stale + 1)

    def to_json(self) -> list:
        """JSON-able; `from_json` is its inverse."""
        return [None if math.isinf(self.best) else self.best, self.stale]

    @classmethod
    def from_json(cls, saved: Any) -> "Plateau":
        """Of `to_json`; the first where nothing was saved."""
        best, stale = saved or (None, 0)
        return cls(math.inf if best is None else best, stale)


def next_begins(phases: tuple[Phase, ...], number: int, step: int) -> tuple[Phase, ...]:
    """The phases where the one after `number` begins at `step`; later ones stay where they are."""
    starts = [phase.start for phase in phases]
    starts[number + 1] = step
    return with_starts(phases, starts)


def with_starts(phases: tuple[Phase, ...], starts: list[int]) -> tuple[Phase, ...]:
    """The phases with other first steps."""
    stops = [*starts[1:], phases[-1].stop]
    return tuple(
        dataclasses.replace(phase, start=start, stop=stop)
        for phase, start, stop in zip(phases, starts, stops, strict=True)
    )
