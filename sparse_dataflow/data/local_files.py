"""Documents in the text files of a user: plain, JSON lines, Parquet, compressed or not."""

import functools
import logging
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sparse_dataflow.data.chat import checked_example
from sparse_dataflow.data.documents import Document, files_below, is_file, listing_digest
from sparse_dataflow.data.packed_files import (
    LONGEST_VALUE,
    local_parquet,
    needed_module,
    uncompressed,
)
from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import UserError, escaped, first_line
from sparse_dataflow.files.folders import leads_out, outside

_COMPRESSIONS = ("", ".gz", ".zst")
TEXT = tuple(f"{e}{c}" for e in (".txt", ".md", ".rst", ".py") for c in _COMPRESSIONS)
JSON = tuple(f".json{compression}" for compression in _COMPRESSIONS)
JSON_LINES = (*(f"{e}{c}" for e in (".jsonl", ".ndjson") for c in _COMPRESSIONS), *JSON)
PARQUET = (".parquet",)
SUFFIXES = TEXT + JSON_LINES + PARQUET
LEGAL_FILES = ".txt, .md, .rst, .py, .jsonl, .ndjson, .json (also .gz, .zst) or .parquet"
LEGAL_EXAMPLES = ".jsonl, .ndjson or .json (also .gz, .zst)"
"""Endings, in lower or upper case."""

LONG_TEXT = 4 * 2**20
"""Characters (bytes of a text file) from which a text is cut into several documents."""

