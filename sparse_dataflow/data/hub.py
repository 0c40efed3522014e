"""Datasets of the library Hugging Face `datasets`: saved on disk, or files on the hub."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparse_dataflow.data import shards
from sparse_dataflow.data.cache import file_digest
from sparse_dataflow.data.local_files import chosen_column, say_once
from sparse_dataflow.data.packed_files import needed_module
from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import UserError, first_line

PREFIX = "hf:"
"""Begins the name of a dataset on the hub: hf:OWNER/NAME or hf:OWNER/NAME/CONFIG, with
@REVISION after either."""

FEATURE = "text"

_BATCH_ROWS = 10_000
_RECORD_BATCH = 3

_SPLITS, _DATASET = ("dataset_dict.json",), ("dataset_info.json", "state.json")
"""Files of a saved dictionary of datasets, and of a saved dataset."""


@dataclass(frozen=True, eq=False)
class HubRecords(Sequence[dict[str, bytes]]):
    """The rows of a dataset as records {"text": UTF-8}, without those of null or blank text.

    Attributes:
      kept: numbers of the rows with text; None for all.
    """

    rows: Any
    column: str
    kept: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows) if self.kept is None else len(self.kept)

    # Slices are not supported.
    def __getitem__(self, index: int) -> dict[str, bytes]:  # type: ignore[override]
        index = range(len(self))[index]
        row = index if self.kept is None else self.kept[index]
        return {FEATURE: self.rows[int(row)][self.column].encode()}


def is_saved_dataset(folder: Path) -> bool:
    """Returns whether `save_to_disk` of a dataset or of a dictionary of them wrote the folder."""
    return any(all((folder / name).is_file() for name in names) for names in (_SPLITS, _DATASET))


def saved_splits(folder: Path, column: str = "") -> dict[str, HubRecords]:
    """Opens a dataset that `save_to_disk` wrote, in bounded memory.

    Returns:
      {split: records}; {"train": records} for a dataset without splits.

    Raises:
      UserError: the package is missing, or the dataset cannot be read or has no such column.
    """
    library = needed_module("datasets", f"The saved dataset {folder}")
    try:
        _refuse_odd_files(folder)
        dataset = library.load_from_disk(str(folder), keep_in_memory=False)
    except Exception as error:  # The library raises errors of any type.
        raise UserError(f"The dataset {folder} cannot be read ({first_line(error)}).") from error
    return _splits(str(folder), dataset, column)


def _refuse_odd_files(folder):
    """Refuses what the library would open at a place, or in a size, that a file names."""
    pyarrow, ipc = (needed_module(name, str(folder)) for name in ("pyarrow", "pyarrow.ipc"))
    names = (*_SPLITS, *_DATASET)
    for path in (path for name in names for path in sorted(folder.rglob(name))):
        fields = json_files.load(path)
        for row in fields.get("_data_files") or () if isinstance(fields, dict) else ():
            data = path.parent / row["filename"]
            if data.resolve().parent != path.parent.resolve():
                raise ValueError(f"{path} names the file {row['filename']} of another folder")
            with pyarrow.memory_map(str(storage.regular(data))) as file:
                for message in ipc.MessageReader.open_stream(file):
                    _refuse_compressed(data, bytes(message.metadata))


def _refuse_compressed(path, metadata: bytes):
    """Refuses a message of Arrow that unfolds when it is read; those of the library are mapped."""
    table = needed_module("flatbuffers.table", str(path)).Table
    numbers = needed_module("flatbuffers.number_types", str(path))
    message = table(metadata, int.from_bytes(metadata[:4], "little"))
    # Fields of Message and RecordBatch in Arrow's Message.fbs.
    kind = message.Offset(6)
    if kind and message.Get(numbers.Uint8Flags, message.Pos + kind) == _RECORD_BATCH:
        batch = table(metadata, 0)
        message.Union(batch, message.Offset(8))
        if batch.Offset(10):
            raise ValueError(f"{path} is compressed; legal: what save_to_disk writes")


@dataclass(frozen=True)
class HubFiles:
    """The files of a dataset on the hub.

    Attributes:
      name: hf:OWNER/NAME@REVISION or hf:OWNER/NAME/CONFIG@REVISION, which never changes.
      splits: {split: addresses of its files, in order}.
    """

    name: str
    splits: Mapping[str, tuple[str, ...]]


def hub_files(name: str) -> HubFiles:
    """Lists the files of a dataset on the hub, without reading them.

    Args:
      name: OWNER/NAME, OWNER/NAME/CONFIG, and @REVISION after either.

    Raises:
      UserError: the package is missing, the hub cannot be reached or has no such dataset, or it
        has files of other kinds than `shards` reads.
    """
    library = needed_module("datasets", f"The corpus {PREFIX}{name}")
    whole, _, revision = name.partition("@")
    owner, _, rest = whole.partition("/")
    repository, _, config = rest.partition("/")
    dataset = f"{owner}/{repository}" if repository else owner
    try:
        with storage.told(f"listing {PREFIX}{name} on the hub"):
            builder = library.load_dataset_builder(
                dataset, config or None, revision=revision or None
            )
        splits = {
            str(split): tuple(map(str, files))
            for split, files in (builder.config.data_files or {}).items()
        }
    except Exception as error:  # The library raises errors of any type.
        raise UserError(
            f"The dataset {name} could not be listed ({first_line(error).rstrip('.')}). Check its "
            "name and the network; legal: hf:OWNER/NAME or hf:OWNER/NAME/CONFIG."
        ) from error
    addresses = [address for files in splits.values() for address in files]
    others = [address for address in addresses if not shards.is_readable(address)]
    if others or not addresses:
        what = f"has files such as {Path(others[0]).name}" if others else "has no files of data"
        raise UserError(f"The dataset {name} {what}; legal: {shards.LEGAL_SHARDS}.")
    # Addresses name the commit that the revision was when they were listed.
    pinned = re.search(r"@([^/]+)/", addresses[0])
    return HubFiles(f"{PREFIX}{whole}@{pinned[1]}" if pinned else f"{PREFIX}{name}", splits)


def identity(splits: Mapping[str, HubRecords], cache_dir: Path) -> list:
    """Returns what tells datasets from others, from all bytes of their files."""
    return [
        [split, records.column, len(records), records.rows._fingerprint]
        + [file_digest(Path(file["filename"]), cache_dir) for file in records.rows.cache_files]
        for split, records in sorted(splits.items())
    ]


def _splits(name, dataset, column) -> dict[str, HubRecords]:
    datasets = dict(dataset) if isinstance(dataset, Mapping) else {"train": dataset}
    splits = {}
    for split, rows in datasets.items():
        kinds = {key: getattr(kind, "dtype", None) for key, kind in rows.features.items()}
        strings = [key for key, kind in kinds.items() if kind in ("string", "large_string")]
        place = f"The split {split} of {name}"
        chosen = chosen_column(rows.column_names, strings, column, place)
        splits[split] = _with_text(f"{split} of {name}", rows, chosen)
    return splits


def _with_text(name, dataset, column):
    """Returns the rows that have text in a column."""
    compute = needed_module("pyarrow.compute", f"The dataset {name}")
    # A format of its own may hide the column, or give other types than str.
    if dataset.format["type"] or column not in dataset.format["columns"]:
        dataset = dataset.with_format(None)
    rows = dataset.select_columns([column])
    marks = [np.empty(0, bool)]
    try:
        for table in rows.with_format("arrow").iter(_BATCH_ROWS):
            trimmed = compute.utf8_trim_whitespace(table.column(column))
            has_text = compute.greater(compute.utf8_length(trimmed), 0)
            marks.append(compute.fill_null(has_text, False).to_numpy())
    except Exception as error:  # The library raises errors of any type.
        raise UserError(f"The {name} is damaged ({first_line(error)}). Copy it again.") from error
    kept = np.flatnonzero(np.concatenate(marks))
    if len(kept) == len(rows):
        return HubRecords(rows, column)
    say_once(f"{name}: {len(rows) - len(kept):,} of {len(rows):,} rows are blank, and skipped")
    return HubRecords(rows, column, kept)
