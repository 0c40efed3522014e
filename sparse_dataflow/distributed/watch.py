"""Names the process that is silent or stalled, by host and phase, in the log of every process.

Each process tells the first, a few times in the heartbeat, what it is doing; the first tells all
what it makes of it, and the others watch the first.  A step is made by all processes together:
where one does not come, the others wait in a collective that does not say for whom.  Names come
before that collective's own time is over; a process that stays silent is taken for lost, and all
end.
"""

import dataclasses
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from sparse_dataflow.distributed.clock import START, Clock
from sparse_dataflow.distributed.rendezvous import Group
from sparse_dataflow.files.errors import TEMPORARY

LOST_AFTER = 10
"""Heartbeats of silence after which a process is taken for lost."""

STALLED_STEPS = 10
"""Times the longest of the last steps that a step may take, where a heartbeat is shorter."""

STEP = "step"
"""The phase in which all processes are together."""

UNTIMED = ("compile", START)
"""Phases that may take as long as they like."""


@dataclasses.dataclass(frozen=True)
class Doing:
    """What a process told, as seen now.

    Attributes:
      host: its machine's name.
      phase: see `Clock`.
      step: likewise.
      still: seconds since its last progress.
      usual: seconds of its longest recent step.
      silent: seconds since it told anything.
    """

    host: str = "unknown host"
    phase: str = START
    step: str = ""
    still: float = 0.0
    usual: float = 0.0
    silent: float = 0.0

    @classmethod
    def heard(cls, told: Mapping[str, Any], silent: float) -> "Doing":
        """From a message, which may be anything: what is of another kind counts as not told."""
        known = {field.name: field.type for field in dataclasses.fields(cls)}
        kinds = {name: str if kind is str else int | float for name, kind in known.items()}
        fit: dict[str, Any] = {
            n: v for n, v in told.items() if n in kinds and isinstance(v, kinds[n])
        }
        return dataclasses.replace(cls(**fit), silent=silent)

    def where(self) -> str:
        """Such as "in step 12 of sparse, phase data"."""
        return f"in {self.step}, phase {self.phase}" if self.step else f"in phase {self.phase}"


def silent(doing: Mapping[int, Doing], heartbeat: float) -> list[int]:
    """Processes not heard of for a heartbeat."""
    return [number for number, it in sorted(doing.items()) if it.silent > heartbeat]


def lost(doing: Mapping[int, Doing], heartbeat: float) -> list[int]:
    """Processes not heard of for LOST_AFTER heartbeats."""
    return silent(doing, heartbeat * LOST_AFTER)


def stalled(doing: Mapping[int, Doing], heartbeat: float) -> list[int]:
    """Processes that all others seem to wait for; none while steps go on, or something is compiled.

    Those in the phase "step" wait for those that are not; where all are in it, none is known better
    than another.
    """
    if any(it.phase in UNTIMED or not it.usual for it in doing.values()):
        return []
    limit = max(heartbeat, STALLED_STEPS * max(it.usual for it in doing.values()))
    if min(it.still for it in doing.values()) <= limit:
        return []
    late = [number for number, it in sorted(doing.items()) if it.phase != STEP]
    return late or sorted(doing)


def words(doing: Mapping[int, Doing], heartbeat: float) -> str:
    """What to tell all: who is silent or stalled; empty where all goes well."""
    quiet, late = silent(doing, heartbeat), stalled(doing, heartbeat)
    parts = [
        f"process {n} on {doing[n].host} has not been heard of for {doing[n].silent:.0f} s, last "
        f"{doing[n].where()}"
        for n in quiet
    ]
    if late and not quiet:
        longest = max(it.usual for it in doing.values())
        named = "; ".join(f"process {n} on {doing[n].host} is {doing[n].where()}" for n in late)
        still = min(it.still for it in doing.values())
        parts.append(
            f"no progress for {still:.0f} s, and no recent step took above {longest:.1f} s: {named}"
        )
    return "; ".join(parts)


class Watch:
    """A thread that tells, judges and ends; started at once, stopped by `stop`."""

    def __init__(
        self,
        clock: Clock,
        heartbeat: float,
        group: Group | None = None,
        say: Callable[[str], None] | None = None,
    ):
        """Begins to watch.

        Args:
          clock: of this process.
          heartbeat: seconds of silence or stall after which processes are named, above 0.
          group: of the others; this process alone where None.
          say: prints a line, on this process; on stderr where None.
        """
        self._clock, self._heartbeat, self._group = clock, heartbeat, group
        self._say = say or _print
        self._number = group.number if group else 0
        self._host = socket.gethostname()
        self._seen, self._since = -1, time.monotonic()
        self._frozen, self._named = 0.0, False
        self._stop = threading.Event()
        if group is not None:
            group.on_news = self._say
            group.tell(dataclasses.asdict(self._mine(self._since)))
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch."""
        self._stop.set()
        self._thread.join()

    def _run(self):
        pause, before = min(1.0, self._heartbeat / 4), time.monotonic()
        while not self._stop.wait(pause):
            now = time.monotonic()
            if now - before > pause + self._heartbeat / 2:
                # This process itself was stopped: what it did not hear meanwhile says nothing.
                self._frozen = self._since = now
            before = now
            if self._group is not None and self._group.leaving:
                return
            self._look(now)

    def _look(self, now):
        mine = self._mine(now)
        doing = {self._number: mine}
        if self._group is not None:
            self._group.tell(dataclasses.asdict(mine))
            for peer, (when, told) in list(self._group.told.items()):
                doing[peer] = Doing.heard(told, now - max(when, self._frozen))
            if gone := lost(doing, self._heartbeat):
                self._end(self._group, gone, doing)
        if self._number:
            # The first judges over all; only over the first itself do the others.
            doing = {0: dataclasses.replace(doing[0], usual=0.0)}
        found = words(doing, self._heartbeat)
        if found and not self._named:
            self._tell_all(f"stalled: {found}")
        elif self._named and not found:
            self._tell_all("going on after the stall")
        self._named = bool(found)

    def _tell_all(self, text):
        if self._group is not None and self._number == 0:
            self._group.announce(text)
        else:
            self._say(text)

    def _mine(self, now):
        clock = self._clock
        if clock.progress != self._seen:
            self._seen, self._since = clock.progress, now
        still = now - self._since
        return Doing(self._host, clock.phase, clock.step, still, clock.usual_step)

    def _end(self, group, gone, doing):
        seconds = LOST_AFTER * self._heartbeat
        named = ", ".join(f"process {n} on {doing[n].host}" for n in gone)
        text = (
            f"{named} has not been heard of for {seconds:.0f} seconds and is taken for lost; start "
            "the run again with --resume."
        )
        print(f"error: {text}", file=sys.stderr, flush=True)
        group.fail(text, TEMPORARY)
        os._exit(TEMPORARY)


def _print(text):
    print(text, file=sys.stderr, flush=True)
