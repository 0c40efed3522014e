"""Progress of long preparations: a bar on a terminal, else a line in the log now and then."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

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
