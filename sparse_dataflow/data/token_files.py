"""Files of token ids that another program wrote: no text is read and nothing is tokenised.

| file | written by |
|---|---|
| `.bin` without a header, of uint16 or as its name or its content says | nanoGPT |
| `.bin` with a header of 256 int32 | llm.c, modded-nanogpt |
| `.bin` beside an `.idx` | Megatron-LM |
| `.parquet` with a column of lists of whole numbers | `datasets` after a tokenizer |
| `.array_record` of `tf.train.Example` with such a feature | MaxText, grain |

Files whose names have a word such as `val` or `test` are held out; without any, the end of the last
file is.  Sequences are joined as they are: whoever wrote them wrote the ends of text.
"""

import functools
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from sparse_dataflow.data.cache import ChainedArray, Ranges, StoredArray, derive, file_digest
from sparse_dataflow.data.documents import files_below
from sparse_dataflow.data.local_files import say_once
from sparse_dataflow.data.packed_files import local_parquet
from sparse_dataflow.files import storage
from sparse_dataflow.files.derived import key
from sparse_dataflow.files.errors import UserError, first_line

SUFFIXES = (".bin", ".idx", ".array_record")
_HELD_OUT = re.compile(r"(?:^|[\W_])(val|valid|validation|test|dev)(?:[\W_\d]|$)")
_COLUMNS = ("input_ids", "tokens", "token_ids", "ids")
_HELD_OUT_TOKENS = 2**22
_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_HEADERS: dict[int, np.dtype] = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
"""Dtypes by the first number of llm.c's header."""
_HEADER_BYTES = 1024
_COPY_VERSION = 1
"""Raise it when the ids that are read of a Parquet file or of records change."""
_INDEX_HEAD = struct.Struct("<9sQBQQ")
_SEQUENCES = 2**18
"""Sequences of an index that are in memory at a time."""

_SAMPLE = 2**16
_WINDOWS = 64
_WIDTH = re.compile(r"(?<![a-z])(u?int)(8|16|32|64)(?!\d)")
_MOST_UPPER = 31
"""Largest upper half of an id of 4 bytes: vocabularies have less than 2 million tokens."""

_LEAST_LOWER = 1023
"""Ids up to this may be of a vocabulary so small that their neighbours look like upper halves."""

_MOST_WIDE = 0.7
"""Share of ids above 65,535, beyond which they may be pairs of a small and a large id."""

_LEAST_PAIRS, _MOST_BYTES, _ALIKE = 2048, 224, 0.9
"""Pairs of bytes, their different values, and the share of these that both bytes have, which show
ids of 1 byte."""


@dataclass(frozen=True, eq=False)
class TokenSplits:
    """The ids of both splits, any integer dtype.

    Attributes:
      validation: held-out ids.
      elsewhere: ids that other corpora of a mixture hold out.
    """

    train: ChainedArray
    validation: ChainedArray
    elsewhere: tuple[ChainedArray, ...] = ()


def has_token_ids(path: Path, column: str) -> bool:
    """Returns whether a file or folder has token ids instead of text.

    Args:
      path: may be missing.
      column: `data.column`, which may name a column of text beside the ids.
    """
    try:
        files = storage.retry(f"Listing {path}", lambda: _files(path))
    except OSError:  # The reader of text says what is wrong.
        return False
    if any(file.name.endswith(SUFFIXES) for file in files):
        return True
    parquet = [file for file in files if file.suffix == ".parquet"]
    return bool(parquet) and _id_column(parquet[0], column) is not None


