"""Corpora of tensorflow_datasets, without tensorflow: prepared copies of any format, and names.

tfds prepares a name once as array_record files.  A copy that was prepared elsewhere is read as it
is, also one of TFRecord files, which tfds itself reads only with tensorflow.
"""

import bisect
import contextlib
import difflib
import importlib.util
import itertools
import os
import re
import socket
import struct
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sparse_dataflow.data.cache import StoredArray, exclusive
from sparse_dataflow.data.local_files import chosen_column
from sparse_dataflow.data.packed_files import ParquetTable, needed_module
from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError, first_line

_MARKS = ("dataset_info.json", "features.json")
_BEAM, _TENSORFLOW = "apache_beam", "tensorflow"
_LENGTH = struct.Struct("<Q")
_FRAME = 16
"""Bytes of a TFRecord besides its content: length, checksum of the length, checksum."""


_HOST_OF_TFDS = "storage.googleapis.com"
"""Where tfds looks first; a machine that cannot resolve it has no network."""


@dataclass(frozen=True)
class _Source:
    """What a name of tfds needs to be prepared, and the same text on the hub.

    Attributes:
      package: what its preparation imports.
      hub: address on the hub, where {config} is the configuration of tfds.
      configs: configurations of tfds by their name on the hub, where those differ.
    """

    package: str
    hub: str
    configs: Mapping[str, str] = ()  # type: ignore[assignment]


SOURCES = {
    "c4": _Source(_BEAM, "allenai/c4/{config}", {"": "en", "multilingual": "multilingual"}),
    "wiki40b": _Source(_BEAM, "google/wiki40b/{config}", {"": "en"}),
    "wikipedia": _Source(_BEAM, "wikimedia/wikipedia/20231101.{language}"),
    "lm1b": _Source(_TENSORFLOW, "billion-word-benchmark/lm1b@refs/convert/parquet"),
    "pg19": _Source(_TENSORFLOW, "emozilla/pg19"),
    "tiny_shakespeare": _Source(_TENSORFLOW, "karpathy/tiny_shakespeare@refs/convert/parquet"),
}
"""Names of tfds that this package cannot prepare with its own requirements."""


@dataclass(frozen=True)
class Copy:
    """A prepared copy.

    Attributes:
      records: {split: records, each {feature: bytes}}.
      feature: the feature with the text.
      identity: what tells the copy from others without reading it, JSON-able.
    """

    records: Mapping[str, Sequence[dict[str, object]]]
    feature: str
    identity: list


def is_prepared(folder: Path) -> bool:
    """Returns whether tfds prepared a dataset in the folder."""
    return all((folder / name).is_file() for name in _MARKS)


def hub_name(name: str) -> str:
    """Returns the hf: name of the text of a name of tfds; "" if none is known."""
    base, _, rest = re.sub(r":[\d.*]+$", "", name).partition("/")
    source = SOURCES.get(base)
    if source is None:
        return ""
    config = dict(source.configs or {}).get(rest, rest)
    language = re.sub(r"^\d+\.", "", config) or "en"
    return "hf:" + source.hub.format(config=config, language=language)


def opened(name: str, cache_dir: Path, column: str, legal: str) -> Copy:
    """Opens a prepared copy, or prepares it where it is missing.

    Args:
      name: of tfds, as NAME/CONFIG:VERSION, or the folder of a prepared copy.
      cache_dir: cache folder; the variable TFDS_DATA_DIR comes before it.
      column: feature with the text; "" is "text", else the only text feature.
      legal: the legal corpora, for messages.

    Raises:
      UserError: the copy is damaged or has no text, or the name cannot be prepared; says then what
        is missing and where else the text is.
    """
    root, folder = _located(name, cache_dir)
    if folder is None:
        return _prepared(name, root, cache_dir, column, legal)
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder_from_directory(folder)
        feature = _text_feature(builder, tfds, column)
        records = _records(builder, folder)
    except UserError:
        raise
    except Exception as error:  # tfds raises errors of any type.
        raise UserError(
            f"The prepared copy {folder} cannot be read ({first_line(error)})."
        ) from error
    return Copy(records, feature, _identity(builder, feature))


def refuse_unprepared(name: str, cache_dir: Path) -> None:
    """Refuses a name that is known to need another package, before tfds is imported.

    Raises:
      UserError: naming the package, and where else the text is.
    """
    source = SOURCES.get(re.split("[/:]", name)[0])
    if source is None or importlib.util.find_spec(source.package) is not None:
        return
    root, folder = _located(name, cache_dir)
    if folder is None:
        raise UserError(
            f"tfds needs the package {source.package} to prepare '{name}', and there is no "
            f"prepared copy in {root}; stream the same text with --corpus={hub_name(name)}."
        )


