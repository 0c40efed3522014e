"""Where the processes of a run wait for each other while they save in the background.

Orbax has each of them wait until all have written their arrays, and again until the first has named
the checkpoint.  One that failed does not come there, and the others would wait for ever; so here it
does come, says that it failed, and all go on from that.
"""

import itertools
import json
import os
from typing import Any

import jax
import orbax.checkpoint as ocp

from sparse_dataflow.files import storage

TIMEOUT_SECONDS = 7 * 24 * 3600
"""That a save may take: it ends when the file system has done or refused it, not by the clock."""

_numbers = itertools.count()


class OtherFailed(OSError):
    """Another process could not write its part; the number is that of its error, if it had one."""


class SaveBarrier:
    """One of a checkpointer.

    All processes make theirs in the same order, and the same saves.
    """

    def __init__(self):
        self._number = next(_numbers)
        self._saves = self._waits = 0

    def begin(self) -> None:
        """Before each save, on every process."""
        self._saves, self._waits = self._saves + 1, 0

    def wait(self, *, key: str, timeout_ms: int) -> None:
        """Returns once all processes are here.

        Args:
          key: orbax's name of the place, which plays no part: a save has its places in order.
          timeout_ms: that it waits.

        Raises:
          OtherFailed: one of them failed.
        """
        place = self._arrive(timeout_ms)
        for name, told in _client().key_value_dir_get(place):
            number, words = json.loads(told)
            raise OtherFailed(number, f"process {name.rpartition('/')[2]}: {words}")

    def failed(self, error: BaseException) -> None:
        """Tells the others, who wait or will, that this process could not write its part.

        They hear it at the place that this process comes to next: one that has yet to look around
        at the place before must not, or it would leave the others waiting at this one.
        """
        if jax.process_count() == 1 or isinstance(error, OtherFailed):
            return
        number = storage.error_number(error)
        words = os.strerror(number) if number else f"{type(error).__name__}: {error}"[:300]
        name = f"{self._place(self._waits + 1)}/{jax.process_index()}"
        _client().key_value_set(name, json.dumps([number or 0, words]))
        self._arrive(TIMEOUT_SECONDS * 1000)

    def _place(self, wait):
        return f"sparse_dataflow/{self._number}/save/{self._saves}/{wait}"

    def _arrive(self, timeout_ms):
        self._waits += 1
        place = self._place(self._waits)
        ocp.multihost.get_barrier_sync_fn()(key=place, timeout_ms=timeout_ms)
        return place


def _client() -> Any:
    """The key-value store that jax's processes share, which has no public name."""
    from jax._src import distributed

    return distributed.global_state.client
