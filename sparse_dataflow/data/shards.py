"""Rows of one shard of a large dataset, read from any row on, here or at any address of fsspec.

A shard is a file of JSON lines or Parquet, or a run of row groups of a Parquet file.  Rows are
numbered within the file, so that a row's number does not depend on how the file is divided.
"""

import codecs
import collections
import contextlib
import gzip
import io
import itertools
import json
import logging
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from sparse_dataflow.data.local_files import (
    JSON_LINES,
    PARQUET,
    TEXT,
    chosen_column,
)
from sparse_dataflow.data.packed_files import (
    LONGEST_VALUE,
    ParquetTable,
    needed_module,
    parquet,
    uncompressed,
)
from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import UserError, first_line

_LOG = logging.getLogger(__name__)

READABLE = JSON_LINES + PARQUET + TEXT
LEGAL_SHARDS = ".parquet, .jsonl, .json or .txt (also .gz, .zst)"

_BLOCK = 2**20
"""Bytes of a request for a part of a file."""


@dataclass(frozen=True)
class Shard:
    """A file, or some row groups of it.

    Attributes:
      address: path, or an address that fsspec opens.
      rows: first row and the one after the last, at the ends of row groups; None for the whole
        file.
      skip: rows at the start of the file that belong to no shard, because they are held out.
    """

    address: str
    rows: tuple[int, int] | None = None
    skip: int = 0


@dataclass
class Skipped:
    """Counts of the rows that are left out, by reason; any thread may call."""

    counts: collections.Counter = field(default_factory=collections.Counter)
    first: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    def add(self, reason: str, place: str) -> None:
        """Counts a row, and logs the first one with this reason."""
        with self._lock:
            self.counts[reason] += 1
            new = reason not in self.first
            self.first.setdefault(reason, place)
        if new:
            _LOG.warning("rows %s are left out and counted; the first: %s", reason, place)

    def words(self) -> str:
        """Returns "3 rows without text (first: ...), 1 ...", or ""."""
        with self._lock:
            return ", ".join(
                f"{count:,} rows {reason} (first: {self.first[reason]})"
                for reason, count in self.counts.items()
            )


def is_readable(address: str) -> bool:
    """Returns whether a file of this name can be a shard; .json files are read as lines."""
    return address.endswith((*READABLE, ".json"))


def is_parquet(address: str) -> bool:
    """Returns whether the file is Parquet by its name."""
    return address.endswith(PARQUET)


def size(address: str) -> int:
    """Returns the bytes of a file, from the listing of its folder where that is known."""
    return int(_filesystem(address).info(address)["size"])


