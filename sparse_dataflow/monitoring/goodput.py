"""Goodput: the fraction of a run's time, over all its starts, spent on steps that count.

Each start of the process is an attempt and appends rows to a file; the last row of an attempt
counts:

    {"attempt": 1, "began": ..., "elapsed": ..., "seconds": {activity: ...}, "ended": false}

`began` is the time of day in seconds since 1970, `elapsed` the seconds since then by a monotonic
clock, `seconds` the seconds by activity, and `ended` whether the process ended regularly.  The time
of day serves only for the idle time between two attempts, which is at least 0 if the clock was set
back.

Alerts while a training stands still.

Profiles of a run: traces of `jax.profiler`, which xprof, TensorBoard and Perfetto show.
"""

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import jax

from sparse_dataflow.cluster.watch import UNTIMED
from sparse_dataflow.core import collectives
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training.clock import Clock
from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import UserError, first_line
from sparse_dataflow.files.json_files import JsonObject
from sparse_dataflow.monitoring.metrics import SideFile

NAME = "goodput.jsonl"
CATEGORIES = (
    "productive", "compile", "checkpoint", "data", "evaluation", "other", "lost",
)  # fmt: skip
"""Categories of a run's seconds.

productive: steps and layout updates that count; checkpoint: saving and restoring; data: waiting for
batches; other: starting and reporting; lost: steps repeated after a crash, and the time between the
last row before a crash and the next start.
"""

TRAINING = ("step", "evolution")
"""Activities of a clock in which the model is trained."""

_MAX_BYTES = 64 * 2**20
_EVERY_SECONDS = 5.0


class GoodputLog:
    """Writes the rows of this attempt, on process 0."""

    def __init__(self, folder: Path, clock: Clock):
        """Opens the file in the run folder, which may have rows of earlier attempts."""
        self._path, self._clock = folder / NAME, clock
        self._earlier = read(self._path) if collectives.is_first() else []
        self._attempt = max((row["attempt"] for row in self._earlier), default=0) + 1
        # When the clock began, which was earlier.
        self._began = time.time() - clock.elapsed
        self._written = float("-inf")
        self._file = SideFile(self._path)

    def write(self, ended: bool = False, throttle: bool = False) -> None:
        """Appends a row, as far as the file can be written.

        Args:
          ended: whether the process ends regularly.
          throttle: write nothing if the last row is less than 5 seconds old.
        """
        now = self._clock.elapsed
        if not collectives.is_first() or (throttle and now - self._written < _EVERY_SECONDS):
            return
        self._written = now
        self._file.append(json.dumps(self._row(ended)).encode())
        if ended:
            self._file.close()

    def seconds(self, productive: float) -> dict[str, float]:
        """Returns {category: seconds} of the run so far; see `seconds_by_category`."""
        return seconds_by_category([*self._earlier, self._row(False)], productive)

    def _row(self, ended):
        seconds = {
            activity: round(s, 3) for activity, s in self._clock.seconds_by_activity().items()
        }
        return {
            "attempt": self._attempt,
            "began": round(self._began, 3),
            "elapsed": round(self._clock.elapsed, 3),
            "seconds": seconds,
            "ended": ended,
        }


def read(path: Path) -> list[JsonObject]:
    """Returns the last valid row of each attempt, in order; none without the file.

    Incomplete or foreign rows are skipped.
    """

    def content():
        with storage.open_regular(path) as file:
            return file.read(_MAX_BYTES)

    try:
        lines = storage.retry(f"Reading {path}", content).split(b"\n")
    except OSError:
        return []
    rows = {}
    for line in lines:
        try:
            row = json_files.parse(line)
            if _is_valid(row):
                rows[row["attempt"]] = row
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return [rows[attempt] for attempt in sorted(rows)]


def seconds_by_category(attempts: Iterable[JsonObject], productive: float) -> dict[str, float]:
    """Returns {category: seconds} for CATEGORIES; the sum is the time of the run.

    Args:
      attempts: rows as in the file, in order.
      productive: seconds of the steps that count; repeated steps count once.
    """
    totals = dict.fromkeys(CATEGORIES, 0.0)
    trained, before = 0.0, None
    for row in attempts:
        if before is not None and not before["ended"]:
            # A killed attempt has no end, so the time from its last row to the next attempt is
            # lost.
            gap = row["began"] - before["began"] - before["elapsed"]
            totals["lost"] += max(0.0, gap)
        for activity, seconds in row["seconds"].items():
            if activity in TRAINING:
                trained += seconds
            else:
                totals[activity if activity in CATEGORIES else "other"] += seconds
        before = row
    # The last row of a killed attempt may be older than its last steps.
    totals["productive"] = min(productive, trained)
    totals["lost"] += trained - totals["productive"]
    return totals


def goodput_share(seconds: Mapping[str, float]) -> float:
    """Returns the goodput: productive seconds / all seconds, in [0, 1]."""
    return seconds["productive"] / max(sum(seconds.values()), 1e-9)


def summary(seconds: Mapping[str, float]) -> str:
    """Returns one line, such as "goodput 81%: productive 65 s, compile 9 s"."""
    items = [f"{name} {seconds[name]:.1f} s" for name in CATEGORIES if seconds[name] >= 0.05]
    return f"goodput {goodput_share(seconds):.0%}: {', '.join(items)}"


