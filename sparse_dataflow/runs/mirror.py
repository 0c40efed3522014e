"""A second place for checkpoints: each is copied there in the background, and back when it is lost.

The place is a second folder, or an address of an object store.  A copy counts once every byte of it
was compared with its checksum. In a folder it is written under another name, flushed and then
renamed. A store has no rename: the manifest is written last, and deleted first.
"""

import concurrent.futures
import functools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from absl import logging

from sparse_dataflow.core.checkpoint import named_arrays
from sparse_dataflow.core.checkpoint.named_arrays import Keeping
from sparse_dataflow.files import addresses, json_files, manifest, storage
from sparse_dataflow.files.addresses import Address
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.output import LOGGER

ASIDE = f"{manifest.NAME}.damaged"
"""Name in a store of the manifest of a copy that was found damaged."""

_TAIL = 2**20
"""Last bytes of metrics in which the newest row is."""


class Copies(Protocol):
    """Copies of checkpoints; methods raise OSError where the place cannot be reached."""

    def prepare(self) -> None:
        """Makes the place and removes unfinished copies; UserError if it cannot be written."""

    def facts(self) -> dict[int, json_files.JsonObject]:
        """Returns {step: facts of its manifest} of the finished copies, without verifying them."""
        ...

    def put(self, step: int, source: Path) -> None:
        """Copies a finished checkpoint of a folder here; `Damaged` if the copy is another."""

    def get(self, step: int, target: Path) -> None:
        """Copies a finished checkpoint into a folder; `Damaged` if it does not match."""

    def put_beside(self, path: Path) -> None:
        """Copies a file that lies next to the folder of checkpoints; it appears whole."""

    def get_beside(self, name: str, path: Path) -> bool:
        """Copies the file of that name from here to `path`; returns False if there is none."""
        ...

    def prune(self, keeping: Keeping, step: int) -> None:
        """Deletes all but those to keep and the one of `step`."""

    def set_aside(self, step: int, reason: str) -> None:
        """Makes a damaged copy count no more, and keeps its bytes."""


def copies_at(place: Path | Address) -> Copies:
    """Returns the copies in a folder, made absolute, or at an address."""
    if isinstance(place, Address):
        return AddressCopies(place)
    return FolderCopies(place.absolute())


