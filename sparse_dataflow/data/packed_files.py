"""Compressed files and Parquet, bounded in what they unfold to.

A few bytes of gzip, zstd or Parquet can stand for terabytes. Text is read piece by piece, so its
memory is bounded; what is refused here is a file that unfolds to far more than files of text do.
"""

import contextlib
import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError, needed_module

FREE_BYTES = 2**28
"""Bytes to which any file may unfold."""

MOST_RATIO = 500
"""Most times their bytes to which larger ones may unfold; compressed text reaches about 20."""

LONGEST_VALUE = 64 * 2**20
"""Bytes of a line of JSON, and of a value of Parquet."""

_BATCH_BYTES = 8 * 2**20
_BATCH_ROWS = 256
_BUFFER = 2**20


class _Unfolding:
    """Counts what a file unfolds to."""

    def __init__(self, place: str, stored: int):
        self._place, self._left = place, max(FREE_BYTES, MOST_RATIO * stored)

    def add(self, count: int) -> None:
        """Counts bytes that were unfolded, or are about to be.

        Raises:
          UserError: there are too many.
        """
        self._left -= count
        if self._left < 0:
            raise UserError(
                f"{self._place} unfolds to more than {FREE_BYTES >> 20} MiB and {MOST_RATIO} times "
                "its bytes; unpack it, if it is meant so."
            )


class _Counted(io.RawIOBase):
    """The uncompressed bytes of a file, which are counted."""

    def __init__(self, file: Any, unfolding: _Unfolding):
        self._file, self._unfolding = file, unfolding

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, target: Any) -> int:
        """Reads some of the next bytes."""
        content = self._file.read(len(target))
        target[: len(content)] = content
        self._unfolding.add(len(content))
        return len(content)


