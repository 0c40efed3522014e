"""Tile sizes that were measured: a JSON file a device kind beside each op, read before heuristics.

`python -m experiments.kernel_bench --tune` writes them.  A file that is damaged, or that asks for
what a chip cannot hold, is told in one logged line and not used; nothing in it is run.
"""

import dataclasses
import functools
import json
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging

from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import detect as hardware
from sparse_dataflow.kernels.dispatch import Shaped

MOST_BYTES = 4 << 20
"""Of a file that is read."""

MOST_SIZE = 1 << 30
"""Of a number in it."""


PRODUCTS = ("forward", "input_gradient", "weight_gradient")
"""y = xW, dx = dy Wᵀ and dW."""

LEAST_GAIN = 0.03
"""Fraction of the time that a move must save; less is noise."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What a measurement is of; only the same case is served by it.

    Attributes:
      implementation: of the op.
      product: one of PRODUCTS, or another op's pass.
      tokens: rows of x.
      in_features: width of x.
      out_features: width of y.
      stored: number of stored blocks.
      block: side of a block.
      dtype: of x and the stored blocks.
    """

    implementation: str
    product: str
    tokens: int
    in_features: int
    out_features: int
    stored: int
    block: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Space:
    """Tile sizes that may be tried.

    Attributes:
      start: the heuristic's.
      choices: field of the tile sizes -> its values.
      legal: whether a chip holds them.
    """

    start: Any
    choices: Mapping[str, Sequence]
    legal: Callable[[Any], bool]

    def neighbours(self, tiles: Any) -> list:
        """Legal tile sizes that differ from these in one field."""
        return [
            other
            for name, values in self.choices.items()
            for value in values
            if value != getattr(tiles, name)
            and self.legal(other := dataclasses.replace(tiles, **{name: value}))
        ]


def descend(
    space: Space, seconds_of: Callable[[list], Sequence[float]], rounds: int = 3
) -> tuple[Any, float, float]:
    """Moves to the fastest neighbour until there is none, or so often.

    Args:
      space: what may be tried.
      seconds_of: tile sizes -> seconds of each, measured beside one another; infinite where they do
        not run.
      rounds: of moves.

    Returns:
      The tile sizes, and in the round that chose them their seconds and the start's.
    """
    best, own, first = space.start, math.nan, math.nan
    for _ in range(rounds):
        tried = list(dict.fromkeys([space.start, best, *space.neighbours(best)]))
        seconds = dict(zip(tried, seconds_of(tried), strict=True))
        fastest = min(tried, key=seconds.__getitem__)
        stays = seconds[fastest] > (1 - LEAST_GAIN) * seconds[best]
        best = best if stays else fastest
        own, first = seconds[best], seconds[space.start]
        if stays:
            break
    return best, own, first


def device_kind() -> str:
    """The kind of the device compiled for: jax's name of it, or a CPU's model and cores."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    kind = device.device_kind
    return hardware.cpu_name() if kind == "cpu" else kind


def path_of(op: str, kind: str) -> Path:
    """The file of an op (a folder of this package) for a device kind."""
    return Path(__file__).parent / op / "tuned" / f"{hardware.slug(kind)}.json"


def by_case(
    implementation: str,
    x: Shaped,
    values: Shaped,
    widths: tuple[int, int],
    spaces: Mapping[str, Space],
) -> dict[Case, Space]:
    """The spaces of the products by what a measurement of each is of.

    Args:
      implementation: of the op.
      x: [tokens, in_features]; only shapes and dtypes are read.
      values: [nnz, block, block].
      widths: in_features and out_features.
      spaces: product -> space.
    """
    stored, block = values.shape[:2]
    shape = (len(x), *widths, stored, block, str(x.dtype))
    return {Case(implementation, product, *shape): space for product, space in spaces.items()}


def fastest(op: str, spaces: Mapping[Case, Space]) -> dict[str, Any]:
    """The measured tile sizes of each product where there are any, else its space's start."""
    return {
        case.product: lookup(op, case, type(space.start), space.legal) or space.start
        for case, space in spaces.items()
    }