PIECE = 2**18
"""Characters (bytes of a text file) of each of these documents, about."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalSource:
    """A file, or a folder read recursively, of text, JSON lines and Parquet.

    A text file is one document. Each line of JSON is an object with the text in a field, and each
    row of Parquet has it in a column (`chosen_column`); a row of null, empty or blank text is
    skipped, and their number said. A .json file may also be one object, or a list of them; one
    without text in a folder is skipped. Hidden files are not read. A link to a file outside of the
    folder is refused, and a link to a folder is named and not followed. Ids are paths relative to
    the folder, followed by `:line` or `:row`. A text of more than `LONG_TEXT` becomes documents of
    about `PIECE`, cut at line breaks where it has any, with ids that end in `#part`.

    Attributes:
      examples: whether each document is a prompt with its answer; only JSON lines are read then,
        and the text is `chat.checked_example` of the line.
      column: field or column with the text; "" is "text", else the only one of strings.
    """

    path: Path
    examples: bool = False
    column: str = ""

    @property
    def _root(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def _files(self) -> list[Path]:
        if not self.path.exists():
            raise UserError(
                f"The corpus {self.path} does not exist. Give a folder or file of {LEGAL_FILES}."
            )
        if not self.path.is_dir() and not is_file(self.path):
            raise UserError(f"The corpus {self.path} is neither a folder nor a regular file.")
        candidates = files_below(self.path) if self.path.is_dir() else [self.path]
        self._name_links()
        suffixes = JSON_LINES if self.examples else SUFFIXES
        files, others = [], Counter[str]()
        for path in candidates:
            if path.name.lower().endswith(suffixes):
                if path.is_symlink() and self.path.is_dir() and leads_out(self.path, path):
                    raise outside(self.path, path)
                files.append(path)
            else:
                others["".join(path.suffixes[-2:]) or path.name] += 1
        if others:
            count, endings = sum(others.values()), ", ".join(sorted(others))
            say_once(f"{self.path}: skipped {count} files: {endings}")
        if not files:
            legal = LEGAL_EXAMPLES if self.examples else LEGAL_FILES
            raise UserError(f"The corpus {self.path} has no {legal} file.")
        return files

    def refuse_empty(self, others: tuple[str, ...] = ()) -> None:
        """Refuses a path without any file that is read; the first such file ends the search.

        Args:
          others: endings of files that are read in another way.

        Raises:
          UserError: it is missing, or has none.
        """
        suffixes = (*(JSON_LINES if self.examples else SUFFIXES), *others)
        for _, folders, names in os.walk(self.path):
            folders[:] = [name for name in folders if name[0] != "."]
            if any(name[0] != "." and name.lower().endswith(suffixes) for name in names):
                return
        if not (self.path.is_file() and self.path.name.lower().endswith(others)):
            self._files()

    def _name_links(self) -> None:
        """Names folders that are links: what is below them is not read here."""
        for parent, folders, _ in os.walk(self.path):
            folders[:] = [name for name in folders if name[0] != "."]
            for path in (Path(parent, name) for name in folders):
                if path.is_symlink():
                    say_once(
                        f"{path} is a link to the folder {path.resolve()}, and is not read; give "
                        "that folder as a corpus: --corpus=A:0.5,B:0.5 mixes two"
                    )

    @property
    def files_read(self) -> object:
        """Digest of the path and of the file listing."""
        return listing_digest(Path(os.path.realpath(self.path)), self._files())

    def documents(self) -> Iterator[Document]:
        """Yields the documents in the order of their files.

        Raises:
          UserError: there is no text; a file cannot be read, is not UTF-8, or has a line without a
            JSON field "text" or of more than `LONGEST_VALUE` bytes; or a package that reads it is
            not installed.
        """
        count, root = 0, self._root
        blank: Counter[Path] = Counter()
        for path in self._files():
            relative = os.fsencode(path.relative_to(root).as_posix())
            name = relative.decode("utf-8", "backslashreplace")
            try:
                for document in _read_file(path, name, self.examples, self.column):
                    if not document.text.strip():
                        blank[path] += 1
                        continue
                    count += 1
                    yield document
            except _NoText as error:
                if self.path == path:
                    raise
                say_once(f"skipped a file: {error}")
        if blank:
            rows, files = sum(blank.values()), len(blank)
            say_once(f"{self.path}: {rows:,} rows or files of blank text skipped, in {files} files")
        if not count:
            raise UserError(f"The corpus {self.path} is empty: its files hold no text.")
        if self.examples and count == 1:
            raise UserError(
                f"The corpus {self.path} has one example; legal: two or more, as one is held out."
            )


def has_text_suffix(name: str) -> bool:
    """Returns whether a name ends as a file that `LocalSource` reads."""
    return name.lower().endswith(SUFFIXES)


@functools.cache
def say_once(text: str) -> None:
    """Logs a line; a corpus is read several times.  Names of files need not be Unicode."""
    _LOG.warning("%s", escaped(text))


class _NoText(UserError):
    """A .json file whose records have no text, such as settings of a program."""


def chosen_column(names: Sequence[str], strings: Sequence[str], column: str, place: str) -> str:
    """Returns the column with the text: `column`, else "text", else the only one of strings.

    Args:
      names: all columns.
      column: `data.column`, "" for none.
      place: for the message.

    Raises:
      UserError: there is none, or several.
    """
    if column in strings:
        return column
    if not column and ("text" in strings or ("text" not in names and len(strings) == 1)):
        return "text" if "text" in strings else strings[0]
    advice = f"; legal for data.column: {', '.join(strings)}" if strings else ""
    raise UserError(
        f'{place} has no column "{column or "text"}" of strings; its columns: '
        f"{', '.join(map(str, names))}{advice}."
    )


def _read_file(path: Path, name: str, examples: bool, column: str) -> Iterator[Document]:
    read: Callable = _read_text
    if examples:
        read = _read_examples
    elif path.name.lower().endswith(JSON_LINES):
        read = functools.partial(_read_lines, column=column)
    elif path.name.lower().endswith(PARQUET):
        read = functools.partial(_read_parquet, column=column)
    try:
        with storage.told(f"reading {path}"):
            yield from read(path, name)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or first_line(error).rstrip(".")
        raise UserError(f"{path} cannot be read: {reason}.") from error


def _opened(path: Path) -> AbstractContextManager[BinaryIO]:
    """Opens a file for reading its uncompressed bytes."""
    file = storage.open_regular(path)
    return uncompressed(file, str(path), os.fstat(file.fileno()).st_size)


def _read_text(path: Path, name: str) -> Iterator[Document]:
    with _opened(path) as file:
        # A compressed file does not tell the size of its text.
        size = len(file.read(LONG_TEXT + 1))
    long = size > LONG_TEXT
    if not size:
        yield Document(name, "")
    with _opened(path) as file:
        for number, text in enumerate(_decoded(file, path, PIECE if long else LONG_TEXT + 1)):
            yield Document(f"{name}#{number}" if long else name, text)


def _decoded(file: BinaryIO, path: Path, size: int) -> Iterator[str]:
    """Yields the text in parts of about `size` bytes, cut after a line break if there is one."""
    position, rest = 0, b""
    while piece := file.read(size - len(rest)):
        rest += piece
        # Fewer bytes than asked for are the end of the file.
        cut = len(rest) if len(rest) < size else rest.rfind(b"\n") + 1 or _character_start(rest)
        yield _text(rest[:cut], path, position)
        position, rest = position + cut, rest[cut:]
    if rest:
        yield _text(rest, path, position)


def _character_start(data: bytes) -> int:
    """Returns the start of the last UTF-8 character, or the length where there is none."""
    # A byte 10xxxxxx continues a character, which has up to four bytes.
    starts = (n for n in range(len(data) - 1, max(0, len(data) - 5), -1) if data[n] & 0xC0 != 0x80)
    return next(starts, len(data))


def _text(data: bytes, path: Path, position: int) -> str:
    try:
        # A byte-order mark stands at the begin alone.
        return data.decode("utf-8" if position else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 ({error.reason} at byte {position + error.start}). Convert it to "
            "UTF-8."
        ) from error


def _read_lines(path: Path, name: str, column: str) -> Iterator[Document]:
    # A .json file may be settings of a program, whose only text is no corpus.
    chosen = (column or "text") if path.name.lower().endswith(JSON) else ""
    for number, record in _records(path):
        if not chosen and isinstance(record, dict):
            chosen = column or "text"
            strings = [key for key, value in record.items() if isinstance(value, str)]
            if chosen not in record and not {"answer", "messages"} & set(record):
                chosen = chosen_column(list(record), strings, column, f"{path}, line {number},")
        yield from _documents(f"{name}:{number}", _text_field(record, path, number, chosen))


def _read_examples(path: Path, name: str) -> Iterator[Document]:
    for number, record in _records(path):
        try:
            text = checked_example(record)
        except ValueError as error:
            raise UserError(f"{path}, line {number}, {error}.") from error
        yield Document(f"{name}:{number}", text)


def _records(path: Path) -> Iterator[tuple[int, object]]:
    """Yields the number and the value of each line of JSON, or of each item of a .json file that is
    one list or object."""
    if path.name.lower().endswith(JSON):
        with _opened(path) as file:
            content = file.read(LONGEST_VALUE + 1)
        try:
            whole = json_files.parse(content.decode("utf-8-sig"))
        except ValueError:  # Lines, or damaged, which a line will say.
            whole = None
        if whole is not None and len(content) <= LONGEST_VALUE:
            yield from enumerate(whole if isinstance(whole, list) else [whole], start=1)
            return
    for number, line in _lines(path):
        yield number, _json(line, path, number)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the number and the text of each line that is not blank."""
    position, number = 0, 0
    with _opened(path) as file:
        while line := file.readline(LONGEST_VALUE + 1):
            number += 1
            if len(line) > LONGEST_VALUE:
                raise UserError(
                    f"{path}, line {number}, is longer than {LONGEST_VALUE >> 20} MiB. Cut its "
                    "text into several lines."
                )
            text = _text(line, path, position)
            position += len(line)
            if text.strip():
                yield number, text


