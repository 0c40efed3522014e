"""How the last save of a checkpoint ended, and whether it is worth another."""

import time

from absl import logging

from sparse_dataflow.distributed import processes
from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError


class SaveOutcome:
    """Written by the thread that saves, asked by the one that trains once the other has ended."""

    def __init__(self):
        self._failure: UserError | None = None
        self._passing: UserError | None = None
        self._in_a_row, self._not_before = 0, 0.0

    def written(self) -> None:
        """Notes that all went well."""
        self._in_a_row = 0

    def failed(self, error: Exception, told: UserError) -> None:
        """Notes a failure; one that passes (see `storage`) is worth another save a few times."""
        told.__cause__ = error
        if storage.is_transient(error) and self._in_a_row < len(storage.WAITS):
            self._not_before = time.monotonic() + storage.WAITS[self._in_a_row]
            self._in_a_row += 1
            self._passing = told
            logging.warning("%s It will be tried again.", told)
        else:
            self._failure = told
            logging.error("%s", told)

    @property
    def again(self) -> bool:
        """Whether the save failed for a reason that passes, and it is time for another."""
        return self._passing is not None and time.monotonic() >= self._not_before

    def taken(self) -> UserError | None:
        """Forgets the outcome, the same on all processes: None where the save was written on each,
        what was wrong where it is worth another.

        Raises:
          UserError: it is not.
        """
        failure, self._failure = self._failure, None
        passing, self._passing = self._passing, None
        processes.raise_on_all(failure)
        told = processes.first_message(passing)
        return None if told is None else UserError(told)
