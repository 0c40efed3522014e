"""Masters and moments of the parameter server in mapped files, safe against a crash at any moment.

    <folder>/server.json     the last two complete steps: slot and digests of each, newest first
    <folder>/slot0, slot1    all leaves, one after the other, each on a boundary of ALIGNMENT
    <folder>/lock            held by the process that trains
    <folder>/.sparse_dataflow    the mark of `folders`, without which none of these is touched

An update reads one slot and writes the other, and `server.json` is replaced, by one rename, only
once every byte of the new slot is on disk.  A step that was cut short has written to the slot that
`server.json` does not name first: it is as if it had never begun.
"""

import contextlib
import fcntl
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
from absl import logging

from sparse_dataflow.files import folders, manifest
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_difference import differences
from sparse_dataflow.hardware.detect import GIB
from sparse_dataflow.optim.optimizers import adam_state
from sparse_dataflow.optim.train_state import TrainState
from sparse_dataflow.parallel.relay.host_state import (
    Section,
    all_sections,
    depth_of,
    section_name,
    view,
    with_adam,
)

ALIGNMENT = 4096
SLOTS = (0, 1)
RECORD = "server.json"
_NAMES = {folders.MARK, "lock", RECORD, f".{RECORD}", *(f"slot{slot}" for slot in SLOTS)}
_OWNER, _ROOT, _FLAG = "parameter server", "parameter servers", "parallel.server_dir"
SLOW_SECONDS = 10.0
"""That keeping a step may take before a run says that its disk is slow."""