def parts(address: str, count: int) -> list[Shard]:
    """Returns up to `count` shards of a Parquet file, of about as many row groups each."""
    with _parquet(address) as table:
        ends = _group_ends(table)
    count = max(1, min(count, len(ends) - 1))
    # At the ends of row groups, which are read whole.
    bounds = [ends[(len(ends) - 1) * part // count] for part in range(count + 1)]
    return [Shard(address, pair) for pair in itertools.pairwise(bounds)]


def _group_ends(table: ParquetTable) -> list[int]:
    """Returns the first row of each row group, and the number of rows."""
    return list(itertools.accumulate(table.group_rows, initial=0))


def text_column(address: str, column: str) -> str:
    """Returns the column of a shard that has the text; see `local_files.chosen_column`."""
    if address.endswith(TEXT):
        if column:
            raise UserError(f"data.column={column}: {short(address)} is plain text; leave it out.")
        return "text"
    if is_parquet(address):
        with _parquet(address) as table:
            names = table.schema.names
            return chosen_column(names, table.string_columns, column, short(address))
    for _, line in _lines(address, 0):
        record = _parsed(line)
        if isinstance(record, dict):
            if record.get(column or "text", 0) is None:  # It is missing in this line alone.
                return column or "text"
            strings = [name for name, value in record.items() if isinstance(value, str)]
            return chosen_column(list(record), strings, column, short(address))
    raise UserError(f"{short(address)} has no line with a JSON object.")


def texts(shard: Shard, column: str, row: int, skipped: Skipped) -> Iterator[tuple[int, str]]:
    """Yields the number and the text of each row from `row` on that has text.

    A connection that breaks is opened again at the row that was lost.

    Args:
      column: column or field with the text.
      row: first row, numbered in the file.
      skipped: counts the rows that are left out.

    Raises:
      UserError: the file is damaged, or cannot be reached after several attempts.
    """
    row, attempt = max(row, shard.skip), 0
    while True:
        try:
            for number, text, reason in _rows(shard, column, row):
                # Attempts count anew after each row: a long file may lose its connection many
                # times.  A row that is left out has been read too, and is not counted again.
                row, attempt = number + 1, 0
                if reason:
                    skipped.add(reason, f"{short(shard.address)}, row {number}")
                else:
                    yield number, text
            return
        except UserError:
            raise
        except Exception as error:
            if not _is_network(error):
                raise UserError(
                    f"The shard {short(shard.address)} is damaged after row {row} "
                    f"({first_line(error).rstrip('.')})."
                ) from error
            if attempt == len(storage.WAITS):
                raise UserError(
                    f"The shard {short(shard.address)} cannot be read "
                    f"({first_line(error).rstrip('.')}); check the network, and resume the run."
                ) from error
            time.sleep(storage.WAITS[attempt])
            attempt += 1


def _rows(shard, column, row):
    """Yields the number of each row, its text, and why it is left out, or ""."""
    read = _parquet_rows if is_parquet(shard.address) else _line_rows
    for number, text, reason in read(shard, column, row):
        yield number, text, reason or ("" if text and text.strip() else "without text")


def _parquet_rows(shard, column, row):
    with _parquet(shard.address) as table:
        ends = _group_ends(table)
        first, last = shard.rows or (0, ends[-1])
        if column not in table.schema.names:
            columns = ", ".join(table.schema.names)
            raise UserError(
                f'{short(shard.address)} has no column "{column}", which the other shards have; '
                f"its columns: {columns}."
            )
        for group, (start, stop) in enumerate(itertools.pairwise(ends)):
            if stop <= max(row, first) or start >= last:
                continue
            # A row group has no index of its rows, so it is read from its begin on.
            for number, text in enumerate(table.values(column, group), start):
                if number >= row:
                    yield number, text, ""


def _line_rows(shard, column, row):
    plain = shard.address.endswith(TEXT)
    for number, line in _lines(shard.address, row):
        try:
            text = line.decode()
        except UnicodeDecodeError:
            yield number, "", "that are not UTF-8"
            continue
        if plain:
            yield number, text, ""
            continue
        if not text.strip():
            continue
        record = _parsed(line)
        if not isinstance(record, dict):
            yield number, "", "that are no JSON object"
        elif not isinstance(value := record.get(column), str | None):
            yield number, "", f'with a "{column}" that is no string'
        else:
            if value and not value.isascii():
                value = value.encode(errors="replace").decode()  # An unpaired surrogate.
            yield number, value, ""


def _parsed(line: bytes) -> object:
    try:
        return json_files.parse(line.decode())
    except (ValueError, UnicodeDecodeError):
        return None


def _lines(address, row) -> Iterator[tuple[int, bytes]]:
    with _opened(address) as file:
        # Lines have no index: those in front of `row` are read and dropped.
        number = 0
        # One more byte tells a line that is too long.
        while line := file.readline(LONGEST_VALUE + 1):
            if len(line) > LONGEST_VALUE:
                raise UserError(
                    f"{short(address)}, row {number}, is longer than {LONGEST_VALUE >> 20} MiB."
                )
            if number >= row:
                # A byte-order mark stands at the begin of a file alone.
                yield number, line if number else line.removeprefix(codecs.BOM_UTF8)
            number += 1


def _filesystem(address):
    fsspec = needed_module("fsspec", f"Reading {address}")
    return fsspec.core.url_to_fs(address)[0]


class _Whole(io.RawIOBase):
    """A file that ends where its listing says."""

    def __init__(self, file: BinaryIO, listed: int):
        self._file, self._listed, self._count = file, listed, 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, target: Any) -> int:
        """Reads some of the next bytes."""
        content = self._file.read(len(target))
        target[: len(content)] = content
        self._count += len(content)
        if not content and self._count != self._listed:
            raise ConnectionError(f"it ends after {self._count:,} of {self._listed:,} bytes")
        return len(content)

    def close(self) -> None:
        """Closes the file as well."""
        self._file.close()
        super().close()


def _open(address) -> BinaryIO:
    return _filesystem(address).open(address, "rb", block_size=_BLOCK)


def _opened(address) -> contextlib.AbstractContextManager[BinaryIO]:
    """Opens the uncompressed bytes of a file."""
    count = size(address)
    file = io.BufferedReader(_Whole(_open(address), count), _BLOCK)
    return uncompressed(file, short(address), count)


def _parquet(address) -> contextlib.AbstractContextManager[ParquetTable]:
    return parquet(_open(address), short(address))


_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError, json.JSONDecodeError)


def _is_network(error: BaseException) -> bool:
    """Returns whether reading may succeed later; a damaged file stays damaged."""
    if isinstance(error, _DAMAGE):
        return False
    if storage.is_transient(error) or isinstance(error, ConnectionError | TimeoutError):
        return True
    # By name, as the libraries of these errors may not be installed.
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"TransportError", "ClientError", "ServerTimeoutError", "ConnectionError"}:
        return True
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is not None and (status >= 500 or status in (408, 429))


def short(address: str) -> str:
    """Returns an address without the revision of a dataset on the hub."""
    head, at, tail = address.partition("@")
    return f"{head}/{tail.partition('/')[2]}" if at and head.startswith("hf://") else address
