"""The outcome of the last save, and whether the save may be retried."""

import time

from absl import logging

from sparse_dataflow.cluster import processes
from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError


class SaveOutcome:
    """Recorded by the background thread; read by the training thread after that has ended."""

    def __init__(self):
        self._permanent: UserError | None = None
        self._transient: UserError | None = None
        self._failures_in_a_row, self._retry_time = 0, 0.0

    def record_success(self) -> None:
        """Records that the save succeeded."""
        self._failures_in_a_row = 0

    def record_failure(self, error: Exception, user_error: UserError) -> None:
        """Records a failure; a transient one (see `storage`) may be retried a few times."""
        user_error.__cause__ = error
        if storage.is_transient(error) and self._failures_in_a_row < len(storage.WAITS):
            self._retry_time = time.monotonic() + storage.WAITS[self._failures_in_a_row]
            self._failures_in_a_row += 1
            self._transient = user_error
            logging.warning("%s The save will be retried.", user_error)
        else:
            self._permanent = user_error
            logging.error("%s", user_error)

    @property
    def retry_due(self) -> bool:
        """Whether the save failed with a transient error and its waiting time is over."""
        return self._transient is not None and time.monotonic() >= self._retry_time

    def take(self) -> UserError | None:
        """Returns and clears the outcome, the same on all processes.

        Returns:
          None if the save succeeded on every process; else the transient error.

        Raises:
          UserError: a process failed with a permanent error.
        """
        permanent, self._permanent = self._permanent, None
        transient, self._transient = self._transient, None
        processes.raise_on_all(permanent)
        words = processes.first_message(transient)
        return None if words is None else UserError(words)
