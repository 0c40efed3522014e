"""Addresses of object stores, such as gs://bucket/run, through the library fsspec.

What comes from a store is compared with its listing: bytes, and the checksum where there is one.
Only a store that says so has no such object; another answer is retried, then named.

A store has no folders, no rename and no locks: names are keys, and an object is written whole or
not at all. Libraries raise errors of any type; here all become an `OSError` with the address.
"""

import base64
import contextlib
import errno
import functools
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_dataflow.files import storage
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


def address_refusal(text: str, legal: bool = True) -> str:
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
    # "::" chains file systems in fsspec, as in zip://...::s3://..., and ".." parts lead elsewhere.
    if "://" in rest or "::" in text or {"", ".", ".."} & set(parts):
        return f"is not legal: one address without empty, . and .. parts, such as {LEGAL}."
    return ""


def local_path(name: str, place: str | os.PathLike) -> Path:
    """Returns the path on this machine that a place to write names, with the home folder for ~.

    Args:
      name: of the argument, for the message.

    Raises:
      UserError: it is an address, or a path that was made of one.
    """
    text = normal(os.fspath(place))
    if reason := address_refusal(text, legal=False):
        raise UserError(f"{name}={text[:80]} {reason}")
    return Path(text).expanduser()


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
      checksum: (name of a hash function, its digest in hex); None where the store has none.
    """

    size: int
    version: str
    checksum: tuple[str, str] | None = None


def _retried(method: Callable) -> Callable:
    """Returns a method that is called again while the store is busy."""

    @functools.wraps(method)
    def call(self, *arguments):
        return storage.retry(f"Reading {self}", lambda: method(self, *arguments))

    return call


@dataclass(frozen=True)
class Address:
    """An address of one object, or of all whose names begin with it and a slash.

    All methods raise OSError: FileNotFoundError if the object or the bucket is missing,
    PermissionError, FileExistsError, else one whose text is the library's. The libraries retry what
    fails for a moment, for about ten seconds; reading is retried here as well.

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

    @_retried
    def entry(self) -> Entry | None:
        """Returns the object of this very name; None if the store says that there is none."""
        try:
            with self._opened() as (store, path):
                facts = store.info(path)
                return _entry(facts) if facts["type"] == "file" else None
        except FileNotFoundError:
            return None

    @_retried
    def entries(self) -> dict[str, Entry]:
        """Returns {name relative to this address: object} of all objects below it, sorted."""
        with self._opened() as (store, path):
            store.invalidate_cache()
            listed = store.find(path, detail=True)
            below = path.rstrip("/") + "/"
            names = {name: facts for name, facts in listed.items() if name.startswith(below)}
            return {
                # A page of links says no sizes.
                name.removeprefix(below): _entry(
                    store.info(name) if facts["size"] is None else facts
                )
                for name, facts in sorted(names.items())
                if not name.endswith("/")
            }

    def read(self) -> bytes:
        """Returns the content of a small object; one of more than `MAX_BYTES` is not read."""
        entry = self._listed()
        if entry.size > MAX_BYTES:
            reason = f"it has {entry.size} bytes; legal: {MAX_BYTES}"
            raise OSError(errno.EPROTO, reason, self.text)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "object")
            self.download(file, entry)
            return file.read_bytes()

    def _listed(self) -> Entry:
        """Returns the object of this very name, which is there."""
        entry = self.entry()
        if entry is None:
            reason = "there is no such object or bucket"
            raise FileNotFoundError(errno.ENOENT, reason, self.text)
        return entry

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
            # File systems of fsspec that do not know the mode raise one of these errors.
            try:
                store.pipe_file(path, content, mode="create")
            except (NotImplementedError, TypeError, ValueError):
                store.pipe_file(path, content)

    def upload(self, file: Path) -> None:
        """Copies a file of this machine to this object."""
        with self._opened() as (store, path):
            store.put_file(str(file), path)

    @_retried
    def download(self, file: Path, entry: Entry | None = None) -> None:
        """Copies this object to a file, whose folder is made; a partial one is removed.

        All objects come from a store here.

        Args:
          file: where it goes.
          entry: what the store lists, which is asked where it is None; an object of another size
            or checksum is refused.
        """
        listed = entry or self._listed()
        file.parent.mkdir(parents=True, exist_ok=True)
        # Hidden and in the same folder, so that the rename is atomic and no reader takes a part for
        # the whole.
        partial = file.with_name(f".{file.name}.partial"[-255:])
        try:
            with self._opened() as (store, path):
                from fsspec.callbacks import Callback

                class Bound(Callback):
                    """Stops an object that has no end."""

                    def relative_update(self, inc=1):
                        super().relative_update(inc)
                        if self.value > listed.size:
                            raise OSError(f"it sends more than the {listed.size:,} bytes it lists")

                    def absolute_update(self, value):
                        self.relative_update(value - self.value)

                # Bytes are counted as they are listed, and not compressed on the way.
                web = path.startswith(("http://", "https://"))
                options = {"headers": {"Accept-Encoding": "identity"}} if web else {}
                store.get_file(path, str(partial), callback=Bound(), **options)
                _compare(partial, listed)
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
            reason = missing_library(self.text) or _reason(error)
            cause = _cause(error)
            # A library that could not even ask says "not found" too; only the store's answer
            # counts.
            if kind is FileNotFoundError and cause is not None:
                kind, number, reason = OSError, errno.EPROTO, _reason(cause)
            status = _status(error)
            if status in (401, 403):
                kind, number = PermissionError, errno.EACCES
            # Of errors of this machine's own disk, the number says what to do.
            if kind is OSError and number not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                number = errno.EPROTO
            # Busy stores get a transient number, so that `storage.retry` tries again.
            # A transient number, so that `storage.retry` asks again.
            if status in _BUSY or (status is not None and status >= 500):
                number, reason = errno.EAGAIN, f"the store answers {status} ({reason})"
            raise kind(number, reason, self.text) from error


