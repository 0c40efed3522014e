"""Mapped files for masters and moments of the parameter server, safe against crashes.

    <folder>/server.json     the last two complete steps: slot and digests of each, newest first
    <folder>/slot0, slot1    all leaves, one after the other, each aligned to ALIGNMENT bytes
    <folder>/lock            locked by the training process
    <folder>/.sparse_dataflow    the mark of `folders`, without which no file is touched

An update reads one slot and writes the other. `server.json` is replaced by an atomic rename once
every byte of the new slot is on disk. An interrupted step has only written to the free slot, so the
last complete step stays valid.
"""

import contextlib
import fcntl
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np
from absl import logging

from sparse_dataflow.core.config.layer_groups import split_groups
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.stacks import (
    layouts_by_name,
    map_placed_layouts,
    split_layouts,
)
from sparse_dataflow.core.optim.optimizers import TrainState
from sparse_dataflow.files import folders, manifest, storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_files import differences
from sparse_dataflow.hardware.chips import GIB
from sparse_dataflow.relay.host_state import (
    Section,
    all_sections,
    count_of,
    depth_of,
    moment_trees,
    section_name,
    view,
    with_moments,
)

ALIGNMENT = 4096
SLOTS = (0, 1)
RECORD = "server.json"
_NAMES = {
    folders.MARK, "lock", RECORD, RECORD + storage.UNFINISHED, *(f"slot{slot}" for slot in SLOTS)
}  # fmt: skip
_OWNER, _ROOT, _FLAG = "parameter server", "parameter servers", "parallel.server_dir"
SLOW_SECONDS = 10.0
"""Seconds per flush of a step above which a run warns of a slow disk."""


