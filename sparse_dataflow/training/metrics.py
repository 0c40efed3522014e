"""Where a run's numbers go: JSONL and TensorBoard files, and a progress bar or plain lines."""

import contextlib
import json
import logging
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sparse_dataflow.distributed import processes
from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.redaction import redact

_NUMBERS = {
    "train": ("tokens", "seconds", "loss", "learning_rate", "gradient_norm", "tokens_per_second"),
    "eval": ("tokens", "seconds", "loss", "bits_per_byte"),
    "evolution": ("tokens", "seconds", "update_seconds", "exchanged", "parameters"),
    "skipped": ("tokens", "seconds"),
    "rollback": ("tokens", "seconds", "to"),
}
_LONGEST_LINE = 2**20  # Bytes; what is longer is torn in pieces, none of which is a row.


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, in the order of their steps as they stand.

    A killed writer leaves a torn line: it is passed over with a warning.  A resumed run repeats the
    steps after its last checkpoint: the later row of a kind and step replaces the earlier.  A file
    that does not exist holds no rows.
    """
    path = Path(path)

    def read():
        if not path.exists():
            return {}
        with path.open("rb") as file:
            lines = enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1)
            return _by_step(path, lines)

    return list(storage.retry(f"Reading {path}", read).values())


def _by_step(path, lines):
    rows: dict[Any, dict[str, Any]] = {}
    for number, line in lines:
        if not line.strip():
            continue
        try:
            row = json_files.parse(line)
        except ValueError:
            row = None
        whole = isinstance(row, dict) and isinstance(row.get("kind", ""), str)
        if not whole or type(row.get("step", 0)) is not int:
            logging.getLogger(__name__).warning("%s: line %d is torn; passed over.", path, number)
            continue
        rows[(row.get("kind"), row["step"]) if "step" in row else number] = row
    return rows


def seconds_at(folder: Path, step: int, otherwise: float) -> float:
    """Training time until a step, by the rows in a variant's folder, where one says."""
    rows = read_metrics(folder / "metrics.jsonl")
    found = [
        r["seconds"]
        for r in rows
        if r.get("kind") in ("train", "skipped") and r.get("step") == step
    ]
    return found[-1] if found else otherwise


class MetricsWriter:
    """Appends rows to `metrics.jsonl` and scalars to `tensorboard/` in one variant's folder.

    Of several processes the first one writes; the others' rows are the same.

    Opening at step s drops rows past s, which a killed run wrote after its last checkpoint, and a
    finished run's last evaluation, which is made again.

    Errors of storage that pass (see `storage`) are waited for, on files opened anew: a row that was
    torn is passed over when it is read, and stands again after it.

    Raises:
      UserError: from every method, where the files cannot be written; the rows before stay.
    """

    def __init__(self, folder: Path, step: int = 0):
        self._folder = folder
        self._open: tuple[Any, Any] | None = None
        self._path = folder / "metrics.jsonl"
        if not processes.is_first():
            return
        found = [row for row in self._told(read_metrics, self._path) if row.get("kind") != "final"]
        rows = [row for row in found if _is_whole(row)]
        if len(rows) < len(found):
            say(f"{self._path}: {len(found) - len(rows)} rows are damaged; passed over.")
        lines = (json.dumps(row) + "\n" for row in rows if row["step"] <= step)
        self._told(storage.replace, self._path, "".join(lines).encode())
        self._told(self._opened, step + 1)

    def write(self, row: dict) -> None:
        """Adds one row: {"kind", "step", ...numbers}."""
        if processes.is_first():
            self._told(self._append, row)

    def close(self) -> None:
        """Flushes and closes both files."""
        if self._open is None:
            return
        (file, events), self._open = self._open, None
        with self._worded(), contextlib.closing(events):
            file.close()

    def _append(self, row):
        file, events = self._opened(row["step"])
        scalars = {
            f"{row['kind']}/{name}": value
            for name, value in row.items()
            if name not in ("kind", "step") and value is not None
        }
        try:
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            events.add(row["step"], scalars)
        except OSError as error:
            if storage.is_transient(error):
                with contextlib.suppress(UserError):
                    self.close()
            raise

    def _opened(self, first_step):
        """(metrics.jsonl, the file for TensorBoard), opened where they are not."""
        if self._open is None:
            file = self._path.open("ab")
            try:
                # What was torn stays a line of its own.
                file.write(b"\n" * (file.tell() > 0 and not self._ends_whole()))
                self._open = file, _EventFile(self._folder / "tensorboard", first_step)
            except BaseException:
                file.close()
                raise
        return self._open

    def _ends_whole(self):
        with self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"

    def _told(self, operation, *arguments):
        with self._worded():
            return storage.retry(
                f"Keeping metrics in {self._folder}", lambda: operation(*arguments)
            )

    @contextlib.contextmanager
    def _worded(self):
        try:
            yield
        except OSError as error:
            raise UserError(
                f"Metrics cannot be written to {self._folder} ({error.strerror or error}). "
                "Make room there, then go on with --resume."
            ) from error


def _is_whole(row: dict) -> bool:
    numbers = (row.get(name) for name in ("step", *_NUMBERS.get(str(row.get("kind")), ("kind",))))
    return all(isinstance(number, int | float) for number in numbers)


class _EventFile:
    """Scalars for TensorBoard, written in the caller's thread.

    tensorboardX's own SummaryWriter writes from a thread that dies of a full disk, and then leaves
    the training waiting on its queue for ever.
    """

    def __init__(self, folder: Path, first_step: int, every: float = 10.0):
        """Opens a new file whose steps, from `first_step` on, hide those of earlier files."""
        from tensorboardX.proto import event_pb2
        from tensorboardX.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)
        # The names of earlier files sort before: the time comes first.
        name = f"events.out.tfevents.{time.time():.6f}.{platform.node()}"
        self._event, self._every = event_pb2.Event, every
        self._writer = RecordWriter(str(folder / name))
        self._put(file_version="brain.Event:2")
        self._put(step=first_step, session_log=event_pb2.SessionLog(status="START"))
        self._writer.flush()
        self._flushed = time.monotonic()

    def add(self, step: int, scalars: dict[str, float]) -> None:
        """Adds {name: value} at `step`; reaches the disk within about `every` seconds."""
        values = [{"tag": name, "simple_value": value} for name, value in scalars.items()]
        self._put(step=step, summary={"value": values})
        if time.monotonic() - self._flushed > self._every:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._writer.close()

    def _put(self, **fields):
        self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())


class Progress:
    """A progress bar on a terminal, a plain line every `every` seconds elsewhere."""

    def __init__(self, name: str, total: int, step: int, position: int, every: float = 15.0):
        self._name, self._total, self._every = name, total, every
        self._told = time.monotonic()
        self._bar = None
        if sys.stderr.isatty() and processes.is_first():
            self._bar = tqdm(
                desc=f"{name:>6}", total=total, initial=step, position=position, unit="step",
                dynamic_ncols=True,
            )  # fmt: skip

    def update(self, step: int, text: str, seconds_left: float) -> None:
        """Shows that `step` is done."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        elif time.monotonic() - self._told > self._every or step == self._total:
            self._told = time.monotonic()
            eta = f"{seconds_left:.0f} s left" if step < self._total else "done"
            say(f"{self._name:>6} step {step}/{self._total}  {text}  {eta}")

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


def say(text: str) -> None:
    """Prints a line without breaking a progress bar; of several processes, the first one's.

    Secrets do not come out.
    """
    if not processes.is_first():
        return
    tqdm.write(redact(text), file=sys.stderr)
    sys.stderr.flush()
