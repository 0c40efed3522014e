"""Addresses of object stores, such as gs://bucket/run, through the library fsspec.

A store has no folders, no rename and no locks: names are keys, and an object is written whole or
not at all. Libraries raise errors of any type; here all become an `OSError` with the address.
"""

import contextlib
import errno
import hashlib
import importlib.util
import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_dataflow.files.errors import UserError, first_line

LEGAL = "gs://BUCKET/PATH, s3://BUCKET/PATH or another address that fsspec knows"
EXTRA = "buckets"
"""Extra of this package that installs the libraries of gs:// and s3://."""

MAX_BYTES = 2**26
"""Bytes of a small object, such as a manifest, far above any that a run writes."""

_PIECE = 2**24
"""Bytes that are in memory at once while an object is hashed."""

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://(.*)", re.S)
_ONE_SLASH = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/(?!/)|(gs|gcs|s3|az|abfs|abfss):(?!/)", re.I)
_HUB = re.compile(
    r"(?:hf://|https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)(?!(?:datasets|spaces|buckets)/)"
    r"([^/@?#]+/[^/@?#]+)(?:@([^?#]+)|/tree/([^?#]+?))?/?(?:[?#].*)?"
)
_LOCAL = ("file", "local")
_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "oid", "LastModified", "last_modified",
             "updated", "mtime")  # fmt: skip
"""What stores call that by which an object of the same size is known to be another."""


def is_address(text: str) -> bool:
    """Returns whether a text is an address rather than a path."""
    return _SCHEME.fullmatch(text) is not None


def refusal(text: str, legal: bool = True) -> str:
    """Returns why a text is neither a path nor a legal address; "" where it is one of them.

    Nothing is imported or reached, so that a saved config can be read on any machine.

    Args:
      text: path or address.
      legal: whether an address is legal.

    Returns:
      Words that complete "NAME=TEXT ".
    """
    if match := _ONE_SLASH.match(text):
        return (
            f"is neither an address nor a clear path; legal: {(match[1] or match[2])}://... for an "
            f"address, ./{text[:40]} for a path of that name."
        )
    match = _SCHEME.fullmatch(text)
    if match is None:
        if "://" in text:
            return f"is not legal: one address, such as {LEGAL}."
        return ""
    scheme, rest = match[1].lower(), match[2]
    if scheme in _LOCAL:
        return f"is a path on this machine; write it as one, such as /{rest.lstrip('/')}."
    if not legal:
        return "is an address; legal: a path on this machine."
    if scheme == "memory":
        return "is the memory of this process and ends with it; legal: " + LEGAL + "."
    if re.match(r"[^/@]*:[^/@]*@", rest):
        return "holds a password; legal: credentials in the environment or in the store's files."
    parts = rest.removesuffix("/").split("/")
    if not parts[0]:
        return f"names no bucket; legal: {scheme}://BUCKET/PATH."
    if "://" in rest or "::" in text or {"", ".", ".."} & set(parts):
        return f"is not legal: one address without empty, . and .. parts, such as {LEGAL}."
    return ""


def normal(text: str) -> str:
    """Returns an address in one spelling, that of file:///PATH being the path; else the text.

    That of a model on the Hugging Face hub, as its page or hf://OWNER/NAME, is hf:OWNER/NAME.
    """
    if match := _HUB.fullmatch(text):
        revision = match[2] or match[3]
        return f"hf:{match[1]}" + f"@{revision}" * bool(revision)
    match = _SCHEME.fullmatch(text)
    if match is None:
        return text
    scheme, rest = match[1].lower(), match[2]
    if scheme in _LOCAL and rest.startswith("/"):
        return rest
    return f"{scheme}://{rest.removesuffix('/') or rest}"


def missing_library(text: str) -> str:
    """Returns why no library here opens an address; "" if there is one. Completes "NAME=TEXT "."""
    match = _SCHEME.fullmatch(text)
    if match is None:
        return ""
    scheme = match[1].lower()
    from fsspec.registry import known_implementations, registry

    if scheme in registry:
        return ""
    known = known_implementations.get(scheme)
    if known is None:
        return f"is of no kind that fsspec knows; legal: {LEGAL}."
    package = known["class"].partition(".")[0]
    if package == "fsspec" or importlib.util.find_spec(package):
        return ""
    install = f"'sparse_dataflow[{EXTRA}]'" if package in ("gcsfs", "s3fs") else package
    return f"needs the package {package}: pip install {install}."


@dataclass(frozen=True)
class Entry:
    """An object of a listing.

    Attributes:
      size: bytes.
      version: changes with the content; "" where the store names none.
    """

    size: int
    version: str


