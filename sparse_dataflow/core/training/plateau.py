"""Plateau detection: the next phase of a training starts when the held-out loss stops falling."""

import dataclasses
import math
from typing import Any

from sparse_dataflow.core.training.phases import Phase

GAIN = 0.005
"""Smallest relative improvement over the best evaluation that counts as progress."""


@dataclasses.dataclass(frozen=True)
class Plateau:
    """The best evaluation of a phase and the evaluations since.

    Attributes:
      best: bits per byte of the last evaluation that was progress; infinite before the first.
      stale: number of evaluations since then, which improved on it by less than GAIN.
    """

    best: float = math.inf
    stale: int = 0

    def after(self, bits_per_byte: float) -> "Plateau":
        """Returns the state after one more evaluation."""
        if bits_per_byte < self.best * (1 - GAIN):
            return Plateau(bits_per_byte)
        return Plateau(self.best, self.stale + 1)

    def to_json(self) -> list:
        """Returns the fields as JSON-able values; `from_json` is the inverse."""
        return [None if math.isinf(self.best) else self.best, self.stale]

    @classmethod
    def from_json(cls, saved: Any) -> "Plateau":
        """Returns what `to_json` gave; the state before the first evaluation for None."""
        best, stale = saved or (None, 0)
        return cls(math.inf if best is None else best, stale)


def with_next_start(phases: tuple[Phase, ...], number: int, step: int) -> tuple[Phase, ...]:
    """Returns the phases with the one after index `number` starting at `step`."""
    starts = [phase.start for phase in phases]
    starts[number + 1] = step
    return with_starts(phases, starts)


def with_starts(phases: tuple[Phase, ...], starts: list[int]) -> tuple[Phase, ...]:
    """Returns the phases with new first steps, one per phase."""
    stops = [*starts[1:], phases[-1].stop]
    return tuple(
        dataclasses.replace(phase, start=start, stop=stop)
        for phase, start, stop in zip(phases, starts, stops, strict=True)
    )
