"""A line in the log of what takes long."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from sparse_dataflow.files.errors import escaped

SECONDS = 8.0
"""Seconds until the first line; each later one comes after twice the time."""

_LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def told(activity: str) -> Iterator[None]:
    """Says what a block does, such as "fetching owner/name", if it takes more than SECONDS."""
    ended, start = threading.Event(), time.monotonic()

    def tell():
        pause = SECONDS
        while not ended.wait(pause):
            _LOG.info("still %s after %.0f s", escaped(activity), time.monotonic() - start)
            pause = time.monotonic() - start

    with contextlib.suppress(RuntimeError):  # No more threads.
        threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