def refuse_unknown(name: str, cache_dir: Path, legal: str) -> None:
    """Refuses a name that tfds does not have and no prepared copy has; loads no jax.

    Raises:
      UserError: naming a similar name.
    """
    refuse_unprepared(name, cache_dir)
    base = re.split("[/:]", name)[0]
    if _located(name, cache_dir)[1] is not None or name.startswith(f"{base}:"):
        return  # A namespace before the colon is one of the community.
    import tensorflow_datasets as tfds
    import tensorflow_datasets.text

    if base not in tfds.list_builders(with_community_datasets=False):
        raise _unknown(name, tfds, legal)


def _unknown(name, tfds, legal) -> UserError:
    names = ["python_stdlib", *tfds.list_builders(with_community_datasets=False)]
    matches = difflib.get_close_matches(re.split("[/:]", name)[0], names, n=1)
    hint = f" Did you mean '{matches[0]}'?" if matches else ""
    return UserError(f"There is no corpus '{name}'.{hint} Legal: {legal}.")


def _located(name: str, cache_dir: Path) -> tuple[Path, Path | None]:
    """Returns the folder of all prepared copies and that of the copy, None if there is none."""
    root = Path(os.environ.get("TFDS_DATA_DIR", cache_dir / "tfds")).expanduser()
    given = Path(name).expanduser()
    return root, given if is_prepared(given) else _found(root, name)


def _found(root: Path, name: str) -> Path | None:
    """Returns the newest prepared copy of a name below a folder, None if there is none."""
    whole, _, version = name.partition(":")
    if not re.fullmatch(r"\w[\w./+-]*", whole):
        return None
    start = root / whole
    below = version or "*"
    copies = [path.parent for path in start.glob(f"{below}/{_MARKS[0]}")]
    copies += [start] if is_prepared(start) else []
    if "/" not in whole and not copies:  # A dataset with one configuration, left out of its name.
        copies = [path.parent for path in start.glob(f"*/{below}/{_MARKS[0]}")]
        if len({path.parent for path in copies}) > 1:
            return None
    copies = [path for path in copies if is_prepared(path)]
    # By numbers: 10.0.0 is newer than 9.0.0.
    number = lambda path: [int(n) for n in re.findall(r"\d+", path.name)]  # noqa: E731
    return max(copies, key=number, default=None)


def _prepared(name, root, cache_dir, column, legal) -> Copy:
    import tensorflow_datasets as tfds

    # Registers c4, wiki40b and others, which tfds does not register without tensorflow.
    import tensorflow_datasets.text

    try:
        builder = tfds.builder(name, data_dir=root, file_format="array_record")
        feature = _text_feature(builder, tfds, column)
        with exclusive(cache_dir, f"tfds-{builder.info.full_name}"):
            with _without_retries_offline():
                builder.download_and_prepare()
        records = storage.retry(f"Reading the corpus {name}", builder.as_data_source)
    except UserError:
        raise
    except tfds.core.DatasetNotFoundError as error:
        raise _unknown(name, tfds, legal) from error
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else ""
        needs = f"it needs the package {missing}" if missing else first_line(error)
        raise UserError(
            f"The tfds corpus '{name}' could not be prepared ({needs}). "
            f"Check its name, its requirements and the network. Legal: {legal}."
        ) from error
    return Copy(records, feature, _identity(builder, feature))


@contextlib.contextmanager
def _without_retries_offline() -> Iterator[None]:
    """Without a network, the first download that fails is the last; tfds retries for minutes.

    A server on this machine or in its network still serves.
    """
    from tensorflow_datasets.core.download import downloader

    before = downloader.MAX_RETRIES
    if not urllib.request.getproxies():  # A proxy resolves names itself.
        try:
            socket.getaddrinfo(_HOST_OF_TFDS, 443)
        except OSError:
            downloader.MAX_RETRIES = 0
    try:
        yield
    finally:
        downloader.MAX_RETRIES = before


def _identity(builder, feature) -> list:
    return [builder.info.full_name, feature] + [
        [split, info.shard_lengths, info.num_bytes] for split, info in builder.info.splits.items()
    ]


