"""Datasets of the library Hugging Face `datasets`: saved on disk, or fetched by name."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparse_dataflow.data.local_files import needed_module, say_once
from sparse_dataflow.files import waiting
from sparse_dataflow.files.errors import UserError, first_line

PREFIX = "hf:"
"""Begins the name of a dataset on the hub: hf:OWNER/NAME or hf:OWNER/NAME/CONFIG."""

FEATURE = "text"

CONTENT_BYTES = 2**30
"""Text of a dataset up to which its split follows the content, which is read for it."""

_BATCH_ROWS = 10_000


@dataclass(frozen=True, eq=False)
class HubRecords(Sequence[dict[str, bytes]]):
    """The rows of a dataset as records {"text": UTF-8}, without those of null or blank text.

    Attributes:
      rows: the dataset.
      kept: numbers of the rows with text; None for all.
    """

    rows: Any
    kept: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows) if self.kept is None else len(self.kept)

    @property
    def text_bytes(self) -> int:
        """Bytes of the text of all rows, about."""
        return self.rows.data.nbytes

    # Slices are not supported.
    def __getitem__(self, index: int) -> dict[str, bytes]:  # type: ignore[override]
        index = range(len(self))[index]
        row = index if self.kept is None else self.kept[index]
        return {FEATURE: self.rows[int(row)][FEATURE].encode()}


def is_saved_dataset(folder: Path) -> bool:
    """Returns whether `save_to_disk` of a dataset or of a dictionary of them wrote the folder."""
    names = (("dataset_dict.json",), ("dataset_info.json", "state.json"))
    return any(all((folder / name).is_file() for name in group) for group in names)


def saved_splits(folder: Path) -> dict[str, HubRecords]:
    """Opens a dataset that `save_to_disk` wrote, in bounded memory.

    Returns:
      {split: records}; {"train": records} for a dataset without splits.

    Raises:
      UserError: the package is missing, or the dataset cannot be read or has no text.
    """
    library = needed_module("datasets", f"The saved dataset {folder}")
    try:
        dataset = library.load_from_disk(str(folder), keep_in_memory=False)
    except Exception as error:  # The library raises errors of any type.
        raise UserError(f"The dataset {folder} cannot be read ({first_line(error)}).") from error
    return _splits(str(folder), dataset)


def fetched_splits(name: str, cache_dir: Path) -> dict[str, HubRecords]:
    """Fetches a dataset from the hub, or opens it in the cache.

    Args:
      name: OWNER/NAME or OWNER/NAME/CONFIG.
      cache_dir: cache folder; the variables HF_HOME and HF_DATASETS_CACHE come before it.

    Raises:
      UserError: see `saved_splits`, or the hub or the dataset cannot be reached.
    """
    library = needed_module("datasets", f"The corpus {PREFIX}{name}")
    owner, _, rest = name.partition("/")
    repository, _, config = rest.partition("/")
    own_cache = os.environ.keys() & {"HF_HOME", "HF_DATASETS_CACHE"}
    try:
        with waiting.told(f"fetching {PREFIX}{name} from the hub"):
            dataset = library.load_dataset(
                f"{owner}/{repository}" if repository else owner,
                config or None,
                cache_dir=None if own_cache else str(cache_dir / "hub"),
            )
    except Exception as error:  # The library raises errors of any type.
        raise UserError(
            f"The dataset {name} could not be fetched ({first_line(error)}). Check its name and "
            "the network; legal: hf:OWNER/NAME or hf:OWNER/NAME/CONFIG."
        ) from error
    return _splits(f"{PREFIX}{name}", dataset)


def identity(splits: Mapping[str, HubRecords]) -> list:
    """Returns what identifies the datasets without reading their text."""
    return [
        [split, len(records), records.rows.data.nbytes, records.rows._fingerprint]
        for split, records in sorted(splits.items())
    ]


def _splits(name, dataset) -> dict[str, HubRecords]:
    datasets = dict(dataset) if isinstance(dataset, Mapping) else {"train": dataset}
    for split, rows in datasets.items():
        kind = getattr(rows.features.get(FEATURE), "dtype", None)
        if kind not in ("string", "large_string"):
            raise UserError(
                f'The split {split} of {name} has no column "{FEATURE}" of strings; its columns: '
                f"{', '.join(rows.column_names)}."
            )
    return {split: _with_text(f"{split} of {name}", rows) for split, rows in datasets.items()}


def _with_text(name, dataset):
    """Returns the rows that have text."""
    compute = needed_module("pyarrow.compute", f"The dataset {name}")
    if dataset.format["type"] or FEATURE not in dataset.format["columns"]:
        dataset = dataset.with_format(None)
    rows = dataset.select_columns([FEATURE])
    marks = [np.empty(0, bool)]
    for table in rows.with_format("arrow").iter(_BATCH_ROWS):
        trimmed = compute.utf8_trim_whitespace(table.column(FEATURE))
        has_text = compute.greater(compute.utf8_length(trimmed), 0)
        marks.append(compute.fill_null(has_text, False).to_numpy())
    kept = np.flatnonzero(np.concatenate(marks))
    if len(kept) == len(rows):
        return HubRecords(rows)
    say_once(f"{name}: {len(rows) - len(kept):,} of {len(rows):,} rows are blank, and skipped")
    return HubRecords(rows, kept)