def open_token_files(path: Path, column: str, cache_dir: Path, whole: bool = False) -> TokenSplits:
    """Opens files of token ids; those that are no plain arrays are copied into the cache once.

    Args:
      path: file or folder.
      column: column or feature with the ids; "" is the only one, or one of a usual name.
      whole: whether nothing is held out of files that are for training.

    Raises:
      UserError: a file is damaged, or of another kind than the module names.
    """
    files = [file for file in _files(path) if file.name.endswith((*SUFFIXES, ".parquet"))]
    files = [file for file in files if file.suffix != ".idx"]
    root = path if path.is_dir() else path.parent
    try:
        splits: dict[bool, list[StoredArray]] = {False: [], True: []}
        for file in files:
            held_out = bool(_HELD_OUT.search(file.relative_to(root).as_posix().lower()))
            splits[held_out].append(_opened(file, column, cache_dir))
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise UserError(f"{error.filename or path} cannot be read: {reason}.") from error
    train, validation = splits[False], splits[True]
    if not train:  # Such as a single file of this name.
        train, validation = validation, []
    if not validation and not whole:
        last = train.pop()
        count = min(len(last) // 20, _HELD_OUT_TOKENS)
        train.append(replace(last, count=len(last) - count))
        # Both splits are views of one file: nothing is copied.
        offset = last.offset + (len(last) - count) * last.dtype.itemsize
        validation = [replace(last, count=count, offset=offset)]
    return TokenSplits(ChainedArray(tuple(train)), ChainedArray(tuple(validation)))


def identity(array: ChainedArray | Ranges) -> list:
    """Returns what tells ids from others, from all bytes of their files."""
    if isinstance(array, Ranges):
        return [identity(array.array), key(array.ranges.tobytes())]
    return [
        [part.digest, part.dtype.str, part.count, part.offset]
        for part in array.arrays
        if isinstance(part, StoredArray)
    ]


def _files(path: Path) -> list[Path]:
    if path.suffix == ".idx":
        path = path.with_suffix(".bin")
    if path.is_dir():
        return files_below(path)
    return [path] if path.is_file() else []


def _opened(file: Path, column: str, cache_dir: Path) -> StoredArray:
    digest = file_digest(file, cache_dir)
    origin = {"code": _COPY_VERSION, "kind": file.suffix, "file": digest, "column": column}
    if file.suffix == ".parquet":
        return _copied(file, _parquet_ids(file, column), cache_dir, origin)
    if file.name.endswith(".array_record"):
        return _copied(file, _array_record_ids(file, column), cache_dir, origin)
    if file.with_suffix(".idx").exists():
        return replace(_megatron(file), digest=digest)
    with storage.open_regular(file) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        head = stream.read(12)
        # The header of llm.c's files: a magic number, a version, the number of tokens.
        magic, _, count = struct.unpack("<3i", head) if len(head) == 12 else (0, 0, 0)
        if magic in _HEADERS:
            dtype, offset = _HEADERS[magic], _HEADER_BYTES
        else:
            dtype, offset = _dtype_without_header(file, stream, size), 0
            count = size // dtype.itemsize
    if size != offset + count * dtype.itemsize or not count:
        raise UserError(
            f"{file} has {size:,} bytes; legal: {offset} + {dtype.itemsize} for each of its "
            f"{count:,} token ids, at least one."
        )
    return StoredArray(file, dtype, count, offset, digest)


def _dtype_without_header(file: Path, stream: BinaryIO, size: int) -> np.dtype:
    """Returns the dtype of a `.bin` without a header: that of its name, or else by its content.

    Raises:
      UserError: the content fits several, and the name none.
    """
    if match := _WIDTH.search(file.stem.lower()):
        return np.dtype(f"<{'i' if match[1] == 'int' else 'u'}{int(match[2]) // 8}")
    windows = []
    # Windows over the whole file, each at a multiple of 8 bytes: ids of any width begin there.
    for position in sorted({size * n // _WINDOWS // 8 * 8 for n in range(_WINDOWS)}):
        stream.seek(position)
        window = stream.read(_SAMPLE)
        windows.append(window[: len(window) // 8 * 8])
    content = b"".join(windows)
    pairs = np.frombuffer(content, "<u2").reshape(-1, 4)
    low, second, high = pairs[:, 0], pairs[:, 1::2], pairs[:, 2:]
    # The upper half of a wide id is small, or that of -1; the next id of a text is not.
    is_upper = (second <= _MOST_UPPER) | (second == 0xFFFF)
    legal = "legal: a name with uint8, uint16, uint32 or int64 in it, such as train.uint32.bin"
    if len(pairs) and is_upper.all() and pairs[:, ::2].any():
        if not size % 8 and low.any() and not high.any():
            dtype: np.dtype = np.dtype("<i8")
        elif not size % 4 and (not second.any() or pairs[:, ::2].max() > _LEAST_LOWER):
            if np.count_nonzero(second) > second.size * _MOST_WIDE:
                raise UserError(
                    f"{file} fits ids of 2 and of 4 bytes; name the width in its name; {legal}."
                )
            dtype = np.dtype("<i4")
        else:
            return np.dtype("<u2")
        say_once(f"{file}: ids of {dtype.itemsize} bytes, by its content; {legal}")
        return dtype
    # Both bytes of ids of 2 bytes would have the same values, as two ids of 1 byte do.
    halves = np.frombuffer(content, "u1").reshape(-1, 2)
    first, last = (set(np.unique(halves[:, column]).tolist()) for column in range(2))
    if (
        len(halves) >= _LEAST_PAIRS
        and last != {0}
        and len(first | last) <= _MOST_BYTES
        and len(first & last) >= _ALIKE * len(first | last)
    ):
        raise UserError(f"{file} holds text, or ids of 1 byte; {legal}.")
    return np.dtype("<u2")


def _megatron(file: Path) -> StoredArray:
    index = file.with_suffix(".idx")
    with storage.open_regular(index) as stream:
        try:
            return _indexed(file, index, stream)
        except (ValueError, struct.error) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{index} is no index of Megatron-LM: {error}.") from error


def _indexed(file: Path, index: Path, stream: BinaryIO) -> StoredArray:
    """Returns the ids of a file, after a pass over its index in bounded memory."""
    head = stream.read(_INDEX_HEAD.size)
    magic, version, code, sequences, documents = _INDEX_HEAD.unpack(head)
    if magic != _MEGATRON:
        raise ValueError("it does not begin with MMIDIDX")
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise ValueError(f"its version is {version} and its dtype {code}")
    sizes_at, starts_at = _INDEX_HEAD.size, _INDEX_HEAD.size + 4 * sequences
    least, size = starts_at + 8 * sequences, os.fstat(stream.fileno()).st_size
    # A multimodal index has a byte for each sequence as well.
    if size not in (least + 8 * documents, least + 8 * documents + sequences):
        raise ValueError(
            f"it has {size:,} bytes, not those of {sequences:,} sequences and {documents:,} "
            "documents"
        )
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    count, fits = 0, True
    for first in range(0, sequences, _SEQUENCES):
        number = min(_SEQUENCES, sequences - first)
        stream.seek(sizes_at + 4 * first)
        sizes = np.asarray(np.frombuffer(stream.read(4 * number), "<i4"), np.int64)
        stream.seek(starts_at + 8 * first)
        starts = np.frombuffer(stream.read(8 * number), "<i8")
        if (least_size := int(np.min(sizes))) < 0:
            raise ValueError(f"a sequence has {least_size} ids")
        # Sequences must follow one another, as the file is read as one array.
        ends = count + np.cumsum(sizes)
        fits &= np.array_equal(starts, (ends - sizes) * dtype.itemsize)
        count = int(ends[-1])
    stored = storage.regular(file).stat().st_size
    if stored != count * dtype.itemsize or not fits:
        raise UserError(
            f"{file} has {stored:,} bytes and its index says {count:,} token ids of "
            f"{dtype.itemsize} bytes, one sequence after another; copy both files again."
        )
    return StoredArray(file, dtype, count, 0)


def _id_column(file: Path, column: str) -> str | None:
    """Returns the column of token ids of a Parquet file, None if it has text or no ids."""
    try:
        with local_parquet(file) as table:
            lists, names = table.id_columns, table.schema.names
    except UserError:  # The package is missing.
        raise
    except Exception:  # The reader of text says what is wrong with it.
        return None
    if column:
        return column if column in lists else None
    if "text" in names:
        return None
    return next((name for name in _COLUMNS if name in lists), lists[0] if len(lists) == 1 else None)


def _parquet_ids(file: Path, column: str) -> Iterator[np.ndarray]:
    chosen = _id_column(file, column)
    if chosen is None:
        raise UserError(f"{file} has no column of token ids, which the other files have.")
    with local_parquet(file) as table:
        for group in range(len(table.group_rows)):
            for values in table.numbers(chosen, group):
                if values is None:
                    raise UserError(f"{file} has missing token ids in its column {chosen}.")
                yield values


def _array_record_ids(file: Path, column: str) -> Iterator[np.ndarray]:
    from array_record.python.array_record_data_source import ArrayRecordDataSource
    from tensorflow_datasets.proto import tf_example_pb2

    source = ArrayRecordDataSource([str(storage.regular(file))])
    for index in range(len(source)):
        record = storage.retry(f"Reading {file}", functools.partial(source.__getitem__, index))
        feature = tf_example_pb2.Example.FromString(record).features.feature
        lists = {name: kind.int64_list.value for name, kind in feature.items()}
        names = [column] if column else [name for name in _COLUMNS if lists.get(name)]
        values = lists.get(names[0]) if names else None
        if not values:
            raise UserError(
                f"Record {index} of {file} has no token ids; its features: "
                f"{', '.join(sorted(lists)) or 'none'}; legal for data.column: one of whole "
                "numbers."
            )
        yield np.array(values, np.int64)


def _copied(file: Path, ids: Iterator[np.ndarray], cache_dir: Path, origin) -> StoredArray:
    """Returns the ids as an array in the cache, int32; writes it the first time."""

    def make(partial):
        with partial.open("wb") as stream:
            _write(stream, file, ids)

    copy = derive(cache_dir, "tokens", "ids", origin, make, ".npy")
    # The origin has the digest of the file, so that the copy need not be read for its own.
    return replace(StoredArray.open(copy.path), digest=key(origin))


def _write(stream, file, ids):
    header = {"descr": "<i4", "fortran_order": False, "shape": (0,)}
    np.lib.format.write_array_header_1_0(stream, header)
    count = 0
    try:
        for values in ids:
            if len(values) and not 0 <= values.min() <= values.max() < 2**31:
                raise UserError(
                    f"{file} has token ids from {values.min()} to {values.max()}; legal: 0 or more."
                )
            stream.write(values.astype("<i4").tobytes())
            count += len(values)
    except (UserError, OSError):
        raise
    except Exception as error:  # The readers raise errors of any type.
        raise UserError(f"{file} cannot be read ({first_line(error).rstrip('.')}).") from error
    if not count:
        raise UserError(f"{file} has no token ids.")
    # numpy pads the header, so a larger count keeps its size.
    stream.seek(0)
    np.lib.format.write_array_header_1_0(stream, header | {"shape": (count,)})