class MappedFiles:
    """Two slots of mapped arrays, and a record of which one has the last complete step.

    A `storage` of `ParameterServer`.
    """

    def __init__(
        self,
        folder: Path,
        abstract: TrainState,
        identity: Mapping[str, object],
        completed: Callable[[Mapping[str, object]], Mapping[str, object]] = dict,
    ):
        """Opens or creates the folder, and reserves space for both slots.

        Args:
          abstract: result of `host_state.abstract_state`, without a base of adapters.
          identity: JSON-able settings that must equal those of the saved steps.
          completed: saved identity, which may be older than a setting -> as it is now.

        Raises:
          UserError: the folder cannot be written, has no space, is in use, has other files, or
            holds another training.
        """
        self.folder, self._abstract = Path(folder).absolute(), abstract
        # As it is read back: JSON turns tuples into lists, which would not compare equal.
        self._identity, self._completed = json.loads(json.dumps(identity)), completed
        self._shapes = abstract.params, *moment_trees(abstract.moments), _Rest.of(abstract)
        self._sections = all_sections(depth_of(abstract.params))
        self._digests: dict[Section, int] = {}
        self._lock, self._warned = threading.Lock(), False
        with _user_errors(self.folder):
            self._folder_lock = _lock(self.folder)
            self._commits = self._read_record()
            self._refuse_another_training()
            self._reserve()
            self._trees = {slot: self._map(slot) for slot in SLOTS}

    @property
    def bytes(self) -> int:
        """Bytes on disk of both slots."""
        return len(SLOTS) * self._slot_bytes()

    def new_state(self, init) -> TrainState:
        """Starts at a new state: `init(params, mu, nu)` fills the zeroed trees and returns it."""
        params, mu, nu, *_ = self._trees[0]
        for leaf in jax.tree.leaves((params, mu, nu)):
            leaf[...] = 0
        state = init(params, mu, nu)
        self._commits = []
        for section in self._sections:
            # A commit needs the digest of each section.
            self.updated(section, tuple(view(tree, section) for tree in (params, mu, nu)))
        self.commit(state)
        return state

    def restore(self, key: jax.Array, latest: int | None = None) -> TrainState | None:
        """Restores the last complete step and checks its digests; None if there is none.

        Args:
          key: PRNG key of the state, the same in every step.
          latest: latest step to restore; any if None.

        Raises:
          UserError: all complete steps are damaged.
        """
        commits = [c for c in self._commits if latest is None or c["step"] <= latest]
        if not commits:
            return None
        # The newest first; the slot of the one before may be whole where the disk lost a page.
        for number, commit in enumerate(commits):
            params, mu, nu, rest = trees = self._trees[commit["slot"]]
            content = {section_name(s): [view(t, s) for t in trees[:3]] for s in self._sections}
            content |= rest.named()
            digests = commit["digests"]
            damaged = next((n for n, tree in content.items() if _digest(tree) != digests[n]), "")
            if damaged:
                logging.warning(
                    "Step %d in %s is damaged in %s.", commit["step"], self.folder, damaged
                )
                continue
            # The restored step is the last complete one now, so the next update writes the other
            # slot.
            self._commits = commits[number:]
            return TrainState(
                np.asarray(commit["step"], np.int32),
                params,
                with_moments(self._abstract.moments, commit["count"], mu, nu),
                key,
                # A copy, as updates write over this slot.
                jax.tree.map(np.array, rest).in_place_of(self._abstract.rest),
            )
        raise UserError(
            f"All complete steps in {self.folder} are damaged; remove the folder to continue from "
            "the run's last checkpoint."
        )

    def target(self, params: dict, mu: dict, nu: dict) -> tuple[dict, dict, dict]:
        """Returns the trees of the free slot."""
        return self._trees[self._free_slot()][:3]

    def updated(self, section: Section, views: tuple) -> None:
        """Records the digest of an updated section."""
        digest = _digest(views)
        with self._lock:
            self._digests[section] = digest

    def commit(self, state: TrainState) -> None:
        """Makes the written step the last complete one.

        Raises:
          UserError: it cannot be written; the previous step stays the last complete one.
        """
        slot = self._free_slot()
        rest, new = self._trees[slot][-1], _Rest.of(state)
        if not rest.masks:
            new = new._replace(masks=())
        # A step's layouts may have their groups, which follow from the arrays.
        for to, array in zip(jax.tree.leaves(rest), jax.tree.leaves(new), strict=True):
            np.copyto(to, array, casting="no")
        digests = {section_name(s): self._digests[s] for s in self._sections}
        newest = {
            "step": int(state.step),
            "count": count_of(state.moments),
            "slot": slot,
            "digests": digests | {n: _digest(tree) for n, tree in rest.named().items()},
            "identity": self._identity,
        }
        # The step before is named too: its slot is whole until the next update writes there, and
        # digests tell whether it still is.
        commits = [newest, *self._commits[:1]]
        body = {"commits": commits, "digest": _text_digest(commits)}
        try:
            self._flush(slot)
            storage.replace(self.folder / RECORD, json.dumps(body).encode())
        except OSError as error:
            raise UserError(
                f"Step {int(state.step)} cannot be written to {self.folder} "
                f"({error.strerror or error}); step {int(state.step) - 1} is complete there. Make "
                "room, then continue with --resume."
            ) from error
        self._commits = commits

    def _flush(self, slot):
        """Flushes a slot to disk; warns once if that is slow."""
        start = time.perf_counter()
        with (self.folder / f"slot{slot}").open("r+b") as file:
            os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        if seconds > SLOW_SECONDS and not self._warned:
            self._warned = True
            logging.warning(
                "The disk of %s takes %.0f s to write a step (%.2f GiB at %.2f GiB/s); use a "
                "larger --batch or a faster disk.",
                self.folder,
                seconds,
                self._slot_bytes() / GIB,
                self._slot_bytes() / GIB / seconds,
            )

    def close(self) -> None:
        """Releases the lock on the folder."""
        self._folder_lock.close()

    def _free_slot(self) -> int:
        return 1 - self._commits[0]["slot"] if self._commits else 0

    def _slot_bytes(self):
        return sum(_aligned(_bytes(leaf)) for leaf in jax.tree.leaves(self._shapes))

    def _refuse_another_training(self):
        """Refuses another identity, before `_reserve` gives the slots another size."""
        for commit in self._commits:
            saved = json.loads(json.dumps(self._completed(commit["identity"])))
            if change := next(differences(saved, self._identity), None):
                name, was, now = change
                self.close()
                raise UserError(
                    f"{self.folder} holds another training: {name} is {was} there and {now} here. "
                    "Name another parallel.server_dir."
                )

    def _reserve(self):
        """Reserves disk space: a write to a mapped file kills the process if the disk is full."""
        size, paths = self._slot_bytes(), _slots(self.folder)
        _refuse_small_disk(self.folder, self.bytes, paths)
        for path in paths:
            with path.open("ab") as file:
                if not self._commits or os.fstat(file.fileno()).st_size != size:
                    _allocate(file, size)

    def _map(self, slot):
        """Maps the trees of one slot."""
        mapped = np.memmap(self.folder / f"slot{slot}", np.uint8, "r+")
        start = 0

        def take(leaf):
            nonlocal start
            flat = mapped[start : start + _bytes(leaf)]
            start += _aligned(flat.size)
            return np.asarray(flat.view(leaf.dtype).reshape(leaf.shape))

        return jax.tree.map(take, self._shapes)

    def _read_record(self):
        """Returns the commits, newest first."""
        path = self.folder / RECORD
        if not path.exists():
            return []
        try:
            body = manifest.load_json(path)
            if body["digest"] == _text_digest(body["commits"]):
                return body["commits"]
        except (manifest.Damaged, KeyError, TypeError):
            pass
        raise UserError(
            f"{path} is damaged; remove the folder to continue from the last checkpoint."
        )


