"""Where copies of checkpoints are: a second folder, or an address of an object store.

A copy counts once every byte of it was compared with its checksum. In a folder it is written under
another name, flushed and then renamed. A store has no rename: the manifest is written last, and
deleted first.
"""

import functools
import os
import re
import shutil
from pathlib import Path
from typing import Any, Protocol

from sparse_dataflow.core.checkpoint import checkpoint_folder
from sparse_dataflow.files import addresses, manifest, storage
from sparse_dataflow.files.addresses import Address

ASIDE = f"{manifest.NAME}.damaged"
"""Name in a store of the manifest of a copy that was found damaged."""


class Copies(Protocol):
    """Copies of checkpoints; methods raise OSError where the place cannot be reached."""

    def prepare(self) -> None:
        """Makes the place and removes unfinished copies; UserError if it cannot be written."""

    def facts(self) -> dict[int, dict[str, Any]]:
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

    def prune(self, keep: int, step: int) -> None:
        """Deletes all but the best, the `keep` newest and the one of `step`."""

    def set_aside(self, step: int, reason: str) -> None:
        """Makes a damaged copy count no more, and keeps its bytes."""


def copies_at(place: Path | Address) -> Copies:
    """Returns the copies in a folder, made absolute, or at an address."""
    if isinstance(place, Address):
        return AddressCopies(place)
    return FolderCopies(place.absolute())


class FolderCopies:
    """Copies in a second folder."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __str__(self) -> str:
        return str(self._folder)

    def prepare(self) -> None:
        """See `Copies`."""
        checkpoint_folder.prepare(self._folder)

    def facts(self) -> dict[int, dict[str, Any]]:
        """See `Copies`."""
        return checkpoint_folder.read_facts(self._folder)

    def put(self, step: int, source: Path) -> None:
        """See `Copies`."""
        _transfer(step, source, self._folder)

    def get(self, step: int, target: Path) -> None:
        """See `Copies`."""
        _transfer(step, self._folder, target)

    def put_beside(self, path: Path) -> None:
        """See `Copies`."""
        new = self._folder.parent / f"{path.name}.new"
        _copy(path, new)
        os.replace(new, self._folder.parent / path.name)

    def get_beside(self, name: str, path: Path) -> bool:
        """See `Copies`."""
        if not (self._folder.parent / name).exists():
            return False
        _copy(self._folder.parent / name, path)
        return True

    def prune(self, keep: int, step: int) -> None:
        """See `Copies`."""
        for _ in checkpoint_folder.prune(self._folder, keep, step):
            pass

    def set_aside(self, step: int, reason: str) -> None:
        """See `Copies`."""
        checkpoint_folder.set_aside(self._folder / str(step), reason)


class AddressCopies:
    """Copies at an address: STEP/manifest.json, STEP/extra.json, STEP/state/..."""

    def __init__(self, address: Address):
        self._address = address

    def __str__(self) -> str:
        return str(self._address)

    def prepare(self) -> None:
        """See `Copies`; the lock on the address has shown that it can be written."""
        self._delete_unfinished()

    def facts(self) -> dict[int, dict[str, Any]]:
        """See `Copies`."""
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
        """See `Copies`."""
        origin, copy = source / str(step), self._address / str(step)
        content = (origin / manifest.NAME).read_bytes()
        self._delete(step)
        for name, entry in manifest.parse(content)["files"].items():
            upload = functools.partial(_upload, origin / name, copy / name, entry)
            storage.retry(f"Copying {origin / name}", upload)
        (copy / manifest.NAME).write(content)

    def get(self, step: int, target: Path) -> None:
        """See `Copies`."""
        copy, saving = self._address / str(step), target / f"{step}.saving"
        checkpoint_folder.remove(saving)
        try:
            addresses.fetch(copy, copy.entries(), saving)
            _finish(step, saving, target)
        finally:
            shutil.rmtree(saving, ignore_errors=True)

    def put_beside(self, path: Path) -> None:
        """See `Copies`."""
        (self._address.parent / path.name).upload(path)

    def get_beside(self, name: str, path: Path) -> bool:
        """See `Copies`."""
        try:
            (self._address.parent / name).download(path)
        except FileNotFoundError:
            return False
        return True

    def prune(self, keep: int, step: int) -> None:
        """See `Copies`."""
        facts = self.facts()
        best = checkpoint_folder.best_step(facts)
        for old in sorted(facts.keys() - {step, best, *sorted(facts)[-keep:]}):
            self._delete(old)
        self._delete_unfinished()

    def set_aside(self, step: int, reason: str) -> None:
        """See `Copies`."""
        place = self._address / str(step) / manifest.NAME
        (self._address / str(step) / ASIDE).write(place.read())
        place.delete()
        checkpoint_folder.say_set_aside(self._address / str(step), reason, ASIDE)

    def _steps(self) -> dict[int, set[str]]:
        """Returns {step: names below it} of all copies, finished or not."""
        steps: dict[int, set[str]] = {}
        for name in self._address.entries():
            first, _, rest = name.partition("/")
            if rest and re.fullmatch(checkpoint_folder.STEP, first):
                steps.setdefault(int(first), set()).add(rest)
        return steps

    def _delete_unfinished(self) -> None:
        for step, names in self._steps().items():
            if not names & {manifest.NAME, ASIDE}:
                self._delete(step)

    def _delete(self, step: int) -> None:
        copy = self._address / str(step)
        for name in sorted(copy.entries(), key=lambda name: name != manifest.NAME):
            (copy / name).delete()


def _upload(path: Path, address: Address, entry: dict[str, Any]) -> None:
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
    checkpoint_folder.remove(saving)
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
    for folder, _, _ in os.walk(saving):
        manifest.flush_folder(Path(folder))
    saving.rename(target / str(step))
    manifest.flush_folder(target)


def _copy(path: Path, copy: Path) -> None:
    """Copies a regular file and flushes it to disk."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    with storage.open_regular(path) as reader, copy.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 2**20)
        writer.flush()
        os.fsync(writer.fileno())