@dataclass(frozen=True)
class Address:
    """An address of one object, or of all whose names begin with it and a slash.

    All methods raise OSError: FileNotFoundError if the object or the bucket is missing,
    PermissionError, FileExistsError, else one whose text is the library's. The libraries retry what
    fails for a moment, for about ten seconds.

    Attributes:
      text: the address, without a slash at its end.
    """

    text: str

    def __post_init__(self):
        object.__setattr__(self, "text", self.text.removesuffix("/"))

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, name: str) -> "Address":
        return Address(f"{self.text}/{name}")

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> "Address":
        """The address without its last part."""
        return Address(self.text.rpartition("/")[0])

    def entry(self) -> Entry | None:
        """Returns the object of this very name; None if there is none."""
        with self._opened() as (store, path):
            try:
                facts = store.info(path)
            except FileNotFoundError:
                return None
            return _entry(facts) if facts["type"] == "file" else None

    def entries(self) -> dict[str, Entry]:
        """Returns {name relative to this address: object} of all objects below it, sorted."""
        with self._opened() as (store, path):
            store.invalidate_cache()
            listed = store.find(path, detail=True)
            below = path.rstrip("/") + "/"
            names = {name: facts for name, facts in listed.items() if name.startswith(below)}
            return {
                name.removeprefix(below): _entry(facts)
                for name, facts in sorted(names.items())
                if not name.endswith("/")
            }

    def read(self) -> bytes:
        """Returns the content of a small object; one of more than `MAX_BYTES` is not read."""
        with self._opened() as (store, path):
            if (size := store.info(path)["size"]) > MAX_BYTES:
                raise OSError(f"it has {size} bytes; legal: {MAX_BYTES}")
            return store.cat_file(path)

    def sha256(self, size: int) -> str:
        """Returns the SHA-256 (hex) of the first `size` bytes, read back from the store."""
        digest = hashlib.sha256()
        with self._opened() as (store, path):
            for start in range(0, size, _PIECE):
                digest.update(store.cat_file(path, start=start, end=min(size, start + _PIECE)))
        return digest.hexdigest()

    def write(self, content: bytes) -> None:
        """Writes a small object; one that is there is replaced."""
        with self._opened() as (store, path):
            store.pipe_file(path, content)

    def create(self, content: bytes) -> None:
        """Writes a small object; FileExistsError if it is there, in stores that can tell."""
        with self._opened() as (store, path):
            try:
                store.pipe_file(path, content, mode="create")
            except (NotImplementedError, TypeError, ValueError):
                store.pipe_file(path, content)

    def upload(self, file: Path) -> None:
        """Copies a file of this machine to this object."""
        with self._opened() as (store, path):
            store.put_file(str(file), path)

    def download(self, file: Path) -> None:
        """Copies this object to a file, whose folder is made; a partial one is removed."""
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.partial"[-255:])
        try:
            with self._opened() as (store, path):
                store.get_file(path, str(partial))
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)

    def delete(self) -> None:
        """Deletes the object if it is there."""
        with self._opened() as (store, path), contextlib.suppress(FileNotFoundError):
            store.rm_file(path)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Any, str]]:
        """Yields (fsspec file system, path in it); turns any error into an OSError."""
        try:
            from fsspec.core import url_to_fs

            # It warns before each operation and prints traces of errors that are reported here.
            logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
            yield url_to_fs(self.text, use_listings_cache=False)
        except MemoryError:
            raise
        except Exception as error:
            kinds = (FileNotFoundError, PermissionError, FileExistsError)
            kind = next((kind for kind in kinds if isinstance(error, kind)), OSError)
            number = _NUMBERS.get(kind, getattr(error, "errno", None) or errno.EPROTO)
            # Of errors of this machine's own disk, the number says what to do.
            if kind is OSError and number not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                number = errno.EPROTO
            reason = missing_library(self.text) or _reason(error)
            raise kind(number, reason, self.text) from error


_NUMBERS: dict[type, int] = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
}


def _reason(error) -> str:
    words = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    if isinstance(error, FileNotFoundError) and " " not in words:  # Of gcsfs, a URL.
        return "there is no such object or bucket"
    return words.rstrip(".")


def _entry(facts) -> Entry:
    version = next((str(facts[name]) for name in _VERSIONS if facts.get(name)), "")
    return Entry(int(facts["size"] or 0), version)


def fetch(address: Address, entries: dict[str, Entry], folder: Path) -> None:
    """Copies objects into a folder, except those that are there in whole.

    Args:
      address: what the names are relative to.
      entries: name -> object.

    Raises:
      UserError: a name is not one of a file below the folder, or the disk has too little room.
      OSError: an object cannot be read, or a file cannot be written.
    """
    for name in entries:
        if {"", ".", ".."} & set(name.split("/")) or "\0" in name:
            raise UserError(f"{address} holds {name[:60]!r}, which no file can be called.")
    missing = {
        name: entry
        for name, entry in entries.items()
        if not (folder / name).is_file() or (folder / name).stat().st_size != entry.size
    }
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = sum(entry.size for entry in missing.values()), shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{address} has {needed / 2**30:,.1f} GiB, and {folder} has room for "
            f"{free / 2**30:,.1f}; name another cache folder with XDG_CACHE_HOME."
        )
    for name in missing:
        (address / name).download(folder / name)
