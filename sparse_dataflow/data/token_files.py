"""Files of token ids that another program wrote: no text is read and nothing is tokenised.

| file | written by |
|---|---|
| `.bin` of uint16 without a header | nanoGPT |
| `.bin` with a header of 256 int32 | llm.c, modded-nanogpt |
| `.bin` beside an `.idx` | Megatron-LM |
| `.parquet` with a column of lists of whole numbers | `datasets` after a tokenizer |
| `.array_record` of `tf.train.Example` with such a feature | MaxText, grain |

Files whose names have a word such as `val` or `test` are held out; without any, the end of the last
file is.  Sequences are joined as they are: whoever wrote them wrote the ends of text.
"""

import functools
import hashlib
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sparse_dataflow.data.cache import ChainedArray, StoredArray, atomic_write, exclusive
from sparse_dataflow.data.documents import files_below
from sparse_dataflow.data.local_files import needed_module
from sparse_dataflow.files import storage
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
_SAMPLE = 2**16


@dataclass(frozen=True, eq=False)
class TokenSplits:
    """The ids of both splits, any integer dtype.

    Attributes:
      validation: held-out ids.
    """

    train: ChainedArray
    validation: ChainedArray


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


def open_token_files(
    path: Path, column: str, cache_dir: Path, whole: bool = False
) -> tuple[TokenSplits, str]:
    """Opens files of token ids; those that are no plain arrays are copied into the cache once.

    Args:
      path: file or folder.
      column: column or feature with the ids; "" is the only one, or one of a usual name.
      whole: whether nothing is held out of files that are for training.

    Returns:
      (splits, digest of the files' names, sizes and samples).

    Raises:
      UserError: a file is damaged, or of another kind than the module names.
    """
    files = [file for file in _files(path) if file.name.endswith((*SUFFIXES, ".parquet"))]
    files = [file for file in files if file.suffix != ".idx"]
    root = path if path.is_dir() else path.parent
    try:
        digest = _digest(files, root)
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
        offset = last.offset + (len(last) - count) * last.dtype.itemsize
        validation = [replace(last, count=count, offset=offset)]
    return TokenSplits(ChainedArray(tuple(train)), ChainedArray(tuple(validation))), digest


def _files(path: Path) -> list[Path]:
    if path.suffix == ".idx":
        path = path.with_suffix(".bin")
    if path.is_dir():
        return files_below(path)
    return [path] if path.is_file() else []


def _digest(files: Sequence[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(root).as_posix()}\0{size}\0".encode())
        with file.open("rb") as stream:
            for position in sorted({size * n // 16 for n in range(16)}):
                stream.seek(position)
                digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()


def _opened(file: Path, column: str, cache_dir: Path) -> StoredArray:
    if file.suffix == ".parquet":
        return _copied(file, _parquet_ids(file, column), cache_dir)
    if file.name.endswith(".array_record"):
        return _copied(file, _array_record_ids(file, column), cache_dir)
    if file.with_suffix(".idx").exists():
        return _megatron(file)
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(12)
    magic, _, count = struct.unpack("<3i", head) if len(head) == 12 else (0, 0, 0)
    dtype, offset = _HEADERS.get(magic, np.dtype("<u2")), _HEADER_BYTES
    if magic not in _HEADERS:
        offset, count = 0, size // 2
    if size != offset + count * dtype.itemsize or not count:
        raise UserError(
            f"{file} has {size:,} bytes; legal: {offset} + {dtype.itemsize} for each of its "
            f"{count:,} token ids, at least one."
        )
    return StoredArray(file, dtype, count, offset)


def _megatron(file: Path) -> StoredArray:
    index = file.with_suffix(".idx")
    content = index.read_bytes()
    try:
        if content[:9] != _MEGATRON:
            raise ValueError("it does not begin with MMIDIDX")
        version, code, sequences, _ = struct.unpack_from("<QBQQ", content, 9)
        if version != 1 or code not in _MEGATRON_DTYPES:
            raise ValueError(f"its version is {version} and its dtype {code}")
        dtype = np.dtype(_MEGATRON_DTYPES[code])
        sizes = np.frombuffer(content, "<i4", sequences, 34)
        starts = np.frombuffer(content, "<i8", sequences, 34 + 4 * sequences)
    except (ValueError, struct.error) as error:
        raise UserError(f"{index} is no index of Megatron-LM: {error}.") from error
    count = int(sizes.sum(dtype=np.int64))
    ends = np.cumsum(sizes, dtype=np.int64) * dtype.itemsize
    if file.stat().st_size != count * dtype.itemsize or not np.array_equal(starts[1:], ends[:-1]):
        raise UserError(
            f"{file} has {file.stat().st_size:,} bytes and its index says {count:,} token ids of "
            f"{dtype.itemsize} bytes, one sequence after another; copy both files again."
        )
    return StoredArray(file, dtype, count, 0)


def _id_column(file: Path, column: str) -> str | None:
    """Returns the column of token ids of a Parquet file, None if it has text or no ids."""
    arrow = needed_module("pyarrow", f"Reading {file}")
    parquet = needed_module("pyarrow.parquet", f"Reading {file}")
    try:
        schema = parquet.read_schema(file)
    except Exception:  # The reader of text says what is wrong with it.
        return None
    kinds = arrow.types
    lists = [
        field.name
        for field in schema
        if (kinds.is_list(field.type) or kinds.is_large_list(field.type))
        and kinds.is_integer(field.type.value_type)
    ]
    if column:
        return column if column in lists else None
    if "text" in schema.names:
        return None
    return next((name for name in _COLUMNS if name in lists), lists[0] if len(lists) == 1 else None)


def _parquet_ids(file: Path, column: str) -> Iterator[np.ndarray]:
    parquet = needed_module("pyarrow.parquet", f"Reading {file}")
    chosen = _id_column(file, column)
    if chosen is None:
        raise UserError(f"{file} has no column of token ids, which the other files have.")
    with parquet.ParquetFile(file, pre_buffer=False) as table:
        for batch in table.iter_batches(1024, columns=[chosen], use_threads=False):
            values = batch.column(0).flatten()
            if values.null_count:
                raise UserError(f"{file} has missing token ids in its column {chosen}.")
            yield values.to_numpy(zero_copy_only=False)


def _array_record_ids(file: Path, column: str) -> Iterator[np.ndarray]:
    from array_record.python.array_record_data_source import ArrayRecordDataSource
    from tensorflow_datasets.proto import tf_example_pb2

    source = ArrayRecordDataSource([str(file)])
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


def _copied(file: Path, ids: Iterator[np.ndarray], cache_dir: Path) -> StoredArray:
    """Returns the ids as an array in the cache, int32; writes it the first time."""
    status = file.stat()
    key = f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    path = cache_dir / "tokens" / f"ids-{name}.npy"
    with exclusive(cache_dir, f"ids-{name}"):
        if not path.exists():
            with atomic_write(path) as temporary, temporary.open("wb") as stream:
                _write(stream, file, ids)
    return StoredArray.open(path)


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
