"""A second place for checkpoints: each is copied there in the background, and back when it is lost.

The copy of a checkpoint is verified by the checksums of its manifest before it counts. It is
written as `Checkpoints` writes: under another name, flushed, then renamed.
"""

import concurrent.futures
import functools
import os
import shutil
from pathlib import Path

from absl import logging

from sparse_dataflow.checkpoint import checkpoint_folder
from sparse_dataflow.files import manifest, storage
from sparse_dataflow.files.errors import UserError

BESIDE = "metrics.jsonl"
"""File next to the folder of checkpoints that is copied with each one."""


class Mirror:
    """The copies of a folder of checkpoints; for the process that finishes saves.

    A copy that fails is logged and ends nothing: the next checkpoint is another attempt.
    """

    def __init__(self, source: Path, folder: Path, keep: int):
        """Creates the folder and removes unfinished copies.

        Args:
          source: folder of the checkpoints.
          folder: folder of the copies.
          keep: number of newest copies to keep, in addition to the best one.

        Raises:
          UserError: the folder cannot be written.
        """
        checkpoint_folder.prepare(folder)
        self._source, self._folder, self._keep = source, folder, keep
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "mirror")
        self._last: concurrent.futures.Future = concurrent.futures.Future()
        self._last.set_result(None)

    def steps(self) -> set[int]:
        """Returns the steps of the finished copies, without verifying them."""
        try:
            return set(checkpoint_folder.read_facts(self._folder))
        except OSError as error:
            logging.warning("The mirror %s cannot be read: %s.", self._folder, error.strerror)
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
        logging.warning("Restoring the checkpoint of step %d from %s.", step, self._folder)
        back = functools.partial(_transfer, step, self._folder, self._source)
        try:
            storage.retry(f"Copying {self._folder / str(step)}", back)
            if not (self._source.parent / BESIDE).exists():
                _copy_beside(self._folder, self._source)
        except manifest.Damaged as damage:
            checkpoint_folder.set_aside(self._folder / str(step), str(damage))
            return False
        except OSError as error:
            raise UserError(
                f"The checkpoint of step {step} cannot be copied from {self._folder} to "
                f"{self._source}: {error.strerror or error}."
            ) from error
        return True

    def _copy_newest(self) -> None:
        step = -1
        try:
            step = max(checkpoint_folder.read_facts(self._source), default=-1)
            if step < 0 or step in checkpoint_folder.read_facts(self._folder):
                return
            copy = functools.partial(_transfer, step, self._source, self._folder)
            storage.retry(f"Copying {self._source / str(step)}", copy)
            _copy_beside(self._source, self._folder)
            for _ in checkpoint_folder.prune(self._folder, self._keep, step):
                pass
        except (OSError, manifest.Damaged) as error:
            logging.warning(
                "The checkpoint of step %d could not be copied to %s: %s. The next one will be.",
                *(step, self._folder, getattr(error, "strerror", None) or error),
            )


def _transfer(step: int, source: Path, target: Path) -> None:
    """Copies a finished checkpoint and verifies the copy.

    Raises:
      Damaged: the copy does not match its manifest.
      OSError: it cannot be read or written.
    """
    origin, saving = source / str(step), target / f"{step}.saving"
    checkpoint_folder.remove(saving)
    try:
        for name, path in [
            *manifest.files(origin).items(),
            (manifest.NAME, origin / manifest.NAME),
        ]:
            _copy(path, saving / name)
        if manifest.verify(saving).get("step") != step:
            raise manifest.Damaged(f"it is no copy of step {step}")
        for folder, _, _ in os.walk(saving):
            manifest.flush_folder(Path(folder))
        saving.rename(target / str(step))
        manifest.flush_folder(target)
    finally:
        shutil.rmtree(saving, ignore_errors=True)


def _copy_beside(source: Path, target: Path) -> None:
    """Copies the metrics, whose rows after a checkpoint a resumed run drops."""
    if (source.parent / BESIDE).exists():
        new = target.parent / f"{BESIDE}.new"
        _copy(source.parent / BESIDE, new)
        os.replace(new, target.parent / BESIDE)


def _copy(path: Path, copy: Path) -> None:
    """Copies a regular file and flushes it to disk."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    with storage.open_regular(path) as reader, copy.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 2**20)
        writer.flush()
        os.fsync(writer.fileno())
