"""Progress of a run: one line that changes on a terminal, a plain line now and then in a log."""

import shutil
import sys
import time

from tqdm import tqdm

from sparse_dataflow.cluster import processes
from sparse_dataflow.core.training.monitoring.metrics import say
from sparse_dataflow.core.training.monitoring.time_left import Remaining, TimeLeft
from sparse_dataflow.files import information

LINE_SECONDS = 15.0
"""Seconds between two lines of a log, and before the first."""

_REDRAW_SECONDS = 0.2
_SEPARATOR = " · "


class Progress:
    """The models of a run that train in turns, and the time left until the run ends.

    Args:
      time_left: estimates the rest of the run, the report included.
    """

    def __init__(self, time_left: TimeLeft):
        self.time_left = time_left
        self._start = self._last = time.monotonic()
        self._models: dict[str, tuple[int, int, str]] = {}
        self._bar: tqdm | None = None
        terminal = sys.stderr is not None and sys.stderr.isatty() and processes.is_first()
        self._terminal = terminal and not information.is_quiet()

    def note(self, name: str, step: int, steps: int, text: str) -> None:
        """Takes the numbers of a model's newest step, which the next line shows."""
        self._models[name] = step, steps, text

    def after_step(self, name: str, remaining: Remaining) -> None:
        """Takes over what a model has left after a step, and shows a line if it is time."""
        self.time_left.after_step(name, remaining)
        pause = _REDRAW_SECONDS if self._terminal else LINE_SECONDS
        ended = all(step >= steps for step, steps, _ in self._models.values())
        if time.monotonic() - self._last > pause or ended:
            self._show(self._line())

    def stage(self, activity: str) -> None:
        """Shows what happens after the last step, such as "writing the report"."""
        self._show(f"{self._head()}{_SEPARATOR}{activity}")

    def close(self) -> None:
        """Ends the line on a terminal, which stays on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _head(self):
        left = self.time_left.seconds()
        done = time.monotonic() - self._start
        return f"{done / max(1e-9, done + left):3.0%}{_SEPARATOR}{in_words(left)} left"

    def _line(self):
        models = [
            f"{name} {step}/{steps} {text}" for name, (step, steps, text) in self._models.items()
        ]
        return _SEPARATOR.join([self._head(), *models])

    def _show(self, line):
        self._last = time.monotonic()
        if not self._terminal:
            say(line)
            return
        if self._bar is None:
            self._bar = tqdm(total=1, bar_format="{desc}", file=sys.stderr)
        width = shutil.get_terminal_size().columns - 1
        self._bar.set_description_str(line[:width])


def in_words(seconds: float) -> str:
    """Returns a duration to about 5%, such as "45 s", "4 min 30 s", "12 min", "3 h 20 min"."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 595:
        minutes, rest = divmod(10 * round(seconds / 10), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        hours, rest = divmod(10 * round(minutes / 10), 60)
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    return f"{minutes / 60 / 24:.1f} days"
