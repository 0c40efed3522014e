"""Metrics of a run: JSONL, trackers and alerts."""

import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparse_dataflow.cluster.signals import Ended
from sparse_dataflow.core import collectives
from sparse_dataflow.core.messages import say
from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.appended import AppendedFile
from sparse_dataflow.files.errors import (
    UserError,
    advice,
    first_line,
    redact,
    redact_json,
)
from sparse_dataflow.monitoring.trackers import (
    TENSORBOARD,
    TensorBoard,
    TrackedRun,
    Tracker,
    opened,
)

_REQUIRED = {
    "train": ("tokens", "seconds", "loss", "learning_rate", "gradient_norm", "tokens_per_second"),
    "eval": ("tokens", "seconds", "loss", "bits_per_byte"),
    "evolution": ("tokens", "seconds", "update_seconds", "exchanged", "parameters"),
    "routing": ("tokens", "seconds"),
    "skipped": ("tokens", "seconds"),
    "rollback": ("tokens", "seconds", "to"),
}
_OF_STEPS = ("train", "skipped")
"""Kinds of rows, one of which each step has."""
_MAX_LINE_BYTES = 2**20  # Longer lines are read in pieces, none of which parses as a row.
_MAX_BYTES, _MAX_ROWS = 2**30, 2**21
"""Of a file: a run of a million steps has about 200 MB."""

_MAX_DAMAGED = 1000


def read_metrics(path: str | os.PathLike) -> list[json_files.JsonObject]:
    """Returns the rows of a metrics.jsonl, in the order of the file.

    A killed writer leaves an incomplete line, which is skipped with a warning.  A resumed run
    repeats the steps after its last checkpoint: the later row of a kind and step replaces the
    earlier one.  A missing file has no rows.

    Raises:
      UserError: it cannot be read, or is not a regular file.
    """
    return MetricsReader(Path(path)).read(ended=True)


