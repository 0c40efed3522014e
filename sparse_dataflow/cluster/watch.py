"""Which process is silent or stalled, and what it was doing.

`Watch` names a silent or stalled process, with host and activity, in the log of every process.
Each process sends its status to process 0 several times per heartbeat. Process 0 announces silent
and stalled processes to all; the others watch process 0. A step is a collective of all processes:
if one is missing, the others wait without knowing for whom. The name is logged before that
collective times out. A process that stays silent is taken for lost, and all end.
"""

import dataclasses
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

from sparse_dataflow.cluster.rendezvous import ProcessSet
from sparse_dataflow.core.training.clock import START, Clock
from sparse_dataflow.files.errors import TEMPORARY, escaped
from sparse_dataflow.files.json_files import JsonObject

LOST_AFTER = 10
"""Number of silent heartbeats after which a process is taken for lost."""

STALLED_STEPS = 10
"""A step may take this many times the longest recent step, or a heartbeat if that is longer."""

STEP = "step"
"""The activity that all processes do together."""

_LONGEST_NAME = 200

UNTIMED = ("compile", "report", START)
"""Activities without a time limit."""


@dataclasses.dataclass(frozen=True)
class Status:
    """Last status of a process.

    Attributes:
      activity: see `Clock`.
      step: see `Clock`.
      idle: seconds since its last progress.
      longest_step: seconds of its longest recent step.
      silent: seconds since its last message.
    """

    host: str = "unknown host"
    activity: str = START
    step: str = ""
    idle: float = 0.0
    longest_step: float = 0.0
    silent: float = 0.0

    @classmethod
    def from_message(cls, message: Mapping[str, object], silent: float) -> "Status":
        """Reads an untrusted message; fields of a wrong type or size keep their defaults."""
        valid: JsonObject = {}
        for field in dataclasses.fields(cls):
            value = message.get(field.name)
            if field.type is str and isinstance(value, str):
                valid[field.name] = escaped(value[:_LONGEST_NAME])
            elif field.type is float and isinstance(value, int | float) and 0 <= value < 1e9:
                valid[field.name] = float(value)
        return dataclasses.replace(cls(**valid), silent=silent)

    def where(self) -> str:
        """Returns text such as "in step 12 of sparse, activity data"."""
        activity = f"activity {self.activity}"
        return f"in {self.step}, {activity}" if self.step else f"in {activity}"


def silent(statuses: Mapping[int, Status], heartbeat: float) -> list[int]:
    """Returns the processes that sent nothing for a heartbeat."""
    return [number for number, status in sorted(statuses.items()) if status.silent > heartbeat]


def lost(statuses: Mapping[int, Status], heartbeat: float) -> list[int]:
    """Returns the processes that sent nothing for LOST_AFTER heartbeats."""
    return silent(statuses, heartbeat * LOST_AFTER)


def stalled(statuses: Mapping[int, Status], heartbeat: float) -> list[int]:
    """Returns the processes that the others seem to wait for.

    Processes in the activity "step" wait for those in another one; if all are in it, all are
    returned. The list is empty while steps progress, or any process compiles.
    """
    longest = max(status.longest_step for status in statuses.values())
    # Without a step that was timed there is no measure of a long one.
    if any(s.activity in UNTIMED or not s.longest_step for s in statuses.values()):
        return []
    # As long as one process goes on, none is stalled.
    if min(s.idle for s in statuses.values()) <= max(heartbeat, STALLED_STEPS * longest):
        return []
    late = [number for number, status in sorted(statuses.items()) if status.activity != STEP]
    return late or sorted(statuses)


def describe(statuses: Mapping[int, Status], heartbeat: float) -> str:
    """Returns which processes are silent or stalled, for the log; empty if none is."""
    quiet, late = silent(statuses, heartbeat), stalled(statuses, heartbeat)
    lines = [
        f"process {n} on {statuses[n].host} has been silent for {statuses[n].silent:.0f} s, last "
        f"{statuses[n].where()}"
        for n in quiet
    ]
    if late and not quiet:
        longest = max(status.longest_step for status in statuses.values())
        named = "; ".join(
            f"process {n} on {statuses[n].host} is {statuses[n].where()}" for n in late
        )
        idle = min(status.idle for status in statuses.values())
        lines.append(
            f"no progress for {idle:.0f} s, and no recent step took above {longest:.1f} s: {named}"
        )
    return "; ".join(lines)


class Watch:
    """A thread that sends this process's status, and logs and ends stalled runs."""

    def __init__(
        self,
        clock: Clock,
        heartbeat: float,
        group: ProcessSet | None = None,
        say: Callable[[str], None] | None = None,
    ):
        """Starts the thread.

        Args:
          clock: clock of this process.
          heartbeat: seconds of silence or stall after which processes are named, above 0.
          group: the processes of the run; None for a single process.
          say: logs a line on this process; prints to stderr if None.
        """
        self._clock, self._heartbeat, self._group = clock, heartbeat, group
        self._say = say or _print
        self._number = group.number if group else 0
        self._host = socket.gethostname()
        self._seen, self._since = -1, time.monotonic()
        self._resumed, self._reported = 0.0, False
        self._stop = threading.Event()
        if group is not None:
            group.on_announcement = self._say
            group.send_status(dataclasses.asdict(self._status(self._since)))
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self):
        # A quarter of a heartbeat: one lost message is no silence.
        pause, before = min(1.0, self._heartbeat / 4), time.monotonic()
        while not self._stop.wait(pause):
            now = time.monotonic()
            if now - before > pause + self._heartbeat / 2:
                # This process itself was suspended: the silence of others means nothing.
                self._resumed = self._since = now
            before = now
            if self._group is not None and self._group.leaving:
                return
            self._check(now)

    def _check(self, now):
        status = self._status(now)
        statuses = {self._number: status}
        if self._group is not None:
            self._group.send_status(dataclasses.asdict(status))
            for peer, (when, message) in list(self._group.statuses.items()):
                statuses[peer] = Status.from_message(message, now - max(when, self._resumed))
            if absent := lost(statuses, self._heartbeat):
                self._end(self._group, absent, statuses)
        if self._number:
            # Process 0 checks all processes; the others check its silence alone.
            statuses = {0: dataclasses.replace(statuses[0], longest_step=0.0)}
        problem = describe(statuses, self._heartbeat)
        if problem and not self._reported:
            self._announce(f"stalled: {problem}")
        elif self._reported and not problem:
            self._announce("going on after the stall")
        self._reported = bool(problem)

    def _announce(self, text):
        if self._group is not None and self._number == 0:
            self._group.announce(text)
        else:
            self._say(text)

    def _status(self, now):
        clock = self._clock
        if clock.progress != self._seen:
            self._seen, self._since = clock.progress, now
        idle = now - self._since
        return Status(self._host, clock.activity, clock.step, idle, clock.longest_step)

    def _end(self, group, absent, statuses):
        seconds = LOST_AFTER * self._heartbeat
        named = ", ".join(f"process {n} on {statuses[n].host}" for n in absent)
        text = (
            f"{named} has been silent for {seconds:.0f} seconds and is taken for lost; start the "
            "run again with --resume."
        )
        print(f"error: {text}", file=sys.stderr, flush=True)
        group.fail(text, TEMPORARY)
        # `sys.exit` would end this thread alone, and the others may wait in a collective for ever.
        os._exit(TEMPORARY)


def _print(text):
    print(text, file=sys.stderr, flush=True)