def _allocate(file, size):
    """Gives a file, open to append, this size and disk space for all of it."""
    if hasattr(os, "posix_fallocate"):
        os.truncate(file.fileno(), size)
        os.posix_fallocate(file.fileno(), 0, size)
        return
    # macOS has no such call, and a truncated file has no space: only what is written has.
    file.truncate(0)
    zeros = bytes(2**20)
    for start in range(0, size, len(zeros)):
        file.write(zeros[: size - start])


def refuse_unusable(root: Path, needs: Mapping[Path, int]) -> None:
    """Refuses folders that `MappedFiles` could not use.

    Creates missing folders; reserves no space.

    Args:
      root: parent of all folders, on one disk.
      needs: folder of each training -> bytes of its files.

    Raises:
      UserError: a folder cannot be written, is in use or has other files, or the disk has no space
        for all.
    """
    folders.claim(root, _ROOT, _FLAG)
    for folder in needs:
        with _user_errors(folder):
            _lock(folder).close()
    with _user_errors(root):
        paths = [path for folder in needs for path in _slots(folder)]
        _refuse_small_disk(root, sum(needs.values()), paths)


@contextlib.contextmanager
def _user_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except BlockingIOError:
        raise UserError(
            f"{folder} is in use by another run; name another parallel.server_dir."
        ) from None
    except OSError as error:
        raise UserError(
            f"The server's files cannot be written to {folder}: "
            f"{error.strerror or error}; name another parallel.server_dir."
        ) from error


def _lock(folder: Path) -> IO:
    """Locks a folder, created if missing, until the returned file is closed."""
    folders.claim(folder, _OWNER, _FLAG, _NAMES)
    _refuse_links(folder)
    file = (folder / "lock").open("w")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def _slots(folder: Path) -> list[Path]:
    return [folder / f"slot{slot}" for slot in SLOTS]


def _refuse_small_disk(folder: Path, needed: int, paths: Iterable[Path]) -> None:
    """Refuses a disk without space for these files; their present size counts as free."""
    occupied = sum(path.stat().st_blocks * 512 for path in paths if path.exists())
    free = shutil.disk_usage(folder).free
    if needed - occupied > free:
        raise UserError(
            f"--set parallel.server_dir={folder} needs {needed / GIB:,.2f} GiB and its disk has "
            f"{(occupied + free) / GIB:,.2f}; name a folder on a larger disk."
        )


def _refuse_links(folder: Path) -> None:
    """Refuses a folder with links or folders, which an untrusted config.json may name.

    Raises:
      UserError: the folder has one.
    """
    others = (path for path in folder.iterdir() if path.is_symlink() or not path.is_file())
    if path := min(others, default=None):
        raise UserError(
            f"--set parallel.server_dir={folder} holds {path.name}, which is not a file of the "
            "parameter server; name a folder for its files alone."
        )


def _digest(tree) -> int:
    """Returns the CRC-32 of all leaves; it detects torn and flipped bytes, and is no signature."""
    value = 0
    for leaf in jax.tree.leaves(tree):
        value = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, value)
    return value


class _Rest(NamedTuple):
    """What is not trained, as a slot has it, by the names of its digests.

    Attributes:
      tables: `stacks.layouts_by_name`.
      masks: () for a model without.
    """

    tables: Any
    masks: Any

    @classmethod
    def of(cls, state: TrainState) -> "_Rest":
        """Returns the arrays of a state."""
        masks, layouts = split_layouts(state.rest)
        return cls(layouts_by_name(layouts), masks)

    def named(self) -> dict[str, object]:
        """Returns the trees by name; models without masks have none."""
        return {name: tree for name, tree in self._asdict().items() if name != "masks" or tree}

    def in_place_of(self, rest: object) -> Any:
        """Returns what is not trained of a state, like `rest`."""
        groups = split_groups(self.tables)
        layouts = map_placed_layouts(
            lambda place, _: groups[place.group][place.projection], split_layouts(rest)[1]
        )
        return merged(self.masks, layouts)


def _text_digest(commits) -> int:
    return zlib.crc32(json.dumps(commits, sort_keys=True).encode())


def _bytes(leaf) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