class MappedFiles:
    """Two slots of mapped arrays and the record of which one holds the last complete step.

    The `storage` of a `ParameterServer`.
    """

    def __init__(self, folder: Path, abstract: TrainState, identity: Mapping[str, Any]):
        """Opens the folder, or makes it, with room for both slots.

        Args:
          folder: of one training.
          abstract: of `host_state.abstract_state`.
          identity: JSON-able; what must be the same for the folder to fit.

        Raises:
          UserError: it cannot be written, has no room, is in use, or holds another training.
        """
        self.folder, self._abstract = Path(folder).absolute(), abstract
        self._identity = json.loads(json.dumps(identity))
        moments = adam_state(abstract.moments)
        self._shapes = abstract.params, moments.mu, moments.nu, abstract.tables
        self._sections = all_sections(depth_of(abstract.params))
        self._digests: dict[Section, int] = {}
        self._lock, self._told = threading.Lock(), False
        with _in_words(self.folder):
            self._held = _taken(self.folder)
            self._commits = self._read_record()
            self._reserve()
            self._trees = {slot: self._map(slot) for slot in SLOTS}

    @property
    def bytes(self) -> int:
        """What the folder needs on disk: both slots."""
        return len(SLOTS) * self._slot_bytes()

    def new_state(self, draw) -> TrainState:
        """Begins afresh: `draw(trees)` fills the zeroed (params, mu, nu) and gives the state."""
        params, mu, nu, _ = self._trees[0]
        for leaf in jax.tree.leaves((params, mu, nu)):
            leaf[...] = 0
        state = draw(params, mu, nu)
        self._commits = []
        for section in self._sections:
            self.updated(section, tuple(view(tree, section) for tree in (params, mu, nu)))
        self.commit(state)
        return state

    def restore(self, key: jax.Array, latest: int | None = None) -> TrainState | None:
        """The last complete step, checked by its digests; None where there is none.

        Args:
          key: of the state, which no step changes.
          latest: of the steps that are wanted; any where None.

        Raises:
          UserError: no complete step is whole, or the folder holds another training.
        """
        wanted = [c for c in self._commits if latest is None or c["step"] <= latest]
        if not wanted:
            return None
        for number, commit in enumerate(wanted):
            found = list(differences(commit["identity"], self._identity))
            if found:
                name, was, now = found[0]
                raise UserError(
                    f"{self.folder} holds another training: {name} is {was} there and {now} here. "
                    "Name another parallel.server_dir."
                )
            params, mu, nu, tables = self._trees[commit["slot"]]
            views = {s: tuple(view(t, s) for t in (params, mu, nu)) for s in self._sections}
            wrong = [
                section_name(s)
                for s in self._sections
                if _digest(views[s]) != commit["digests"][section_name(s)]
            ]
            if _digest(tables) != commit["digests"]["tables"]:
                wrong.append("tables")
            if wrong:
                logging.warning(
                    "Step %d in %s is damaged in %s.", commit["step"], self.folder, wrong[0]
                )
                continue
            self._commits = wanted[number:]
            return TrainState(
                np.asarray(commit["step"], np.int32),
                params,
                with_adam(self._abstract.moments, commit["count"], mu, nu),
                jax.tree.map(np.array, tables),
                key,
            )
        raise UserError(
            f"No complete step in {self.folder} is whole; remove the folder to go on from the "
            "run's last checkpoint."
        )

    def target(self, params: dict, mu: dict, nu: dict) -> tuple[dict, dict, dict]:
        """The trees of the slot that does not hold the last complete step."""
        return self._trees[self._free_slot()][:3]

    def updated(self, section: Section, views: tuple) -> None:
        """Takes the digest of a section that holds its results."""
        digest = _digest(views)
        with self._lock:
            self._digests[section] = digest

    def commit(self, state: TrainState) -> None:
        """Makes the step that was written the last complete one.

        Raises:
          UserError: the disk refuses; the step before stays the last complete one.
        """
        slot = self._free_slot()
        *_, tables = self._trees[slot]
        jax.tree.map(np.copyto, tables, state.tables)
        digests = {section_name(s): self._digests[s] for s in self._sections}
        newest = {
            "step": int(state.step),
            "count": int(adam_state(state.moments).count),
            "slot": slot,
            "digests": digests | {"tables": _digest(tables)},
            "identity": self._identity,
        }
        commits = [newest, *self._commits[:1]]
        body = {"commits": commits, "digest": _text_digest(commits)}
        unfinished = self.folder / f".{RECORD}"
        try:
            self._flush(slot)
            with unfinished.open("w") as file:
                file.write(json.dumps(body))
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, self.folder / RECORD)
            manifest.flush_folder(self.folder)
        except OSError as error:
            raise UserError(
                f"Step {int(state.step)} cannot be kept in {self.folder} "
                f"({error.strerror or error}); step {int(state.step) - 1} is whole there. Make "
                "room, then go on with --resume."
            ) from error
        self._commits = commits

    def _flush(self, slot):
        """Brings a slot to the disk, and says once where that is what a run waits for."""
        start = time.perf_counter()
        with (self.folder / f"slot{slot}").open("r+b") as file:
            os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        if seconds > SLOW_SECONDS and not self._told:
            self._told = True
            logging.warning(
                "The disk of %s takes %.0f s to keep a step (%.2f GiB at %.2f GiB/s); a larger "
                "--batch does so less often, a faster disk in less time.",
                self.folder,
                seconds,
                self._slot_bytes() / GIB,
                self._slot_bytes() / GIB / seconds,
            )

    def close(self) -> None:
        """Lets another process use the folder."""
        self._held.close()

    def _free_slot(self) -> int:
        return 1 - self._commits[0]["slot"] if self._commits else 0

    def _slot_bytes(self):
        return sum(_aligned(_bytes(leaf)) for leaf in jax.tree.leaves(self._shapes))

    def _reserve(self):
        """Makes room now: a full disk would end a process that writes to a mapped file."""
        size, paths = self._slot_bytes(), _slots(self.folder)
        _refuse_small_disk(self.folder, self.bytes, paths)
        for path in paths:
            with path.open("ab") as file:
                if not self._commits or os.fstat(file.fileno()).st_size != size:
                    os.truncate(file.fileno(), size)
                    os.posix_fallocate(file.fileno(), 0, size)

    def _map(self, slot):
        """The trees of one slot."""
        mapped = np.memmap(self.folder / f"slot{slot}", np.uint8, "r+")
        start = 0

        def take(leaf):
            nonlocal start
            flat = mapped[start : start + _bytes(leaf)]
            start += _aligned(flat.size)
            return np.asarray(flat.view(leaf.dtype).reshape(leaf.shape))

        return jax.tree.map(take, self._shapes)

    def _read_record(self):
        """The commits, newest first; none where no step was ever complete."""
        path = self.folder / RECORD
        if not path.exists():
            return []
        try:
            body = manifest.load_json(path)
            if body["digest"] == _text_digest(body["commits"]):
                return body["commits"]
        except (manifest.Damaged, KeyError, TypeError):
            pass
        raise UserError(f"{path} is damaged; remove the folder to go on from the last checkpoint.")