def _read_parquet(path: Path, name: str, column: str) -> Iterator[Document]:
    arrow = needed_module("pyarrow", f"Reading {path}")
    number = 0
    try:
        with local_parquet(path) as table:
            chosen = chosen_column(table.schema.names, table.string_columns, column, str(path))
            for group in range(len(table.group_rows)):
                for text in table.values(chosen, group):
                    number += 1
                    yield from _documents(f"{name}:{number}", text or "")
    except arrow.ArrowException as error:
        raise UserError(f"{path} cannot be read: {first_line(error).rstrip('.')}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (row {number + 1} or a later one).") from error


def _documents(name: str, text: str) -> Iterator[Document]:
    """Yields one document, or those that a long text is cut into."""
    long = len(text) > LONG_TEXT
    for number, piece in enumerate(_pieces(text) if long else [text]):
        yield Document(f"{name}#{number}" if long else name, piece)


def _pieces(text: str) -> Iterator[str]:
    """Yields a text in parts of about `PIECE` characters, cut after line breaks if any."""
    start = 0
    while start < len(text):
        end = start + PIECE
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def _json(line: str, path: Path, number: int) -> object:
    try:
        return json_files.parse(line)
    except ValueError as error:
        reason = getattr(error, "msg", error)
        raise UserError(f"{path}, line {number}, is not JSON: {reason}.") from error


def _text_field(record: object, path: Path, number: int, column: str) -> str:
    text = record.get(column, 0) if isinstance(record, dict) else None
    if text is None and isinstance(record, dict):
        return ""
    if not isinstance(text, str):
        examples = isinstance(record, dict) and {"answer", "messages"} & set(record)
        hint = " For prompts with answers, add --set data.loss=answers." if examples else ""
        kind = _NoText if number == 1 and path.name.lower().endswith(JSON) else UserError
        raise kind(
            f'{path}, line {number}, has no field "{column or "text"}" with a string in it.{hint}'
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{path}, line {number}, has an unpaired surrogate.") from error
    return text