def _text_feature(builder, tfds, column) -> str:
    kinds = dict(builder.info.features.items())
    text = [
        name
        for name, kind in kinds.items()
        if isinstance(kind, tfds.features.Text)
        or (isinstance(kind, tfds.features.Tensor) and kind.shape == () and kind.dtype == object)
    ]
    if not column and "text" not in text:  # A title is a scalar as well: Text comes first.
        only = [name for name in text if isinstance(kinds[name], tfds.features.Text)]
        text = only or text
    return chosen_column(list(kinds), text, column, f"The tfds corpus '{builder.info.full_name}'")


def _records(builder, folder) -> Mapping[str, Sequence]:
    kind = builder.info.file_format.value
    if kind == "array_record":
        return storage.retry(f"Reading {folder}", builder.as_data_source)
    files: Any = {"tfrecord": _TFRecords, "parquet": _ParquetRecords}.get(kind)
    if files is None:
        raise UserError(
            f"The prepared copy {folder} has files of the format {kind}; legal: array_record, "
            "tfrecord, parquet."
        )
    parse = builder.info.features.deserialize_example_np
    return {
        split: _Records(
            tuple(files(Path(path), count) for path, count in zip(info.filepaths, lengths)), parse
        )
        for split, info in builder.info.splits.items()
        if (lengths := info.shard_lengths)
    }


@dataclass(frozen=True, eq=False)
class _Records(Sequence[dict[str, object]]):
    """The records of several files of serialised examples."""

    files: tuple[Any, ...]
    parse: Any

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(file.count for file in self.files))

    def __len__(self) -> int:
        return self._ends[-1] if self.files else 0

    def __getitem__(self, index: int) -> dict[str, object]:  # type: ignore[override]
        index = range(len(self))[int(index)]
        # The first file that ends behind the record.
        number = bisect.bisect_right(self._ends, index)
        file = self.files[number]
        return self.parse(file[index - self._ends[number] + file.count])


@dataclass(frozen=True, eq=False)
class _TFRecords:
    """A TFRecord file; where its records begin is read when the first one is."""

    path: Path
    count: int

    @cached_property
    def _bytes(self) -> StoredArray:
        return StoredArray(self.path, np.dtype("u1"), self.path.stat().st_size, 0)

    @cached_property
    def _starts(self) -> np.ndarray:
        starts, position, size = [], 0, len(self._bytes)
        with storage.open_regular(self.path) as file:
            while position < size:
                starts.append(position)
                file.seek(position)
                # The length of the content, and the checksum of that length.
                head = file.read(12)
                if len(head) < 12 or _masked_checksum(head[:8]) != head[8:]:
                    break
                position += _FRAME + _LENGTH.unpack_from(head)[0]
        if position != size or len(starts) != self.count:
            raise UserError(
                f"{self.path} is damaged: record {len(starts)} of {self.count} ends at byte "
                f"{position} of {size}. Copy the file again."
            )
        return np.array([*starts, size], np.int64)

    def __getitem__(self, index: int) -> bytes:
        start, stop = self._starts[index], self._starts[index + 1]
        # Between the head and the checksum of the content.
        content = self._bytes[start + 12 : stop - 4].tobytes()
        checksum = self._bytes[stop - 4 : stop].tobytes()
        if _masked_checksum(content) != checksum:
            raise UserError(f"Record {index} of {self.path} is damaged. Copy the file again.")
        return content


@dataclass(frozen=True, eq=False)
class _ParquetRecords:
    """A Parquet file of serialised examples, as tfds writes it; one row group is in memory."""

    path: Path
    count: int

    @cached_property
    def _table(self):
        table = ParquetTable(storage.open_regular(self.path), str(self.path))
        rows = sum(table.group_rows)
        if rows != self.count:
            raise UserError(
                f"{self.path} has {rows} of the {self.count} records that its dataset_info.json "
                "counts. Prepare it again, as array_record."
            )
        return table

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(self._table.group_rows))

    def __getitem__(self, index: int) -> bytes:
        group = bisect.bisect_right(self._ends, index)
        rows = self._group(group)
        return rows[index - self._ends[group] + len(rows)]

    def _group(self, number):
        # One group, as neighbours are read together.
        if getattr(self, "_last", (None,))[0] != number:
            rows = list(self._table.values("data", number))
            object.__setattr__(self, "_last", (number, rows))
        return self._last[1]  # type: ignore[attr-defined]


def _masked_checksum(content: bytes) -> bytes:
    """Returns the masked CRC-32C of TFRecord files, 4 bytes."""
    library = needed_module("google_crc32c", "Reading TFRecord files")
    crc = library.value(content)
    # Rotated right by 15 bits, plus a constant, as the format has it.
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)
