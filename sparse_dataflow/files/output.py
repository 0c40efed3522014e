"""What a process prints: streams that it must not depend on, its log, and tables.

The logger "sparse_dataflow" has the level INFO, and prints unless the program configured logging
itself. `logging.getLogger("sparse_dataflow").setLevel("WARNING")` leaves the warnings alone, as
--quiet does.
"""

import contextlib
import csv
import logging
import os
import queue
import select
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_dataflow.files.errors import printable, redact, shortened

PATIENCE_SECONDS = 1.0
"""Seconds that a flush waits for a reader, once until it reads again."""

_MOST_PENDING = 1000
_LONGEST = 2**16


class BestEffort:
    """A text stream whose errors are ignored: a full disk, a reader that left or stopped reading.

    To a terminal, pipe or socket a thread writes, so that a reader that stops blocks nobody else.
    Text beyond a limit is then dropped. Signal handlers may write. Secrets are redacted, also in
    what libraries and Python itself write.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        self._writer = _Writer(stream) if _may_block(stream) else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes the text if that is possible; returns its length."""
        count, text = len(text), redact(text)
        if self._writer:
            self._writer.put(text)
            return count
        # RuntimeError: a signal handler wrote while the interrupted code did.
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self._stream.write(text)
        return count

    def flush(self) -> None:
        """Flushes the stream if that is possible; waits PATIENCE_SECONDS at most."""
        if self._writer:
            self._writer.flush()
            return
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self._stream.flush()


class _Mark:
    """A place in the queue of a writer."""

    passed = False


class _Writer:
    """A thread that writes to a file descriptor."""

    def __init__(self, stream: Any):
        self._descriptor = stream.fileno()
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._errors = getattr(stream, "errors", None) or "backslashreplace"
        self._late = _Mark()  # The last mark that a flush did not wait for any longer.
        self._late.passed = True
        self._process = 0

    def put(self, text: str) -> None:
        """Writes the text soon, or drops it if too much waits."""
        if self._process != os.getpid() and not self._start():
            self._write(text[:_LONGEST].encode(self._encoding, self._errors))
            return
        # Dropped rather than stored: of a reader that stopped, memory would grow without end.
        if self._queue.qsize() < _MOST_PENDING:
            for start in range(0, min(len(text), _LONGEST * 16), _LONGEST):
                piece = text[start : start + _LONGEST]
                self._queue.put(piece.encode(self._encoding, self._errors))

    def flush(self) -> None:
        """Waits for what was put before, unless an earlier flush waits in vain."""
        if self._process != os.getpid() or not self._late.passed:
            return
        mark, end = _Mark(), time.monotonic() + PATIENCE_SECONDS
        self._queue.put(mark)
        # Polls: a signal handler that flushes must not wait for a lock that the interrupted code
        # holds.
        while not mark.passed:
            if time.monotonic() > end:
                self._late = mark
                return
            time.sleep(0.0005)

    def _start(self):
        """Starts the thread; returns False if the process may have no more of them."""
        # A thread does not survive a fork. `put` of a simple queue may be interrupted by itself.
        self._queue: queue.SimpleQueue[bytes | _Mark] = queue.SimpleQueue()
        try:
            threading.Thread(target=self._run, args=(self._queue,), daemon=True).start()
        except RuntimeError:
            return False
        self._process, self._late = os.getpid(), _Mark()
        self._late.passed = True
        return True

    def _run(self, waiting):
        while True:
            item = waiting.get()
            if isinstance(item, _Mark):
                item.passed = True
            else:
                self._write(item)

    def _write(self, data):
        with contextlib.suppress(OSError):
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:  # Another process made the descriptor so.
                    select.select([], [self._descriptor], [], 1.0)


def _may_block(stream) -> bool:
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)


@contextlib.contextmanager
def best_effort_errors() -> Iterator[None]:
    """Makes writing to `sys.stderr` never fail or block inside the block.

    A standard stream that is closed is opened on the null device: the next file that is opened
    would take its number, and libraries write to that number.
    """
    # A new descriptor takes the lowest free number, which is this one, as the numbers ascend.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    before = sys.stderr
    sys.stderr = BestEffort(before if before is not None else open(os.devnull, "w"))
    try:
        yield
    finally:
        sys.stderr.flush()
        sys.stderr = before


def flush_or_exit(status: int) -> None:
    """Flushes `sys.stdout`; ends the process with `status` if nobody reads it.

    The end of Python would wait for the reader, with signals at their defaults.
    """
    thread = threading.Thread(target=_flush, args=(sys.stdout,), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # No more threads.
        return
    thread.join(PATIENCE_SECONDS)
    if thread.is_alive():
        os._exit(status)


def _flush(stream):
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()


LOGGER = logging.getLogger("sparse_dataflow")


class _Printer(logging.Handler):
    """Prints records above a progress bar, unless the root logger has handlers, which get them.

    Some libraries give it the handler of `logging.basicConfig()` by accident; that one is left out.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one record; an error of the stream is ignored."""
        chosen = [h for h in logging.getLogger().handlers if not _is_default(h)]
        LOGGER.propagate = bool(chosen)  # Is read after this handler.
        if chosen or sys.stderr is None:
            return
        try:
            warning = "warning: " if record.levelno >= logging.WARNING else ""
            text = f"{warning}{record.getMessage()}"
            text = printable(shortened(text, _LONGEST // 2, _LONGEST // 4))
            write_line(text)
        except (OSError, RuntimeError, ValueError):
            return


def write_line(text: str) -> None:
    """Writes a line to standard error, above the progress bars of tqdm if there are any."""
    bars = sys.modules.get("tqdm")
    if bars is not None:
        bars.tqdm.write(text, file=sys.stderr)
    else:
        print(text, file=sys.stderr)
    sys.stderr.flush()


def _is_default(handler):
    """Returns whether a handler is that of `logging.basicConfig()` without a format."""
    pattern = getattr(handler.formatter, "_fmt", None)
    return type(handler) is logging.StreamHandler and pattern == logging.BASIC_FORMAT


def print_information() -> None:
    """Makes the package print; a level that the program has set stays."""
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    if not any(isinstance(handler, _Printer) for handler in LOGGER.handlers):
        LOGGER.addHandler(_Printer())


def print_text(text: str, end: str = "\n") -> None:
    """Prints text that a model or somebody else made; a terminal gets no control characters."""
    print(printable(text) if sys.stdout.isatty() else text, end=end, flush=True)


def is_quiet() -> bool:
    """Returns whether information is not wanted."""
    return LOGGER.level > logging.INFO


def be_quiet() -> None:
    """Leaves warnings, errors and results alone."""
    LOGGER.setLevel(logging.WARNING)


def markdown(head: Sequence[str], rows: Iterable[Sequence]) -> str:
    """Returns a Markdown table."""
    first, *others = (f"| {' | '.join(map(str, line))} |" for line in (head, *rows))
    return "\n".join([first, f"|{'---|' * len(head)}", *others])


def aligned(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Returns lines of cells in columns: the first `left` columns flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Writes rows that have the same columns; at least one."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
