"""What this process is doing, and how long it has done each thing."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator

START = "start"
"""The phase in which no other was named: imports, reading the corpus, writing the report."""

_RECENT_STEPS = 50


class Clock:
    """Seconds by phase; the inner of two nested phases alone has the time spent in it.

    One thread enters phases; any may read.

    Attributes:
      seconds: {phase: seconds} of the phases that are over.
      phase: the present one.
      step: words for the step under way, such as "step 12 of sparse"; empty before the first.
      progress: how many phases have begun; it stands still where the process does.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self.began = now()
        self.seconds: dict[str, float] = {}
        self.phase, self.step, self.progress = START, "", 0
        self._since = self.began
        self._steps: deque[float] = deque(maxlen=_RECENT_STEPS)

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Inside, this process is in `phase`."""
        before = self.phase
        self._turn(phase)
        try:
            yield
        finally:
            self._turn(before)

    def stepped(self, seconds: float) -> None:
        """Notes how long a step took."""
        self._steps.append(seconds)

    @property
    def usual_step(self) -> float:
        """Seconds of the longest of the last steps; 0 before the first."""
        return max(self._steps, default=0.0)

    @property
    def elapsed(self) -> float:
        """Seconds since this clock was made."""
        return self._now() - self.began

    def spent(self) -> dict[str, float]:
        """{phase: seconds} until now, the present phase included; they add up to `elapsed`."""
        found = dict(self.seconds)
        found[self.phase] = found.get(self.phase, 0.0) + self._now() - self._since
        return found

    def _turn(self, phase):
        now = self._now()
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._since
        self.phase, self._since = phase, now
        self.progress += 1
