"""Copies in the cache of what lies at an address, so that every reader of files reads it.

A copy belongs to one state of the address: names, sizes and versions of its objects. Another state
is fetched into another folder, and the old one stays until the user clears the cache.
"""

import functools
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from sparse_dataflow.data.cache import derive
from sparse_dataflow.files import addresses
from sparse_dataflow.files.addresses import Address, Entry
from sparse_dataflow.files.errors import UserError

FOLDER = "fetched"
"""Folder of the copies in the cache."""

_GIB = 2**30


def path_of(name: str, cache_dir: Path) -> Path:
    """Returns the path that a name is; what lies at an address is fetched, as `fetched` does."""
    if addresses.is_address(name):
        return fetched(name, cache_dir)
    return Path(name).expanduser()


def fetched(
    text: str,
    cache_dir: Path,
    choose: Callable[[Iterable[str]], Iterable[str]] = lambda names: names,
) -> Path:
    """Returns a copy of the object at an address, or of the objects below it, as file or folder.

    What is there in the same state is not fetched again; a fetch that was killed goes on.

    Args:
      choose: names below the address -> those that are needed.

    Raises:
      UserError: the address is empty or cannot be read, or the cache cannot be written.
    """
    address = Address(addresses.normal(text))
    try:
        entries, parent = _entries(address)
        chosen = {name: entries[name] for name in sorted(choose(entries))}
        listing = [[name, entry.size, entry.version] for name, entry in chosen.items()]
        words = re.sub(r"[^a-zA-Z0-9]+", "-", str(parent).partition("://")[2]).strip("-")[-60:]
        origin = {"address": str(parent), "objects": listing}
        fetch = functools.partial(_fetch, parent, chosen)
        folder = derive(cache_dir, FOLDER, words, origin, fetch).path
    except OSError as error:
        raise UserError(
            f"{address} cannot be read: {error.strerror or error}. Check its name, the credentials "
            "in the environment and the network."
        ) from error
    return folder if parent == address else folder / address.name


def _entries(address: Address) -> tuple[dict[str, Entry], Address]:
    """Returns the objects of an address, and what their names are relative to."""
    entry = address.entry()
    if entry is not None:
        return {address.name: entry}, address.parent
    entries = address.entries()
    if not entries:
        raise UserError(f"{address} does not exist: there is no object of that name or below it.")
    return entries, address


def _fetch(address, entries, folder):
    size = sum(entry.size for entry in entries.values())
    logging.getLogger(__name__).info(
        "fetching %d files, %.2f GiB, from %s into %s", len(entries), size / _GIB, address, folder
    )
    addresses.fetch(address, entries, folder)


T = TypeVar("T")

SECONDS = 15.0
"""Seconds between two lines of the log, and before the first."""

_LOG = logging.getLogger(__name__)


def with_progress(items: Iterable[T], label: str, total: int = 0, first: int = 0) -> Iterator[T]:
    """Yields the items and shows how many were taken.

    Args:
      items: the items that are left.
      label: what is done, such as "tokenizing books".
      total: number of all items; 0 if unknown.
      first: number of items that an earlier process has done.
    """
    if sys.stderr is not None and sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(
            items, label, total or None, initial=first, unit="documents", delay=2, leave=False
        )
        return
    last = time.monotonic()
    for number, item in enumerate(items, start=first + 1):
        yield item
        if time.monotonic() - last > SECONDS:
            last = time.monotonic()
            _LOG.info("%s: %s%s documents", label, f"{number:,}", f" of {total:,}" * bool(total))
