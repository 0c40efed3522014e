"""Files to whose end lines are appended, such as metrics.jsonl.

A checkpoint promises the lines of the steps before it. So whoever finishes one calls `flush` first,
and whoever appends lines that belong to a run's state does so with an `AppendedFile`.
"""

import contextlib
import os
import threading
from pathlib import Path
from typing import IO

from sparse_dataflow.files import storage

_unflushed: set[Path] = set()
_lock = threading.Lock()


class AppendedFile:
    """A file to whose end any thread may append lines."""

    def __init__(self, path: Path):
        """Opens nothing yet."""
        self.path = path
        self._file: IO[bytes] | None = None
        self._writing = threading.Lock()

    def append(self, line: bytes) -> None:
        """Appends a line; ends an incomplete one first, which a killed process left.

        Raises:
          OSError: it cannot be written, or not whole; the next call opens the file again.
        """
        with self._writing:
            try:
                if self._file is None:
                    self._file = storage.open_regular(self.path, "a+b")
                    if self._file.seek(0, os.SEEK_END) and not _ends_with_newline(self._file):
                        self._file.write(b"\n")
                # Noted before the write, so that a flush in between does not miss it.
                with _lock:
                    _unflushed.add(self.path)
                self._file.write(line + b"\n")
                self._file.flush()
            except OSError:
                file, self._file = self._file, None
                if file is not None:
                    with contextlib.suppress(OSError):
                        file.close()
                raise

    def close(self) -> None:
        """Flushes the lines to disk and closes the file; raises OSError if that fails."""
        with self._writing:
            file, self._file = self._file, None
            if file is not None:
                with contextlib.closing(file):
                    os.fsync(file.fileno())
                with _lock:
                    _unflushed.discard(self.path)


def _ends_with_newline(file: IO[bytes]) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read() == b"\n"


def flush() -> None:
    """Flushes the lines that this process has appended to disk.

    Raises:
      OSError: a file cannot be flushed; the next call flushes it again.
    """
    with _lock:
        # Cleared before the flush: a line that is appended meanwhile notes its path again, and is
        # not lost.
        paths = set(_unflushed)
        _unflushed.clear()
    try:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # Its folder was deleted or moved.
                with storage.open_regular(path, "ab") as file:
                    os.fsync(file.fileno())
                storage.flush_folder(path.parent)
    except OSError:
        with _lock:
            _unflushed.update(paths)
        raise
