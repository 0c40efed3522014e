"""Measured tile sizes of the block-sparse product; they override the heuristics.

`python -m experiments.kernel_bench --tune` writes a JSON file for each kind of device. A damaged
file, or tiles that the chip cannot run, are ignored with one logged warning.
"""

import dataclasses
import functools
import json
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
from absl import logging

from sparse_dataflow.core.ops.dispatch import Shaped
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import detect as hardware

MAX_FILE_BYTES = 4 << 20
"""Largest file that is read."""

MAX_INTEGER = 1 << 30
"""Largest legal integer in a file."""

OP = "block_sparse_matmul"
"""Folder of the product in this package, and of its files in another folder."""

PRODUCTS = ("forward", "input_gradient", "weight_gradient")
"""y = xW, dx = dy Wᵀ and dW."""


@dataclasses.dataclass(frozen=True)
class Case:
    """The key of a measurement: tiles apply only to an equal case.

    Attributes:
      product: one of PRODUCTS.
      tokens: rows of x.
      in_features: width of x.
      out_features: width of y.
      stored: number of stored blocks.
      block: side of a block.
      dtype: dtype of x and of the stored blocks.
    """

    implementation: str
    product: str
    tokens: int
    in_features: int
    out_features: int
    stored: int
    block: int
    dtype: str


P = TypeVar("P")
G = TypeVar("G")


@dataclasses.dataclass(frozen=True)
class ProductTuning(Generic[P, G]):
    """Tiles of the three products on one device.

    Attributes:
      forward: tiles of y = xW.
      input_gradient: tiles of dx = dy Wᵀ.
      weight_gradient: tiles of dW.
    """

    forward: P
    input_gradient: P
    weight_gradient: G


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """Tile sizes that an autotuner may try.

    Attributes:
      start: tile sizes of the heuristic.
      choices: candidate values of each field of the tile sizes.
      legal: whether the chip can run given tile sizes.
    """

    start: Any
    choices: Mapping[str, Sequence]
    legal: Callable[[Any], bool]

    def neighbours(self, tiles: Any) -> list:
        """Return the legal tile sizes that differ from `tiles` in one field."""
        return [
            neighbour
            for name, values in self.choices.items()
            for value in values
            if value != getattr(tiles, name)
            and self.legal(neighbour := dataclasses.replace(tiles, **{name: value}))
        ]


def device_kind() -> str:
    """Return the target's device kind: jax's name, or a CPU's model and cores."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    kind = device.device_kind
    return hardware.cpu_name() if kind == "cpu" else kind


def file_path(kind: str) -> Path:
    """Return the file of tile sizes of a device kind."""
    return Path(__file__).parent / OP / "tuned" / f"{hardware.slug(kind)}.json"


def keyed_by_case(
    implementation: str,
    x: Shaped,
    values: Shaped,
    widths: tuple[int, int],
    spaces: Mapping[str, SearchSpace],
) -> dict[Case, SearchSpace]:
    """Return the search spaces of the products, keyed by `Case`.

    Args:
      x: [tokens, in_features]; only shape and dtype are read.
      values: [nnz, block, block]; only shape is read.
      widths: (in_features, out_features).
    """
    stored, block = values.shape[:2]
    shape = (len(x), *widths, stored, block, str(x.dtype))
    return {Case(implementation, product, *shape): space for product, space in spaces.items()}


def choose_tiles(spaces: Mapping[Case, SearchSpace]) -> dict[str, Any]:
    """Return the tile sizes of each product: measured ones, else the heuristic's."""
    return {case.product: _measured(case, space) or space.start for case, space in spaces.items()}


def _measured(case, space):
    """Return the measured tile sizes of a case on the target device; None if there are none."""
    path = file_path(device_kind())
    entries = _entries(path)
    if case not in entries:
        return None
    try:
        tiles = parse(type(space.start), entries[case], str(case))
        if not space.legal(tiles):
            raise UserError(f"This chip cannot run {tiles} of {case}.")
    except UserError as error:
        _warn_ignored(path.name, str(error))
        return None
    return tiles


@functools.cache
def _entries(path):
    if not path.exists():
        return {}
    try:
        return read(path)
    except UserError as error:
        _warn_ignored(path.name, str(error))
        return {}


@functools.cache
def _warn_ignored(name, reason):
    logging.warning("Ignored tuned tile sizes in %s: %s", name, reason)


def read(path: Path) -> dict[Case, Any]:
    """Read a file of tile sizes as {case: JSON of the tile sizes}; `parse` converts the latter.

    Raises:
      UserError: if the file is too large, is not JSON, or has other fields.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise UserError(f"{path.name} has more than {MAX_FILE_BYTES} bytes.")
    try:
        content = json_files.load(path, MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"{path.name} is not valid JSON: {error}.") from None
    listed = content.get("entries") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise UserError(f'{path.name} has no list of "entries".')
    entries = {}
    for number, entry in enumerate(listed):
        where = f"{path.name}, entry {number}"
        if not isinstance(entry, dict) or "tiles" not in entry:
            raise UserError(f'{where} must be an object with "tiles".')
        names = {field.name for field in dataclasses.fields(Case)}
        entries[parse(Case, {k: v for k, v in entry.items() if k in names}, where)] = entry["tiles"]
    return entries


def parse(kind: Any, data: Any, where: str) -> Any:
    """Convert JSON to a `kind`: a dataclass, a tuple of one type, an int, a str or a bool.

    Raises:
      UserError: if field names or types differ, or an int is outside [0, MAX_INTEGER].
    """
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        # A field that an older file lacks takes its default.
        needed = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
        if not isinstance(data, dict) or not needed <= data.keys() <= hints.keys():
            raise UserError(f"{where}: {kind.__name__} needs the fields {', '.join(hints)}.")
        return kind(**{name: parse(hints[name], data[name], f"{where}, {name}") for name in data})
    if typing.get_origin(kind) is tuple and isinstance(data, list):
        return tuple(parse(typing.get_args(kind)[0], item, where) for item in data)
    if type(data) is not kind or (kind is int and not 0 <= data <= MAX_INTEGER):
        legal = f"an integer from 0 to {MAX_INTEGER}" if kind is int else kind.__name__
        raise UserError(f"{where} is {str(data)[:40]}; legal: {legal}.")
    return data


def write(path: Path, measurements: Iterable[tuple[Case, Any, dict]], source: dict) -> None:
    """Add measurements to a file; they replace earlier ones of equal cases.

    Args:
      measurements: (case, tile sizes, further fields of the entry).
      source: command, date, machine and versions.

    Raises:
      UserError: if the file exists and cannot be read.
    """
    entries = {}
    if path.exists():
        read(path)  # Never overwrite a file of another format.
        for entry in json_files.load(path)["entries"]:
            entries[_identity(entry)] = entry
    for case, tiles, measured in measurements:
        entry = {**dataclasses.asdict(case), "tiles": dataclasses.asdict(tiles), **measured}
        entries[_identity(entry)] = entry
    content = {**source, "entries": list(entries.values())}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    _entries.cache_clear()


def _identity(entry):
    return tuple(entry[field.name] for field in dataclasses.fields(Case))