class FolderCopies(Copies):
    """Copies in a second folder."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __str__(self) -> str:
        return str(self._folder)

    def prepare(self) -> None:
        named_arrays.prepare_folder(self._folder)

    def facts(self) -> dict[int, json_files.JsonObject]:
        return named_arrays.read_facts(self._folder)

    def put(self, step: int, source: Path) -> None:
        _transfer(step, source, self._folder)

    def get(self, step: int, target: Path) -> None:
        _transfer(step, self._folder, target)

    def put_beside(self, path: Path) -> None:
        new = self._folder.parent / f"{path.name}.new"
        _copy(path, new)
        os.replace(new, self._folder.parent / path.name)
        storage.flush_folder(self._folder.parent)

    def get_beside(self, name: str, path: Path) -> bool:
        if not (self._folder.parent / name).exists():
            return False
        _copy(self._folder.parent / name, path)
        return True

    def prune(self, keeping: Keeping, step: int) -> None:
        for _ in named_arrays.prune(self._folder, keeping, step):
            pass

    def set_aside(self, step: int, reason: str) -> None:
        named_arrays.set_aside(self._folder / str(step), reason)


class AddressCopies(Copies):
    """Copies at an address: STEP/manifest.json, STEP/extra.json, STEP/state/..."""

    def __init__(self, address: Address):
        self._address = address

    def __str__(self) -> str:
        return str(self._address)

    def prepare(self) -> None:
        """See `Copies`; the lock on the address has shown that it can be written."""
        self._delete_unfinished()

    def facts(self) -> dict[int, json_files.JsonObject]:
        facts = {}
        for step, names in self._steps().items():
            if manifest.NAME in names:
                try:
                    content = (self._address / str(step) / manifest.NAME).read()
                    fact = manifest.parse(content)["facts"]
                except (manifest.Damaged, FileNotFoundError):
                    continue
                if fact.get("step") == step:
                    facts[step] = fact
        return facts

    def put(self, step: int, source: Path) -> None:
        origin, copy = source / str(step), self._address / str(step)
        # The manifest first into memory: the source may be pruned while its files are copied.
        content = json_files.read_bytes(origin / manifest.NAME)
        # An unfinished copy of an earlier attempt may have files that this one does not replace.
        self._delete(step)
        for name, entry in manifest.parse(content)["files"].items():
            upload = functools.partial(_upload, origin / name, copy / name, entry)
            storage.retry(f"Copying {origin / name}", upload)
        (copy / manifest.NAME).write(content)

    def get(self, step: int, target: Path) -> None:
        copy, saving = self._address / str(step), target / f"{step}.saving"
        named_arrays.remove(saving)
        try:
            addresses.fetch(copy, copy.entries(), saving)
            _finish(step, saving, target)
        finally:
            shutil.rmtree(saving, ignore_errors=True)

    def put_beside(self, path: Path) -> None:
        (self._address.parent / path.name).upload(path)

    def get_beside(self, name: str, path: Path) -> bool:
        try:
            (self._address.parent / name).download(path)
        except FileNotFoundError:
            return False
        return True

    def prune(self, keeping: Keeping, step: int) -> None:
        facts = self.facts()
        for old in sorted(facts.keys() - {step} - keeping.steps(facts)):
            self._delete(old)
        self._delete_unfinished()

    def set_aside(self, step: int, reason: str) -> None:
        place = self._address / str(step) / manifest.NAME
        # First the other name: a copy with neither would be deleted as unfinished.
        (self._address / str(step) / ASIDE).write(place.read())
        place.delete()
        named_arrays.say_set_aside(self._address / str(step), reason, ASIDE)

    def _steps(self) -> dict[int, set[str]]:
        """Returns {step: names below it} of all copies, finished or not."""
        steps: dict[int, set[str]] = {}
        for name in self._address.entries():
            first, _, rest = name.partition("/")
            if rest and re.fullmatch(named_arrays.STEP, first):
                steps.setdefault(int(first), set()).add(rest)
        return steps

    def _delete_unfinished(self) -> None:
        for step, names in self._steps().items():
            if not names & {manifest.NAME, ASIDE}:
                self._delete(step)

    def _delete(self, step: int) -> None:
        copy = self._address / str(step)
        # The manifest first, without which the rest counts as unfinished.
        for name in sorted(copy.entries(), key=lambda name: name != manifest.NAME):
            (copy / name).delete()


def _upload(path: Path, address: Address, entry: json_files.JsonObject) -> None:
    """Copies a file and reads the copy back.

    Raises:
      Damaged: the copy has another checksum.
    """
    address.upload(path)
    if address.sha256(entry["size"]) != entry["sha256"]:
        raise manifest.Damaged(f"{address} is not what was written to it")


def _transfer(step: int, source: Path, target: Path) -> None:
    """Copies a finished checkpoint and verifies the copy.

    Raises:
      Damaged: the copy does not match its manifest.
      OSError: it cannot be read or written.
    """
    origin, saving = source / str(step), target / f"{step}.saving"
    # A killed copy leaves this name behind, perhaps with files of another attempt.
    named_arrays.remove(saving)
    try:
        for name, path in [
            *manifest.files(origin).items(),
            (manifest.NAME, origin / manifest.NAME),
        ]:
            _copy(path, saving / name)
        _finish(step, saving, target)
    finally:
        shutil.rmtree(saving, ignore_errors=True)


def _finish(step: int, saving: Path, target: Path) -> None:
    """Verifies a copy under its unfinished name, and gives it its own."""
    if manifest.verify(saving).get("step") != step:
        raise manifest.Damaged(f"it is no copy of step {step}")
    # Names are flushed before the rename, so that a power cut leaves no checkpoint with missing
    # files.
    for folder, _, _ in os.walk(saving):
        storage.flush_folder(Path(folder))
    saving.rename(target / str(step))
    storage.flush_folder(target)


def _copy(path: Path, copy: Path) -> None:
    """Copies a regular file and flushes it to disk."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    with storage.open_regular(path) as reader, copy.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 2**20)
        writer.flush()
        os.fsync(writer.fileno())


