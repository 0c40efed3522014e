"""The cache folder of the data, and arrays in files.

What is prepared there are derived files (`files/derived.py`), made under a lock that the operating
system releases when its process dies.

Arrays are read slice by slice, not memory-mapped: a storage failure under a mapped page kills the
process (SIGBUS), but a failed read can be retried.
"""

import contextlib
import errno
import functools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sparse_dataflow.files import derived, folders, storage
from sparse_dataflow.files.derived import Derived, Make
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_files import JsonObject

FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "sparse_dataflow"
"""Default cache folder of prepared corpora, tokenizers and tokens."""

_STORAGE_ERRORS = storage.TRANSIENT | {
    errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.EFBIG, errno.ENAMETOOLONG, errno.ENOSPC,
    errno.ENOTDIR, errno.EPERM, errno.EROFS,
}  # fmt: skip


_FOLDERS = {"downloads", "locks", "texts", "tfds", "tokenizers", "tokens"}


def _is_older_cache(folder: Path) -> bool:
    """Whether it is a cache of a version that left no mark: such folders, and nothing else."""
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    # Chained: "locks" is one of the names, and each name is one of _FOLDERS.
    return "locks" in names <= _FOLDERS and len(names) == len(os.listdir(folder))


def resolved(folder: str | os.PathLike) -> Path:
    """Returns a cache folder with `~` expanded.

    Raises:
      UserError: this user has no home folder.
    """
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise UserError(
            "This user has no home folder for the data cache; set XDG_CACHE_HOME."
        ) from None


@contextlib.contextmanager
def exclusive(cache_dir: Path, key: str) -> Iterator[None]:
    """Holds the lock `key` of the cache folder, and creates the folder if needed.

    Raises:
      UserError: the folder holds other files or cannot be written, or its disk is full, at the
        lock or in the block.
    """
    import filelock

    locks = cache_dir / "locks"
    lock = filelock.FileLock(locks / (re.sub(r"[^\w.-]+", "_", key) + ".lock"))

    folders.claim(cache_dir, "data cache", "XDG_CACHE_HOME or cache_dir", accept=_is_older_cache)

    def acquire():
        locks.mkdir(parents=True, exist_ok=True)
        return lock.acquire()

    try:
        acquired_lock = storage.retry(f"Locking {lock.lock_file}", acquire)
    except OSError as error:
        raise _cannot_write(cache_dir, error) from error
    try:
        with acquired_lock:
            yield
    except OSError as error:
        if error.errno not in _STORAGE_ERRORS:
            raise
        raise _cannot_write(cache_dir, error) from error


def _cannot_write(cache_dir: Path, error: OSError) -> UserError:
    return UserError(
        f"The data cache {cache_dir} cannot be written ({error.strerror or error}). "
        "Free disk space, or name a writable folder with XDG_CACHE_HOME."
    )


def derive(
    cache_dir: Path, kind: str, name: str, origin: object, make: Make, suffix: str = ""
) -> Derived:
    """Returns a derived file of the cache; see `derived.derive`.

    What is there is read from a cache that cannot be written, too.

    Args:
      kind: folder of the cache.
      make: is called again after a transient error, and goes on with what a killed process left.

    Raises:
      UserError: it must be made, and the cache cannot be written.
    """
    cache_dir = resolved(cache_dir)
    lock = f"{kind}-{name}-{derived.key(origin)[:32]}"

    def retried(partial):
        return storage.retry(f"Writing {partial}", lambda: make(partial))

    return derived.derive(
        cache_dir / kind, name, origin, retried, suffix, lambda: exclusive(cache_dir, lock)
    )


def remembered(
    cache_dir: Path,
    kind: str,
    name: str,
    origin: object,
    compute: Callable[[], JsonObject],
) -> JsonObject:
    """Returns `derived.value` in the cache, which need not be writable."""
    cache_dir = resolved(cache_dir)
    lock = f"{kind}-{name}-{derived.key(origin)[:32]}"
    return derived.value(
        cache_dir / kind, name, origin, compute, lambda: exclusive(cache_dir, lock)
    )


def file_digest(path: Path, cache_dir: Path) -> str:
    """Returns the SHA-256 (hex) of all bytes of a file of others.

    It is read again when its size or one of its times has changed.
    """
    with storage.told(f"reading {path}"):
        # By another name it is the same file, and is not read again.
        state = {"path": os.path.realpath(path), "state": derived.file_state(path)}
        compute = lambda: {"sha256": derived.digest(path)}  # noqa: E731
        return str(remembered(cache_dir, "files", "digest", state, compute)["sha256"])


