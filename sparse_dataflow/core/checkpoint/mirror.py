"""A second place for checkpoints: each is copied there in the background, and back when it is lost.

The copy of a checkpoint is verified by the checksums of its manifest before it counts.
"""

import concurrent.futures
import functools
import os
from pathlib import Path

from absl import logging

from sparse_dataflow.core.checkpoint import checkpoint_folder
from sparse_dataflow.core.checkpoint.copies import copies_at
from sparse_dataflow.files import json_files, manifest, storage
from sparse_dataflow.files.addresses import Address
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.information import LOGGER

BESIDE = "metrics.jsonl"
"""File next to the folder of checkpoints that is copied with each one."""


class Mirror:
    """The copies of a folder of checkpoints; for the process that finishes saves.

    A copy that fails is logged and ends nothing: the next checkpoint is another attempt.
    """

    def __init__(self, source: Path, place: Path | Address, keep: int):
        """Makes the place of the copies and removes unfinished ones.

        Args:
          source: folder of the checkpoints.
          place: folder or address of the copies.
          keep: number of newest copies to keep, in addition to the best one.

        Raises:
          UserError: the place cannot be written.
        """
        self._source, self._copies, self._keep = source, copies_at(place), keep
        try:
            self._copies.prepare()
        except OSError as error:
            raise UserError(f"Checkpoints cannot be copied to {place}: {_words(error)}.") from error
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "mirror")
        self._last: concurrent.futures.Future = concurrent.futures.Future()
        self._last.set_result(None)

    def steps(self) -> set[int]:
        """Returns the steps of the finished copies, without verifying them.

        Raises:
          UserError: they cannot be read, and there is no checkpoint but them to go on from.
        """
        try:
            return set(self._copies.facts())
        except OSError as error:
            if not checkpoint_folder.steps(self._source):
                raise UserError(
                    f"The mirror {self._copies} cannot be read: {_words(error)}; no checkpoint is "
                    f"in {self._source}."
                ) from error
            logging.warning("The mirror %s cannot be read: %s.", self._copies, _words(error))
            return set()

    def update(self) -> None:
        """Starts to copy the newest checkpoint, once the copy under way has ended."""
        self._last = self._thread.submit(self._copy_newest)

    def wait(self) -> None:
        """Waits for the copy under way."""
        self._last.result()

    def restore(self, step: int) -> bool:
        """Copies a checkpoint back; returns False if the copy is missing or damaged.

        Raises:
          UserError: the folder of the checkpoints cannot be written.
        """
        if step not in self.steps():
            return False
        LOGGER.info("Restoring the checkpoint of step %d from %s.", step, self._copies)
        back = functools.partial(self._copies.get, step, self._source)
        try:
            storage.retry(f"Copying {self._copies}/{step}", back)
            self._restore_beside()
        except manifest.Damaged as damage:
            self._copies.set_aside(step, str(damage))
            return False
        except OSError as error:
            raise UserError(
                f"The checkpoint of step {step} cannot be copied from {self._copies} to "
                f"{self._source}: {_words(error)}."
            ) from error
        return True

    def _restore_beside(self) -> None:
        """Takes the metrics of the copy where they reach further: those here may be older."""
        beside = self._source.parent / BESIDE
        new = beside.with_name(f"{BESIDE}.new")
        try:
            if self._copies.get_beside(BESIDE, new) and _last_step(new) > _last_step(beside):
                os.replace(new, beside)
        finally:
            new.unlink(missing_ok=True)

    def _copy_newest(self) -> None:
        step = -1
        try:
            step = max(checkpoint_folder.read_facts(self._source), default=-1)
            if step < 0 or step in self._copies.facts():
                return
            # Before the checkpoint counts: a resumed run drops the rows after it, and needs all
            # rows before it.
            if (self._source.parent / BESIDE).exists():
                self._copies.put_beside(self._source.parent / BESIDE)
            copy = functools.partial(self._copies.put, step, self._source)
            storage.retry(f"Copying {self._source / str(step)}", copy)
            self._copies.prune(self._keep, step)
        except (OSError, manifest.Damaged) as error:
            logging.warning(
                "The checkpoint of step %d could not be copied to %s: %s. The next one will be.",
                *(step, self._copies, _words(error)),
            )


def _words(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).rstrip(".")


def _last_step(metrics: Path) -> int:
    """Returns the step of the last whole row; -1 without one, -2 without the file."""
    try:
        lines = metrics.read_bytes().splitlines()
    except FileNotFoundError:
        return -2
    for line in reversed(lines):
        try:
            return int(json_files.parse(line)["step"])
        except json_files.MALFORMED:
            continue
    return -1
