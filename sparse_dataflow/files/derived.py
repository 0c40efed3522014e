"""Derived files: what is computed once and used again, named by everything that made it.

`origin` holds all that decides the content, as data: settings as whole dataclasses, digests of
what was read, and the version of the code.  Its digest is part of the file's name, so that a change
of any of them leads to another file.

A derived file or folder has a record beside it, `NAME.record`, with `origin`, the sizes and the
SHA-256 of all bytes.  Both are flushed before they get their names, the record last.  A reader
compares the bytes with the record; what is damaged is logged and made again.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from sparse_dataflow.files import json_files, manifest, storage
from sparse_dataflow.files.errors import escaped, first_line
from sparse_dataflow.files.json_files import JsonObject

LARGE = 2**30
"""Bytes of a file that is not read again while its size, time of change and inode are those of its
record.  A smaller one is read once by each process.  So a bit that a disk loses in a large file
without a write is not noticed."""

_LOG = logging.getLogger(__name__)
_RECORD = ".record"
_VERIFIED: dict[tuple, str] = {}
"""SHA-256 of the files that this process read, by their path and state."""


def as_data(value: object) -> object:
    """Returns `origin` as JSON data; dataclasses are taken whole, by their fields.

    Raises:
      TypeError: a value is neither data nor a dataclass, so it might not say all that it decides.
    """
    if isinstance(value, bytes):
        # Of bytes the digest: an origin is stored in the record, which is read often.
        return {"bytes": hashlib.sha256(value).hexdigest()}
    if isinstance(value, float):
        # JSON has no infinity.
        return value if math.isfinite(value) else repr(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # Fields without `compare` decide nothing, as a field of a cache.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field.name for field in dataclasses.fields(value) if field.compare)
        return {type(value).__qualname__: {name: as_data(getattr(value, name)) for name in fields}}
    if isinstance(value, Mapping):
        # Pairs, as keys of JSON are texts: 1 and "1" would have one name.
        return sorted([as_data(key), as_data(item)] for key, item in value.items())
    if isinstance(value, Sequence):
        return [as_data(item) for item in value]
    if isinstance(value, frozenset | set):
        return sorted(map(as_data, value), key=json.dumps)
    raise TypeError(f"{type(value).__name__} is no data that a derived file is named by")


def key(origin: object) -> str:
    """Returns the SHA-256 (hex) of everything that made a derived file."""
    return hashlib.sha256(json.dumps(as_data(origin)).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Derived:
    """A verified file or folder.

    Attributes:
      facts: JSON-able data that its maker returned.
    """

    path: Path
    facts: JsonObject


def place(store: Path, name: str, origin: object, suffix: str = "") -> Path:
    """Returns the path of a derived file; arguments as in `derive`."""
    return store / f"{name}-{key(origin)[:32]}{suffix}"


Make = Callable[[Path], JsonObject | None]
"""Writes a file or folder at a path; returns JSON-able facts of it."""


def derive(
    store: Path,
    name: str,
    origin: object,
    make: Make,
    suffix: str = "",
    lock: Callable[[], AbstractContextManager] | None = None,
) -> Derived:
    """Returns the derived file of a store; makes it if it is missing or damaged.

    Args:
      store: folder, made when needed.
      name: begins the file's name, for people.
      origin: see the module.
      make: called with a temporary path. Under a lock this is the same path for each maker, and has
        what a killed one left there.
      suffix: end of the file's name.
      lock: of the makers; without one, two makers at once do the same work.

    Raises:
      OSError: it cannot be written.
    """
    path = place(store, name, origin, suffix)
    if (facts := read(path, origin)) is not None:
        return Derived(path, facts)
    with lock() if lock else contextlib.nullcontext():
        # Another maker may have finished while this one waited for the lock.
        if lock and (facts := read(path, origin)) is not None:
            return Derived(path, facts)
        _make_folder(store)
        owner = "" if lock else f".{uuid.uuid4().hex[:8]}"
        partial = path.with_name(f".{path.name}{owner}.partial")
        try:
            return Derived(path, write(partial, path, origin, make(partial) or {}))
        finally:
            if not lock:
                remove(partial)


def value(
    store: Path,
    name: str,
    origin: object,
    compute: Callable[[], JsonObject],
    lock: Callable[[], AbstractContextManager] = contextlib.nullcontext,
) -> JsonObject:
    """Returns what `compute` returned once for the same `origin`, JSON-able.

    Where it cannot be kept, as on a full disk, this is logged and the value is returned.
    """
    path = place(store, name, origin)
    if (stored := read(path, origin)) is not None:
        return stored
    facts = compute()
    try:
        with lock():
            _make_folder(store)
            _write_record(path, origin, facts, {})
    except Exception as error:
        _LOG.warning("%s is not kept: %s", escaped(str(path)), first_line(error))
    return facts


def read(path: Path, origin: object) -> JsonObject | None:
    """Returns the facts of a file or folder, or of a record alone, that is whole and was made from
    the same; None if there is none, after a line in the log if it is damaged."""
    try:
        return storage.retry(f"Reading {path}", lambda: _read(path, origin))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, manifest.Damaged) as error:
        _LOG.warning("%s is damaged, and is made again: %s", escaped(str(path)), first_line(error))
        return None


def write(partial: Path, path: Path, origin: object, facts: JsonObject) -> JsonObject:
    """Gives a complete file or folder its name, after its bytes are on disk, and then its record.

    Returns:
      `facts`, or those of another maker who was faster and whose file stays.

    Raises:
      OSError: it cannot be written.
    """
    files = storage.retry(f"Flushing {partial}", lambda: _flushed(partial))

    def name_it():
        for place in (path, record_of(path)):
            if place.is_dir() or partial.is_dir():  # Neither replaces the other.
                remove(place)
        partial.replace(path)

    # Under one lock, so that the file and its record are of the same maker.
    with _alone(path.parent):
        # A faster maker's file stays, because readers may have opened it already.
        with contextlib.suppress(OSError, ValueError, manifest.Damaged):
            faster = _read(path, origin)
            remove(partial)
            return faster
        storage.retry(f"Naming {path}", name_it)
        _write_record(path, origin, facts, files)
    return facts


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Makes others wait who name files in a folder, where its file system has locks."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    descriptor = storage.retry(f"Opening {folder}", lambda: os.open(folder, flags))
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _flushed(partial: Path) -> dict[str, JsonObject]:
    files = manifest.flushed(_files(partial))
    if partial.is_dir():
        for parent, _, _ in os.walk(partial):
            storage.flush_folder(Path(parent))
    return files


def _make_folder(folder: Path) -> None:
    storage.retry(f"Making {folder}", lambda: folder.mkdir(parents=True, exist_ok=True))


def remove(path: Path) -> None:
    """Removes a file or folder; does nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def record_of(path: Path) -> Path:
    """Returns the path of the record of a derived file."""
    return path.with_name(path.name + _RECORD)