def lookup(op: str, case: Case, kind: type, legal: Callable[[Any], bool]) -> Any:
    """Measured tile sizes of a case on the device compiled for; None where there are none.

    Args:
      op: the op's folder.
      case: the product.
      kind: dataclass of the tile sizes.
      legal: whether the chip holds them.
    """
    path = path_of(op, device_kind())
    entries = _entries(path)
    if case not in entries:
        return None
    try:
        tiles = parsed(kind, entries[case], str(case))
        if not legal(tiles):
            raise UserError(f"{case} has {tiles}, which this chip cannot run.")
    except UserError as error:
        _ignored(path.name, str(error))
        return None
    return tiles


@functools.cache
def _entries(path):
    if not path.exists():
        return {}
    try:
        return read(path)
    except UserError as error:
        _ignored(path.name, str(error))
        return {}


@functools.cache
def _ignored(name, reason):
    logging.warning("Tuned tile sizes in %s are not used: %s", name, reason)


def read(path: Path) -> dict[Case, Any]:
    """What is measured in a file: tile sizes as JSON has them, not yet `parsed`.

    Raises:
      UserError: if it is no such file.
    """
    if path.stat().st_size > MOST_BYTES:
        raise UserError(f"{path.name} is larger than {MOST_BYTES} bytes.")
    try:
        content = json_files.load(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"{path.name} is no JSON: {error}.") from None
    listed = content.get("entries") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise UserError(f'{path.name} has no list of "entries".')
    entries = {}
    for number, entry in enumerate(listed):
        where = f"{path.name}, entry {number}"
        if not isinstance(entry, dict) or "tiles" not in entry:
            raise UserError(f'{where} is no object with "tiles".')
        names = {field.name for field in dataclasses.fields(Case)}
        entries[parsed(Case, {k: v for k, v in entry.items() if k in names}, where)] = entry[
            "tiles"
        ]
    return entries


def parsed(kind: Any, data: Any, where: str) -> Any:
    """JSON as a `kind`: a dataclass, a tuple of one kind, a whole number, a name or a switch.

    Raises:
      UserError: if names or types differ, or a number is below 0 or above MOST_SIZE.
    """
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if not isinstance(data, dict) or data.keys() != hints.keys():
            raise UserError(f"{where}: a {kind.__name__} has {', '.join(hints)}.")
        return kind(
            **{name: parsed(hint, data[name], f"{where}, {name}") for name, hint in hints.items()}
        )
    if typing.get_origin(kind) is tuple and isinstance(data, list):
        return tuple(parsed(typing.get_args(kind)[0], part, where) for part in data)
    if type(data) is not kind or (kind is int and not 0 <= data <= MOST_SIZE):
        legal = f"a whole number from 0 to {MOST_SIZE}" if kind is int else kind.__name__
        raise UserError(f"{where} is {str(data)[:40]}; legal: {legal}.")
    return data


def write(path: Path, found: Iterable[tuple[Case, Any, dict]], source: dict) -> None:
    """Adds measurements to a file, in the place of earlier ones of the same cases.

    Args:
      path: the file.
      found: (case, tile sizes, what else is known of the measurement).
      source: command, date, machine and versions.
    """
    entries = {}
    if path.exists():
        read(path)  # Refuses to write over what it cannot read.
        for entry in json_files.load(path)["entries"]:
            entries[_identity(entry)] = entry
    for case, tiles, measured in found:
        entry = {**dataclasses.asdict(case), "tiles": dataclasses.asdict(tiles), **measured}
        entries[_identity(entry)] = entry
    content = {**source, "entries": list(entries.values())}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    _entries.cache_clear()


def _identity(entry):
    return tuple(entry[field.name] for field in dataclasses.fields(Case))
