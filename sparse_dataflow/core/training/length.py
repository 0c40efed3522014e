"""How many steps a training has, as planned or as its seconds turn out to allow."""

import dataclasses
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Length:
    """The number of steps of a training, and the point of its schedule at each of them.

    Attributes:
      planned: steps of the learning rate's schedule.
      revisions: (step, total) in order: after `step` steps the training got `total` steps, over
        which the rest of the schedule is spread evenly.
    """

    planned: int
    revisions: tuple[tuple[int, int], ...] = ()

    @property
    def total(self) -> int:
        """Number of steps."""
        return self.revisions[-1][1] if self.revisions else self.planned

    def schedule_step(self, step: int) -> float:
        """Returns the step of the planned schedule that `step` stands for; `step` itself where
        nothing was revised."""
        if not self.revisions:
            return step
        position, spans = 0.0, [(0, self.planned), *self.revisions]
        ends = [*(start for start, _ in self.revisions), step]
        for (start, total), end in zip(spans, ends, strict=True):
            if min(end, step) > start:
                # Each revision spreads what is left of the schedule over what is left of its total.
                share = (min(end, step) - start) / (total - start)
                position += (self.planned - position) * share
        return min(position, float(self.planned))

    def revised(self, step: int, total: int) -> "Length":
        """Returns the length with another total after `step` steps, at least `step`."""
        return dataclasses.replace(self, revisions=(*self.revisions, (step, max(step, total))))

    @classmethod
    def from_json(cls, planned: int, saved: Iterable[tuple[int, int]] | None) -> "Length":
        """Returns the length of a checkpoint, whose revisions are not trusted.

        Raises:
          ValueError, TypeError: they are no revisions.
        """
        revisions = tuple((step, total) for step, total in saved or ())
        numbers = [number for pair in revisions for number in pair]
        if not all(type(number) is int for number in numbers):
            raise ValueError("its revised lengths are no whole numbers")
        steps: Sequence[int] = [step for step, _ in revisions]
        if sorted(steps) != list(steps) or any(not 0 < step <= end for step, end in revisions):
            raise ValueError("its revised lengths are out of order")
        return cls(planned, revisions)