def refuse_unusable(root: Path, needs: Mapping[Path, int]) -> None:
    """Refuses, before anything else is done, folders that `MappedFiles` could not use.

    Makes them where they are missing; reserves nothing.

    Args:
      root: of all of them, on one disk.
      needs: folder of each training -> bytes of its files.

    Raises:
      UserError: one cannot be made or written, is in use or holds something else; or the disk has
        no room for all.
    """
    folders.claim(root, _ROOT, _FLAG)
    for folder in needs:
        with _in_words(folder):
            _taken(folder).close()
    with _in_words(root):
        paths = [path for folder in needs for path in _slots(folder)]
        _refuse_small_disk(root, sum(needs.values()), paths)


@contextlib.contextmanager
def _in_words(folder: Path) -> Iterator[None]:
    try:
        yield
    except BlockingIOError:
        raise UserError(
            f"{folder} is in use by another run; name another parallel.server_dir."
        ) from None
    except OSError as error:
        raise UserError(
            f"The server's files cannot be kept in {folder}: "
            f"{error.strerror or error}; name another parallel.server_dir."
        ) from error


def _taken(folder: Path) -> IO:
    """The lock on a folder, which is made where it is missing; held until it is closed."""
    folders.claim(folder, _OWNER, _FLAG, _NAMES)
    _refuse_another_folder(folder)
    held = (folder / "lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return held


def _slots(folder: Path) -> list[Path]:
    return [folder / f"slot{slot}" for slot in SLOTS]


def _refuse_small_disk(folder: Path, needed: int, paths: Iterable[Path]) -> None:
    """What these files occupy already is room as well."""
    have = sum(path.stat().st_blocks * 512 for path in paths if path.exists())
    free = shutil.disk_usage(folder).free
    if needed - have > free:
        raise UserError(
            f"--set parallel.server_dir={folder} needs {needed / GIB:,.2f} GiB and its disk has "
            f"{(have + free) / GIB:,.2f}; name a folder on a larger disk."
        )


def _refuse_another_folder(folder: Path) -> None:
    """Keeps a path, such as one in someone else's config.json, from naming a folder of other use.

    Raises:
      UserError: something else lies in it, or a link.
    """
    other = [p.name for p in folder.iterdir() if p.name not in _NAMES or not p.is_file()]
    links = [path.name for path in folder.iterdir() if path.is_symlink()]
    if found := sorted({*other, *links}):
        raise UserError(
            f"--set parallel.server_dir={folder} holds {found[0]}, which is none of the server's "
            "own files; "
            "name a folder for them alone."
        )


def _digest(tree) -> int:
    """CRC-32 over the bytes of all leaves: it finds torn and flipped bytes, and is no signature."""
    value = 0
    for leaf in jax.tree.leaves(tree):
        value = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, value)
    return value


def _text_digest(commits) -> int:
    return zlib.crc32(json.dumps(commits, sort_keys=True).encode())


def _bytes(leaf) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