_ABSENT, _BUSY = (404, 410), (408, 425, 429)
"""Statuses of HTTP of an object that is not there, and of a store that asks to be asked again."""


def _status(error: BaseException) -> int | None:
    """Returns the status of HTTP that a store answered; None where the error names none."""
    for each in storage.causes(error):
        response = getattr(each, "response", None)
        if isinstance(response, dict):  # Of botocore.
            return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        for owner, name in (
            *((each, "status"), (each, "status_code"), (response, "status_code"), (each, "code")),
        ):
            number = getattr(owner, name, None)
            if isinstance(number, int) and 400 <= number < 600:
                return number
    return None


def _cause(error: BaseException) -> BaseException | None:
    """Returns why a store did not say whether it has an object; None if it said that it has not.

    Libraries raise FileNotFoundError for any failure of a question.
    """
    status = _status(error)
    for each in storage.causes(error):
        if isinstance(each, FileNotFoundError):
            continue
        if status is None and isinstance(each, OSError | TimeoutError):
            return each
        if status is not None and status not in _ABSENT:
            return each
    return None


def _compare(file: Path, entry: Entry) -> None:
    """Raises OSError where a file is not what a store lists."""
    size = file.stat().st_size
    if size != entry.size:
        raise OSError(f"it has {size:,} bytes, and {entry.size:,} in the listing")
    if entry.checksum:
        name, expected = entry.checksum
        with storage.open_regular(file) as content:
            if hashlib.file_digest(content, name).hexdigest() != expected:
                raise OSError(f"its {name} is not that of the listing")


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
    if facts["size"] is None:
        raise OSError("the store does not tell its size")
    checksum = None
    if text := facts.get("md5Hash"):  # Of Google's store; an ETag need not be a checksum.
        checksum = ("md5", base64.b64decode(text).hex())
    return Entry(int(facts["size"]), version, checksum)


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
        # A bucket may hold names that lead out of the folder.
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
    for name, entry in missing.items():
        (address / name).download(folder / name, entry)