class MetricsReader:
    """Reads a metrics.jsonl again and again while it grows, and each of its lines once.

    A file that was replaced, as by a resumed run, is read anew.
    """

    def __init__(self, path: Path):
        """Reads nothing yet."""
        self._path = path
        self._rows: dict[object, json_files.JsonObject] = {}
        self._end, self._lines, self._last = 0, 0, b""

    def read(self, ended: bool = False) -> list[json_files.JsonObject]:
        """Returns the rows as `read_metrics`.

        Args:
          ended: whether the writer has ended; else a last line without end may grow, and waits.

        Raises:
          UserError: the file cannot be read, or is not a regular file.
        """
        try:
            storage.retry(f"Reading {self._path}", lambda: self._read(ended))
        except OSError as error:
            words = error.strerror or error
            raise UserError(f"{self._path} cannot be read: {words}.") from error
        return list(self._rows.values())

    def _read(self, ended):
        if not self._path.exists():
            self._rows, self._end, self._lines, self._last = {}, 0, 0, b""
            return
        with storage.open_regular(self._path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > _MAX_BYTES:
                raise UserError(f"{self._path} has {size:,} bytes; legal: {_MAX_BYTES:,}.")
            file.seek(self._end - len(self._last))
            # Another file has other bytes where the last line was.
            if file.read(len(self._last)) != self._last:
                self._rows, self._end, self._lines, self._last = {}, 0, 0, b""
                file.seek(0)
            rows: dict[object, json_files.JsonObject] = {}
            lines, end, last, damaged = self._lines, self._end, self._last, 0
            for line in iter(lambda: file.readline(_MAX_LINE_BYTES), b""):
                # The writer may be in the middle of this line.
                if not ended and len(line) < _MAX_LINE_BYTES and not line.endswith(b"\n"):
                    break
                lines, end, last = lines + 1, end + len(line), line
                row = _parse_row(line) if line.strip() else {}
                if row is None:
                    damaged += 1
                    words = "%s: line %d is damaged; skipped."
                    logging.getLogger(__name__).warning(words, self._path, lines)
                elif row:
                    # A row without a step repeats none: its line number is its key.
                    rows[(row.get("kind"), row["step"]) if "step" in row else lines] = row
                if damaged > _MAX_DAMAGED or len(rows) + len(self._rows) > _MAX_ROWS:
                    raise UserError(
                        f"{self._path} is damaged: more than {_MAX_DAMAGED:,} of its lines are no "
                        f"rows, or it has more than {_MAX_ROWS:,}."
                    )
        # Nothing is kept of a reading that failed.
        self._rows |= rows
        self._lines, self._end, self._last = lines, end, last


def _parse_row(line: bytes) -> json_files.JsonObject | None:
    """Returns the row of a line; None for another text."""
    try:
        row = json_files.parse(line)
    except ValueError:
        return None
    is_row = isinstance(row, dict) and isinstance(row.get("kind", ""), str)
    return row if is_row and type(row.get("step", 0)) is int else None


class MetricsWriter:
    """Appends rows to `metrics.jsonl` in one variant's folder, and hands them to trackers.

    TensorBoard's files are in `tensorboard/` of that folder. Alerts also go to `alerts.jsonl`.

    With several processes, process 0 writes; the rows of the others are equal.

    Opening at step s drops the rows after s, which a killed run wrote after its last checkpoint,
    and the final evaluation of a finished run, which is repeated.

    Transient storage errors (see `storage`) are retried with reopened files.  An incomplete row is
    then followed by the whole row, and skipped on reading.

    Raises:
      UserError: from every method, if the files cannot be written; earlier rows are intact.
    """

    def __init__(
        self,
        folder: Path,
        step: int = 0,
        tracker_names: Sequence[str] = (TENSORBOARD,),
        config: Mapping[str, object] | None = None,
        run_id: str = "",
    ):
        """Opens the files and the trackers.

        Args:
          folder: of the variant.
          step: of the checkpoint that the training continues.
          tracker_names: see `tracker_names`.
          config: the `RunConfig` as JSON, for trackers.
          run_id: of the run, for trackers.
        """
        self._folder = folder
        self._tensorboard = TENSORBOARD in tracker_names
        self._trackers: dict[str, Tracker] = {}
        self._events: TensorBoard | None = None
        self._path = folder / "metrics.jsonl"
        self._rows = AppendedFile(self._path)
        self._alerts = SideFile(folder / "alerts.jsonl")
        if not collectives.is_first():
            return
        rows = self._retried(read_metrics, self._path)
        rows = [row for row in rows if row.get("kind") != "final"]
        complete = [row for row in rows if _is_complete(row)]
        if len(complete) < len(rows):
            say(f"{self._path}: {len(rows) - len(complete)} rows are damaged; skipped.")
        # Later rows are of steps that are trained again from the checkpoint.
        complete = [row for row in complete if row["step"] <= step]
        _say_missing(self._path, complete, step)
        # Written anew and renamed: a run that dies here has all of the old rows or all of the new
        # ones.
        lines = (json.dumps(row) + "\n" for row in complete)
        self._retried(storage.replace, self._path, "".join(lines).encode())
        if self._tensorboard:
            self._retried(self._open_events, step + 1)
        name, facts = f"{folder.parent.name}/{folder.name}", redact_json(config or {})
        run = TrackedRun(folder, name, step, facts, f"{run_id}-{folder.name}")
        for name in tracker_names:
            if name != TENSORBOARD:
                self._trackers[name] = opened(name, run)

    def write(self, row: dict) -> None:
        """Appends one row: {"kind", "step", ...numbers}."""
        if collectives.is_first():
            self._retried(self._append, row)
            self._tell_trackers("write", row)

    def seconds_at(self, step: int, otherwise: float) -> float:
        """Returns the training seconds until `step` by the rows so far, or `otherwise`."""
        # From the end, where the row of a recent step is.
        rows = reversed(read_metrics(self._path))
        steps = (r for r in rows if r.get("kind") in _OF_STEPS and r.get("step") == step)
        return next((row["seconds"] for row in steps), otherwise)

    def alert(self, kind: str, text: str, step: int) -> None:
        """Hands an alert to the trackers and to `alerts.jsonl`, as far as these can be written.

        Any thread may call.
        """
        if not collectives.is_first():
            return
        line = json.dumps({"kind": kind, "step": step, "time": time.time(), "text": redact(text)})
        self._alerts.append(line.encode())
        self._tell_trackers("alert", kind, redact(text), step)

    def close(self) -> None:
        """Flushes and closes the files, and ends the trackers."""
        try:
            self._close_files()
        finally:
            self._tell_trackers("close")
            self._trackers.clear()

    def _close_files(self):
        # On a stack, so that the rows are closed even if the events cannot be.
        with self._user_errors(), contextlib.ExitStack() as stack:
            stack.callback(self._close_events)
            stack.callback(self._rows.close)
        self._alerts.close()

    def _tell_trackers(self, method, *arguments):
        """Calls a method of each tracker; one that raises gets no more calls."""
        for name, tracker in list(self._trackers.items()):
            try:
                getattr(tracker, method)(*arguments)
            except (Exception, SystemExit) as error:  # The code of others raises any error.
                # A signal that ends the run is no error of the tracker.
                if isinstance(error, Ended):
                    raise
                # Alerts come from any thread, so another one may have removed it.
                self._trackers.pop(name, None)
                say(f"the tracker {name} failed ({first_line(error)}) and gets no more rows")

    def _append(self, row):
        self._rows.append(json.dumps(row).encode())
        if not self._tensorboard:
            return
        try:
            self._open_events(row["step"])
            assert self._events is not None
            self._events.write(row)
        except OSError:
            # What was written in part is left behind: a retry opens a new file.
            with contextlib.suppress(OSError):
                self._close_events()
            raise

    def _open_events(self, first_step):
        if self._events is None:
            self._events = TensorBoard(self._folder / "tensorboard", first_step)

    def _close_events(self):
        events, self._events = self._events, None
        if events is not None:
            events.close()

    def _retried(self, operation, *arguments):
        with self._user_errors():
            return storage.retry(
                f"Writing metrics to {self._folder}", lambda: operation(*arguments)
            )

    @contextlib.contextmanager
    def _user_errors(self):
        """Turns an OSError into a UserError."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"Metrics cannot be written to {self._folder} ({error.strerror or error}). "
                f"{advice(error).capitalize()} Then continue with --resume."
            ) from error


class SideFile:
    """An `AppendedFile` that training does not depend on, such as alerts and times.

    What cannot be written is left out, which is said once.
    """

    def __init__(self, path: Path):
        """Opens nothing yet."""
        self._file, self._warned, self._ended = AppendedFile(path), False, False

    def append(self, line: bytes) -> None:
        """Appends a line, if that is possible."""
        if not self._ended:
            self._try(lambda: self._file.append(line))

    def close(self) -> None:
        """Flushes the lines to disk and closes the file, if that is possible."""
        self._try(self._file.close)

    def _try(self, operation):
        try:
            operation()
        except OSError as error:
            # A permanent error is not met again at every line.
            self._ended = not storage.is_transient(error)
            if not self._warned:
                self._warned = True
                say(
                    f"{self._file.path} cannot be written ({error.strerror or error}); training "
                    "goes on, and that file misses lines"
                )


def _say_missing(path: Path, rows: Sequence[Mapping[str, object]], step: int) -> None:
    """Says how many of the steps until a checkpoint have no row, as after a power cut."""
    missing = set(range(1, step + 1)) - {r["step"] for r in rows if r["kind"] in _OF_STEPS}
    if missing:
        say(
            f"{path}: the rows of {len(missing)} of the {step} steps until the checkpoint are "
            f"missing, the first of step {min(missing)}; the curves leave them out"
        )


def _is_complete(row: dict) -> bool:
    """Whether a row has a legal kind and all numbers of that kind."""
    numbers = (row.get(name) for name in ("step", *_REQUIRED.get(str(row.get("kind")), ("kind",))))
    return all(isinstance(number, int | float) for number in numbers)