def _is_valid(row) -> bool:
    numbers = [row["began"], row["elapsed"], *row["seconds"].values()]
    return (
        type(row["attempt"]) is int
        and type(row["ended"]) is bool
        and all(isinstance(n, int | float) and 0 <= n < 1e12 for n in numbers)
    )


@contextlib.contextmanager
def stall_alerts(clock: Clock, alert: Callable[[str], None], seconds: float) -> Iterator[None]:
    """Inside, calls `alert` once each time that the clock stands still for `seconds`.

    Activities without a time limit, such as compiling, are not watched.

    Args:
      clock: of the training, in this process.
      alert: takes the text; called in a thread of its own.
      seconds: 0 watches nothing.
    """
    if not seconds:
        yield
        return
    ended = threading.Event()

    def watch():
        progress, since, alerted = clock.progress, time.monotonic(), False
        # So a stall is seen at most a quarter late.
        while not ended.wait(min(10.0, seconds / 4)):
            if clock.progress != progress or clock.activity in UNTIMED:
                progress, since, alerted = clock.progress, time.monotonic(), False
            elif time.monotonic() - since > seconds and not alerted:
                alerted = True
                alert(f"no progress for {seconds:g} seconds in {clock.step or clock.activity}")

    thread = threading.Thread(target=watch, name="stall alerts", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


FOLDER = "profile"
"""Folder of the traces in the run folder; `tensorboard --logdir` takes the run folder."""

MOST_SECONDS = 60.0
"""Longest trace on request: traces of minutes fill memory."""

_busy = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The executions of one compiled operation in a trace.

    Attributes:
      seconds: sum over all executions and devices.
      count: number of executions.
    """

    name: str
    seconds: float
    count: int


@contextlib.contextmanager
def traced(folder: Path) -> Iterator[None]:
    """Traces a block into the run folder, for xprof and for Perfetto.

    Raises:
      UserError: another trace is under way.
    """
    # A process of jax has one trace at a time.
    if not _busy.acquire(blocking=False):
        raise UserError("A trace is under way; wait for its end.")
    try:
        with jax.profiler.trace(str(folder / FOLDER), create_perfetto_trace=True):
            yield
    finally:
        _busy.release()


def trace_now(folder: Path, seconds: float) -> str:
    """Traces this process for some seconds; returns a line of text.

    Raises:
      UserError: the time is illegal, or another trace is under way.
    """
    if not 0 < seconds <= MOST_SECONDS:
        raise UserError(f"seconds is {seconds:g}; legal: above 0, up to {MOST_SECONDS:g}.")
    with traced(folder):
        time.sleep(seconds)
    return f"traced {seconds:g} seconds into {folder / FOLDER}"


class StepProfile:
    """Traces some steps of a run on process 0."""

    def __init__(self, folder: Path, steps: range | None):
        """`steps` are the steps of the first model to trace; None traces nothing."""
        self._folder = folder
        self._steps = steps if steps and collectives.is_first() else None
        self._trace: contextlib.ExitStack | None = None

    def update(self, step: int) -> None:
        """Starts or stops the trace when `step` steps are done. Tracing never ends a run."""
        if self._steps is None:
            return
        if self._trace is None and step in self._steps:
            trace = contextlib.ExitStack()
            try:
                trace.enter_context(traced(self._folder))
                self._trace = trace
            except Exception as error:  # Profilers of devices raise errors of any type.
                self._fail(error)
        elif self._trace is not None and step >= self._steps.stop:
            self.close()

    def close(self) -> None:
        """Stops the trace, if it is under way, and writes it."""
        if self._trace is None:
            return
        trace, self._trace, self._steps = self._trace, None, None
        try:
            trace.close()
            say(f"profile: {self._folder / FOLDER}; tensorboard --logdir {self._folder}")
        except Exception as error:  # See `update`.
            self._fail(error)

    def _fail(self, error):
        self._steps = None
        say(f"the profile failed: {first_line(error)}")


def traced_kernels(folder: Path) -> list[Kernel]:
    """Returns the operations of the newest trace in a run folder, the longest first.

    A trace that is missing or cannot be read has none.
    """
    traces = sorted((folder / FOLDER).glob("plugins/profile/*/*.xplane.pb"))
    reader = getattr(jax.profiler, "ProfileData", None)
    if not traces or reader is None:
        return []
    totals: dict[str, list[float]] = {}
    try:
        for plane in reader.from_file(str(traces[-1])).planes:
            for line in plane.lines:
                # A TPU's operations have a line of their own; elsewhere their events have a
                # statistic.
                on_tpu = plane.name.startswith("/device:TPU") and line.name == "XLA Ops"
                for event in line.events:
                    if on_tpu or any(name == "hlo_op" for name, _ in event.stats):
                        total = totals.setdefault(event.name, [0.0, 0])
                        total[0] += event.duration_ns / 1e9
                        total[1] += 1
    except Exception as error:  # A damaged trace; the library raises errors of any type.
        say(f"the profile {traces[-1]} cannot be read: {first_line(error)}")
    operations = [Kernel(name, seconds, int(count)) for name, (seconds, count) in totals.items()]
    return sorted(operations, key=lambda kernel: -kernel.seconds)