BESIDE = "metrics.jsonl"
"""File next to the folder of checkpoints that is copied with each one."""


def copied_to(place: Path | Address) -> Callable[[Path, Keeping], "Mirror"]:
    """Returns (folder of checkpoints, which are kept) -> its mirror, for `Checkpoints`."""
    return lambda source, keeping: Mirror(source, place, keeping)


class Mirror:
    """The copies of a folder of checkpoints; for the process that finishes saves.

    A copy that fails is logged and ends nothing: the next checkpoint is another attempt.
    """

    def __init__(self, source: Path, place: Path | Address, keeping: Keeping):
        """Makes the place of the copies and removes unfinished ones.

        Args:
          source: folder of the checkpoints.
          place: folder or address of the copies.
          keeping: which copies are kept.

        Raises:
          UserError: the place cannot be written.
        """
        self._source, self._copies, self._keeping = source, copies_at(place), keeping
        try:
            self._copies.prepare()
        except OSError as error:
            raise UserError(f"Checkpoints cannot be copied to {place}: {_words(error)}.") from error
        # One thread: copies are made one after the other, in the order of the checkpoints.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "mirror")
        # Done from the start, so that `wait` needs no case for a mirror that has copied nothing.
        self._last: concurrent.futures.Future = concurrent.futures.Future()
        self._last.set_result(None)

    def facts(self) -> dict[int, json_files.JsonObject]:
        """Returns {step: facts of its manifest} of the finished copies, without verifying them.

        Raises:
          UserError: they cannot be read, and there is no checkpoint but them to go on from.
        """
        try:
            return self._copies.facts()
        except OSError as error:
            if not named_arrays.saved_steps(self._source):
                raise UserError(
                    f"The mirror {self._copies} cannot be read: {_words(error)}; no checkpoint is "
                    f"in {self._source}."
                ) from error
            logging.warning("The mirror %s cannot be read: %s.", self._copies, _words(error))
            return {}

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
        if step not in self.facts():
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

    def set_aside(self, step: int, reason: str) -> None:
        """Makes a copy that `restore` gave count no more.

        Raises:
          UserError: it cannot be renamed.
        """
        try:
            self._copies.set_aside(step, reason)
        except OSError as error:
            raise UserError(
                f"The checkpoint of step {step} at {self._copies} cannot be used ({reason}) and "
                f"could not be moved aside: {_words(error)}."
            ) from error

    def _restore_beside(self) -> None:
        """Takes the metrics of the copy where they reach further: those here may be older."""
        beside = self._source.parent / BESIDE
        new = beside.with_name(f"{BESIDE}.new")
        try:
            if self._copies.get_beside(BESIDE, new) and _last_step(new) > _last_step(beside):
                os.replace(new, beside)
                storage.flush_folder(beside.parent)
        finally:
            new.unlink(missing_ok=True)

    def _copy_newest(self) -> None:
        step = -1
        try:
            step = max(named_arrays.read_facts(self._source), default=-1)
            # A resumed run may finish a step again that was copied before it was killed.
            if step < 0 or step in self._copies.facts():
                return
            # Before the checkpoint counts: a resumed run drops the rows after it, and needs all
            # rows before it.
            if (self._source.parent / BESIDE).exists():
                self._copies.put_beside(self._source.parent / BESIDE)
            copy = functools.partial(self._copies.put, step, self._source)
            storage.retry(f"Copying {self._source / str(step)}", copy)
            self._copies.prune(self._keeping, step)
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
        with storage.open_regular(metrics) as file:
            # The file may have hundreds of megabytes, and the newest row is in its last line.
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read(_TAIL).splitlines()
    except FileNotFoundError:
        return -2
    for line in reversed(lines):
        try:
            return int(json_files.parse(line)["step"])
        except json_files.MALFORMED:
            continue
    return -1