@contextlib.contextmanager
def uncompressed(file: BinaryIO, place: str, size: int) -> Iterator[BinaryIO]:
    """Yields a reader of the uncompressed bytes of an open file, and closes both.

    Args:
      place: name of the file, whose ending says how it is compressed, and for messages.
      size: bytes of the file.

    Raises:
      UserError: it unfolds to too much, also while it is read.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(file)
        unfolding = _Unfolding(place, size)
        if place.lower().endswith(".gz"):
            stream: object = stack.enter_context(gzip.open(file, "rb"))
        elif place.lower().endswith(".zst"):
            arrow = needed_module("pyarrow", f"Reading {place}")
            source = stack.enter_context(arrow.PythonFile(file, "r"))
            stream = stack.enter_context(arrow.CompressedInputStream(source, "zstd"))
        else:
            yield file
            return
        counted = _Counted(stream, unfolding)
        yield stack.enter_context(io.BufferedReader(counted, _BUFFER))


class ParquetTable:
    """An open Parquet file, of which some rows at a time are in memory."""

    def __init__(self, file: object, place: str, buffer: int = 0):
        """Reads its schema.

        Args:
          file: an open file.
          place: its name, for messages.
          buffer: bytes that are read at once; 0 for all of a column in a row group.
        """
        self._file, self._place = file, place
        self._arrow = needed_module("pyarrow", f"Reading {place}")
        self._parquet = needed_module("pyarrow.parquet", f"Reading {place}")
        # Without pre_buffer=False, whole row groups are in memory.
        self._options = {"buffer_size": buffer, "pre_buffer": False}
        table = self._parquet.ParquetFile(file, **self._options)
        self.metadata, self.schema = table.metadata, table.schema_arrow

    @property
    def group_rows(self) -> list[int]:
        """Rows of each row group."""
        groups = range(self.metadata.num_row_groups)
        return [self.metadata.row_group(group).num_rows for group in groups]

    @property
    def string_columns(self) -> list[str]:
        """Columns of strings."""
        kinds = self._arrow.types
        return [
            field.name
            for field in self.schema
            if kinds.is_string(field.type) or kinds.is_large_string(field.type)
        ]

    @property
    def id_columns(self) -> list[str]:
        """Columns of lists of whole numbers."""
        kinds = self._arrow.types
        return [
            field.name
            for field in self.schema
            if (kinds.is_list(field.type) or kinds.is_large_list(field.type))
            and kinds.is_integer(field.type.value_type)
        ]

    def values(self, column: str, group: int) -> Iterator[Any]:
        """Yields each value of a column of strings or bytes in a row group; None where it is null.

        Raises:
          UserError: it unfolds to too much, or a value has more than LONGEST_VALUE bytes.
        """
        size = needed_module("pyarrow.compute", f"Reading {self._place}").binary_length
        # A value that many rows share is in memory once.
        shared = self._table(read_dictionary=[column])
        unfolding = self._unfolding(column, group)
        rows = self._batch_rows(column, group, 1)
        for batch in shared.iter_batches(
            rows, row_groups=[group], columns=[column], use_threads=False
        ):
            array = batch.column(0)
            if not self._arrow.types.is_dictionary(array.type):
                array = array.dictionary_encode()
            values, sizes = array.dictionary, size(array.dictionary).to_pylist()
            # A small dictionary is unfolded once; of a large one each value when a row needs it.
            if sum(sizes) <= _BATCH_BYTES and None not in sizes:
                values = values.to_pylist()
            last, value = None, None
            for index in array.indices.to_pylist():
                if index is None:
                    yield None
                    continue
                if sizes[index] > LONGEST_VALUE:
                    raise UserError(
                        f"{self._place} has a value of more than {LONGEST_VALUE >> 20} MiB in its "
                        f"column {column}. Cut it into several rows."
                    )
                unfolding.add(sizes[index])
                if index != last:
                    last, value = index, values[index]
                    value = value if isinstance(values, list) else value.as_py()
                yield value

    def numbers(self, column: str, group: int) -> Iterator[np.ndarray | None]:
        """Yields the numbers of some lists of a column after another; None where some are null.

        Raises:
          UserError: it unfolds to too much.
        """
        self._unfolding(column, group)
        table, rows = self._table(), self._batch_rows(column, group, 8)
        for batch in table.iter_batches(
            rows, row_groups=[group], columns=[column], use_threads=False
        ):
            values = batch.column(0).flatten()
            yield None if values.null_count else values.to_numpy(zero_copy_only=False)

    def _table(self, **options):
        return self._parquet.ParquetFile(
            self._file, metadata=self.metadata, **self._options, **options
        )

    def _chunk(self, column, group):
        """Returns what the file says of a column in a row group."""
        facts = self.metadata.row_group(group)
        chunks = (facts.column(number) for number in range(facts.num_columns))
        return next(c for c in chunks if c.path_in_schema.partition(".")[0] == column)

    def _unfolding(self, column, group):
        """Counts what a row group unfolds to: its pages are uncompressed whole."""
        chunk = self._chunk(column, group)
        unfolding = _Unfolding(self._place, chunk.total_compressed_size)
        unfolding.add(max(chunk.total_uncompressed_size, 8 * chunk.num_values))
        # Values are counted anew: a value that many rows share unfolds to more than its page.
        return _Unfolding(self._place, chunk.total_compressed_size)

    def _batch_rows(self, column, group, width):
        chunk, rows = self._chunk(column, group), self.metadata.row_group(group).num_rows
        size = max(chunk.total_uncompressed_size, width * chunk.num_values)
        return max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(1, size)))


@contextlib.contextmanager
def parquet(file: Any, place: str, buffer: int = 0) -> Iterator[ParquetTable]:
    """Yields a table of an open file, and closes it; takes the arguments of `ParquetTable`."""
    with file:
        yield ParquetTable(file, place, buffer)


def local_parquet(path: Path) -> contextlib.AbstractContextManager[ParquetTable]:
    """Opens a Parquet file of this machine."""
    return parquet(storage.open_regular(path), str(path), _BUFFER)