def digest(path: Path) -> str:
    """Returns the SHA-256 (hex) of all bytes of a file; read once by a process for each state."""
    status = path.stat()
    state = (os.fspath(path), status.st_dev, status.st_ctime_ns, *_state(status))
    if state not in _VERIFIED:
        with storage.open_regular(path) as file:
            _VERIFIED[state] = hashlib.file_digest(file, "sha256").hexdigest()
    return _VERIFIED[state]


def file_state(path: Path) -> tuple[int, int, int]:
    """Returns what changes whenever a file of others is written: its size and both its times.

    No program can set the second one (ctime).  An inode is none of it: some file systems number
    files anew when they are mounted.
    """
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _state(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _read(path, origin):
    body = manifest.parse(json_files.read_bytes(record_of(path), manifest.MAX_BYTES))
    facts, named = body["facts"], body["files"]
    if facts.get("origin") != as_data(origin) or not isinstance(facts.get("facts"), dict):
        raise manifest.Damaged("its record is of another file")
    if not named:
        return facts["facts"]
    files = _files(path)
    if files.keys() != named.keys():
        raise manifest.Damaged("files are missing or added")
    moved = False
    for name, entry in named.items():
        state = _state(files[name].stat())
        if state[0] != entry["size"]:
            raise manifest.Damaged(f"{state[0]} bytes instead of {entry['size']}")
        if state[0] > LARGE and state == entry.get("state"):
            continue
        if digest(files[name]) != entry["sha256"]:
            raise manifest.Damaged("its bytes have changed")
        moved |= state[0] > LARGE
    # A copy has another inode and time.  They are noted, so the next read does not hash it again.
    if moved:
        with contextlib.suppress(OSError):
            _write_record(path, origin, facts["facts"], named)
    return facts["facts"]


def _write_record(path, origin, facts, files) -> None:
    def write_it():
        places = _files(path) if files else {}
        states = {name: {"state": _state(place.stat())} for name, place in places.items()}
        entries = {name: entry | states[name] for name, entry in files.items()}
        storage.replace(record_of(path), manifest.text(body, entries))

    body = {"origin": as_data(origin), "facts": dict(facts)}
    storage.retry(f"Writing {record_of(path)}", write_it)


def _files(path: Path) -> dict[str, Path]:
    """Returns the files of a folder by their names, or a file by ""."""
    return manifest.files(path) if path.is_dir() else {"": path}
