"""Profiles of a run: traces of `jax.profiler`, which xprof, TensorBoard and Perfetto show."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from sparse_dataflow.cluster import processes
from sparse_dataflow.core.training.monitoring.metrics import say
from sparse_dataflow.files.errors import UserError, first_line

FOLDER = "profile"
"""Folder of the traces in the run folder; `tensorboard --logdir` takes the run folder."""

MOST_SECONDS = 60.0
"""Longest trace on request: traces of minutes fill memory."""

_busy = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The executions of one compiled operation in a trace.

    Attributes:
      name: of the operation.
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
        self._steps = steps if steps and processes.is_first() else None
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


def kernels(folder: Path) -> list[Kernel]:
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
