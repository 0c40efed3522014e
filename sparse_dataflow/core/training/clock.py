"""What a process is doing, and the seconds of each activity."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator

START = "start"
"""Default activity: imports, reading the corpus, writing the report."""

_RECENT_STEPS = 50


class Clock:
    """Seconds per activity; time inside a nested activity counts for the inner one alone.

    One thread enters activities; any thread may read.

    Attributes:
      seconds: {activity: seconds} of finished activities.
      activity: the current activity.
      step: name of the current step, such as "step 12 of sparse"; empty before the first.
      progress: number of activity changes; it stands still while the process hangs.
      start_time: `now()` at construction.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self.start_time = now()
        self.seconds: dict[str, float] = {}
        self.activity, self.step, self.progress = START, "", 0
        self._since = self.start_time
        self._steps: deque[float] = deque(maxlen=_RECENT_STEPS)

    @contextlib.contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Sets the activity for a block."""
        before = self.activity
        self._switch(activity)
        try:
            yield
        finally:
            self._switch(before)

    def record_step(self, seconds: float) -> None:
        """Records the duration of a step."""
        self._steps.append(seconds)

    @property
    def longest_step(self) -> float:
        """Seconds of the longest recent step; 0 before the first."""
        return max(self._steps, default=0.0)

    @property
    def elapsed(self) -> float:
        """Seconds since construction."""
        return self._now() - self.start_time

    def seconds_by_activity(self) -> dict[str, float]:
        """Returns {activity: seconds} until now, the current one included; sums to `elapsed`."""
        seconds = dict(self.seconds)
        seconds[self.activity] = seconds.get(self.activity, 0.0) + self._now() - self._since
        return seconds

    def _switch(self, activity):
        now = self._now()
        self.seconds[self.activity] = self.seconds.get(self.activity, 0.0) + now - self._since
        self.activity, self._since = activity, now
        self.progress += 1
