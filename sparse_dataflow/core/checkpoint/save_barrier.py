"""The barriers of a background save between processes, which also carry failures.

Orbax waits until all processes have written their arrays, and again until process 0 has renamed the
checkpoint.  A process whose write failed would never reach these barriers, and the others would
wait for it until the timeout.  Here the failing process does reach the next barrier, after it has
published its error; all processes then raise.
"""

import itertools
import json
import os
from typing import Any

import jax
import orbax.checkpoint as ocp

from sparse_dataflow.files import json_files, storage

TIMEOUT_SECONDS = 7 * 24 * 3600
"""Timeout of a save: a slow file system may take as long as it needs."""

_numbers = itertools.count()


class PeerSaveError(OSError):
    """Another process failed to write its arrays; `errno` is that of its error, or 0."""


class SaveBarrier:
    """The barriers of one checkpointer.

    All processes create their checkpointers, and start their saves, in the same order.
    """

    def __init__(self):
        self._number = next(_numbers)
        self._saves = self._waits = 0

    def start_save(self) -> None:
        """Starts counting the barriers of a new save; called on every process."""
        self._saves, self._waits = self._saves + 1, 0

    def wait(self, *, key: str, timeout_ms: int) -> None:
        """Waits until all processes are at this barrier.

        Args:
          key: orbax's name of the barrier; unused, as the barriers of a save have a fixed order.
          timeout_ms: timeout in milliseconds.

        Raises:
          PeerSaveError: a process failed; the text names it.
        """
        place = self._arrive(timeout_ms)
        for name, failure in _client().key_value_dir_get(place):
            number, words = json_files.parse(failure)
            raise PeerSaveError(number, f"process {name.rpartition('/')[2]}: {words}")

    def report_failure(self, error: BaseException) -> None:
        """Publishes this process's failure and joins the barrier where the others wait.

        The failure is published under the next barrier.  Under the previous one, a process that
        has not yet looked would raise there and leave the others waiting at the next one.
        """
        if jax.process_count() == 1 or isinstance(error, PeerSaveError):
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
    """Returns the key-value store that jax's processes share, which has no public name."""
    from jax._src import distributed

    return distributed.global_state.client
