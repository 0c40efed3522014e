"""A flat array in a .npy file, read a slice at a time.

It is not mapped into memory: where storage fails, looking at a mapped page ends the process
(SIGBUS), while a read that fails can be made again.
"""

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError


@dataclass(frozen=True, eq=False)
class StoredArray:
    """The array that lies in a file; `array[first:last]` reads that slice, read-only.

    Reading waits for storage that fails for a moment; where it stays away, a UserError says so.

    Attributes:
      path: of the file, which stays as it is.
      dtype: of an item.
      count: of items.
      offset: bytes in the file before the first.
    """

    path: Path
    dtype: np.dtype
    count: int
    offset: int

    @classmethod
    def open(cls, path: Path) -> "StoredArray":
        """The array of one dimension in a .npy file of version 1.0.

        Raises:
          OSError: the file cannot be read.
          Exception: it is of another kind, or shorter than it says; numpy parses its header as a
            Python literal, and raises what that raises.
        """
        return storage.retry(f"Reading {path}", lambda: cls._opened(path))

    @classmethod
    def _opened(cls, path):
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            if version != (1, 0):
                raise ValueError(f"{path} is a .npy file of version {version}")
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            (count,), offset = shape, file.tell()
            if dtype.hasobject or file.seek(0, os.SEEK_END) < offset + count * dtype.itemsize:
                raise ValueError(f"{path} is shorter than it says, or holds objects")
        return cls(path, dtype, count, offset)

    @property
    def shape(self) -> tuple[int]:
        """(count,)"""
        return (self.count,)

    @property
    def nbytes(self) -> int:
        """Of all items."""
        return self.count * self.dtype.itemsize

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, where: slice) -> np.ndarray:
        first, last, step = where.indices(self.count)
        if step != 1:
            raise IndexError("only slices without a step are read")
        size = max(0, last - first) * self.dtype.itemsize
        place = self.offset + first * self.dtype.itemsize
        content = storage.retry(f"Reading {self.path}", lambda: self._read(place, size))
        return np.frombuffer(content, self.dtype)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.array(self[:], dtype)

    @functools.cached_property
    def _held(self) -> dict[str, "_Handle"]:
        """The open file, where it is; one that failed is opened anew, as handles go stale."""
        return {}

    def _read(self, place, size):
        pieces = []
        try:
            handle = self._held.get("file") or self._held.setdefault("file", _Handle(self.path))
            while size > 0:
                piece = os.pread(handle.descriptor, size, place)
                if not piece:
                    raise UserError(f"{self.path} became shorter while it was read; run again.")
                pieces.append(piece)
                size, place = size - len(piece), place + len(piece)
        except OSError as error:
            self._held.pop("file", None)
            raise UserError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        return b"".join(pieces)


Flat = np.ndarray | StoredArray
"""Tokens one after the other, in memory or in a file."""


class _Handle:
    """An open file, closed once the last thread that reads from it has let go of it."""

    def __init__(self, path: Path):
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self, close=os.close):  # The module may be gone by then.
        if hasattr(self, "descriptor"):
            close(self.descriptor)