@dataclass(eq=False)
class StoredArray:
    """A read-only array in a file; `array[first:last]` reads a slice.

    Reads retry transient storage errors, then raise UserError.

    Attributes:
      path: file, which must not change.
      dtype: dtype of the items.
      count: number of items.
      offset: bytes in the file before the first item.
      digest: SHA-256 (hex) of all bytes of the file; "" if unknown.
    """

    path: Path
    dtype: np.dtype
    count: int
    offset: int
    digest: str = ""
    _handle: "_Handle | None" = field(default=None, init=False, repr=False)

    @classmethod
    def open(cls, path: Path) -> "StoredArray":
        """Opens a one-dimensional array in a .npy file of version 1.0.

        Raises:
          OSError: the file cannot be read.
          Exception: the file is not such an array, or is truncated. numpy parses the header as a
            Python literal, which can raise any error.
        """
        return storage.retry(f"Reading {path}", lambda: cls._open(path))

    @classmethod
    def _open(cls, path):
        with storage.open_regular(path) as file:
            version = np.lib.format.read_magic(file)
            if version != (1, 0):
                raise ValueError(f"{path} is a .npy file of version {version}; legal: (1, 0)")
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            # Raises ValueError unless the array has one dimension.
            (count,), offset = shape, file.tell()
            if dtype.hasobject or file.seek(0, os.SEEK_END) < offset + count * dtype.itemsize:
                raise ValueError(f"{path} is truncated or holds Python objects")
        return cls(path, dtype, count, offset)

    @property
    def shape(self) -> tuple[int]:
        """Shape (count,)."""
        return (self.count,)

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return self.count * self.dtype.itemsize

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: slice) -> np.ndarray:
        first, last, step = index.indices(self.count)
        if step != 1:
            raise IndexError("only slices of step 1 are supported")
        size = max(0, last - first) * self.dtype.itemsize
        position = self.offset + first * self.dtype.itemsize
        content = storage.retry(f"Reading {self.path}", lambda: self._read(position, size))
        return np.frombuffer(content, self.dtype)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.array(self[:], dtype)

    def _read(self, position, size):
        pieces = []
        try:
            # A local name keeps the file open while another thread replaces the handle.
            handle = self._handle = self._handle or _Handle(self.path)
            while size > 0:
                piece = os.pread(handle.descriptor, size, position)
                if not piece:
                    raise UserError(f"{self.path} was truncated while it was read. Run again.")
                pieces.append(piece)
                size, position = size - len(piece), position + len(piece)
        except OSError as error:
            # A retry needs a new handle: handles of network file systems go stale.
            self._handle = None
            raise UserError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        return b"".join(pieces)


@dataclass(frozen=True, eq=False)
class ChainedArray:
    """Several arrays of one dtype, one after another; `array[first:last]` reads a slice."""

    arrays: "tuple[StoredArray | ChainedArray | MappedArray, ...]"

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the items."""
        return self.arrays[0].dtype

    def __len__(self) -> int:
        return sum(map(len, self.arrays))

    def __getitem__(self, index: slice) -> np.ndarray:
        first, last, step = index.indices(len(self))
        if step != 1:
            raise IndexError("only slices of step 1 are supported")
        # The empty first part is for a slice of nothing, as there must be something to join.
        slices, start = [np.empty(0, self.dtype)], 0
        for array in self.arrays:
            # Arrays outside of the slice give no items.
            slices.append(array[max(0, first - start) : max(0, last - start)])
            start += len(array)
        return np.concatenate(slices)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.array(self[:], dtype)


@dataclass(frozen=True, eq=False)
class Ranges:
    """Parts of an array, one after another; `array[first:last]` reads a slice.

    Attributes:
      ranges: first item of each part and the one after its last, int64 [parts, 2], ascending.
    """

    array: ChainedArray
    ranges: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the items."""
        return self.array.dtype

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        # Kept, so that a slice finds its parts by a binary search.
        return np.cumsum(self.ranges[:, 1] - self.ranges[:, 0])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self.ranges) else 0

    def __getitem__(self, index: slice) -> np.ndarray:
        first, last, step = index.indices(len(self))
        if step != 1:
            raise IndexError("only slices of step 1 are supported")
        pieces = [np.empty(0, self.dtype)]
        for number in range(np.searchsorted(self._ends, first, "right"), len(self.ranges)):
            start, stop = self.ranges[number]
            before = int(self._ends[number] - (stop - start))  # Items of the parts in front.
            if before >= last:
                break
            offset = int(start) - before
            pieces.append(self.array[max(first, before) + offset : min(last + offset, int(stop))])
        return np.concatenate(pieces)


@dataclass(frozen=True, eq=False)
class MappedArray:
    """Token ids of a file as the ids of a tokenizer; `array[first:last]` reads a slice.

    Attributes:
      name: of the corpus, for messages.
      array: ids of the file.
      table: the tokenizer's id of each of these, int32; empty for the same.
      vocab_size: number of the tokenizer's ids.
    """

    name: str
    array: ChainedArray | Ranges
    table: np.ndarray
    vocab_size: int

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the items."""
        return np.dtype(np.int32)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: slice) -> np.ndarray:
        """Reads a slice, of which every id is checked: files of others may change.

        Raises:
          UserError: an id is not in the vocabulary.
        """
        ids = self.array[index]
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            wrong = int(ids.max()) if ids.max() >= self.vocab_size else int(ids.min())
            raise UserError(
                f"{self.name} has the token id {wrong}, and its tokenizer has "
                f"{self.vocab_size:,} tokens; name the tokenizer that wrote it with "
                "data.tokenizer, or data.tokenizer=none with the vocabulary size in "
                "model.vocab_size."
            )
        # Only now: int32 would wrap the large ids that are refused above.
        ids = ids.astype(np.int32)
        return self.table[ids] if len(self.table) else ids

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.array(self[:], dtype)


TokenArray = np.ndarray | StoredArray | ChainedArray | MappedArray
"""Concatenated tokens, in memory or in files."""


class _Handle:
    """An open file, closed when its last reader drops it."""

    def __init__(self, path: Path):
        self.descriptor = storage.regular_descriptor(path, os.O_RDONLY)

    def __del__(self, close=os.close):  # bound here: `os` may be unloaded at interpreter exit
        if hasattr(self, "descriptor"):
            close(self.descriptor)
