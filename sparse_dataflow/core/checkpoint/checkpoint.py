"""Checkpoints of a run: written in the background, verified by checksums, newest and best kept.

Layout of the folder, where a step is a decimal number without leading zeros:

    <step>/state/         the arrays, as orbax files, named by their place in the state tree
    <step>/extra.json     {"extra": ..., "state": {name: {"shape", "dtype"}}}
    <step>/manifest.json  size and SHA-256 of every file, the step and its metric
    <step>.saving/        being written, or left by a killed process
    <step>.pruning/       being deleted
    <step>.damaged/       found damaged by `restore` and renamed

A save writes `<step>.saving`, flushes it to disk and renames it to `<step>`.  The lines of
`files.appended`, such as the metrics until that step, are flushed before.  Old checkpoints are
deleted only after the rename.  So a kill or a power cut at any time leaves every finished
checkpoint intact.

Transient storage errors (see `storage`) are retried.  If the background write of the arrays fails,
the arrays may have changed by then, so the save is retried with the next state.
"""

import errno
import functools
import json
import math
import operator
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
from absl import logging

from sparse_dataflow.core import collectives
from sparse_dataflow.core.checkpoint import named_arrays
from sparse_dataflow.core.checkpoint.named_arrays import Keeping, SaveBarrier, SaveOutcome
from sparse_dataflow.core.optim.finite import non_finite
from sparse_dataflow.files import appended, manifest, storage
from sparse_dataflow.files.errors import UserError, advice
from sparse_dataflow.files.json_files import JsonObject, refuse_difference


class Mirror(Protocol):
    """A second place of checkpoints; `runs.mirror.Mirror` is one."""

    def facts(self) -> dict[int, JsonObject]:
        """Returns {step: facts of its manifest} of the finished copies, without verifying them."""
        ...

    def set_aside(self, step: int, reason: str) -> None:
        """Makes a damaged copy count no more, and keeps its bytes."""

    def update(self) -> None:
        """Starts to copy the newest checkpoint."""

    def wait(self) -> None:
        """Waits for the copy under way."""

    def restore(self, step: int) -> bool:
        """Copies a checkpoint back; returns False if the copy is missing or damaged."""
        ...


class Checkpoints:
    """The checkpoints in one folder, written by one run.

    With several processes, all see the folder and each writes the arrays of its own devices.
    Process 0 alone creates, renames, verifies and deletes; the others follow its decisions.

    Leave the `with` block or call `wait` before the process ends: Python cannot finish a
    background save while it shuts down.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 3,
        *,
        config: Mapping[str, object],
        completed: Callable[[JsonObject], JsonObject] = lambda saved: saved,
        read_only: bool = False,
        mirror: Callable[[Path, Keeping], Mirror] | None = None,
        is_regular: Callable[[int], bool] = lambda step: True,
    ):
        """Creates the folder, checks that it is writable and removes unfinished saves.

        Args:
          folder: the `checkpoints` folder of one variant.
          keep: number of newest regular checkpoints to keep, in addition to the best ones and the
            newest of any kind.
          config: JSON-able settings that must match for a checkpoint to fit, such as the resolved
            model and optimizer.  Stored in each checkpoint and compared on restore.
          completed: a checkpoint's config -> the same with the settings that are younger than it.
          read_only: change nothing in the folder, for a reader during or after the run.
          mirror: (folder, `Keeping`) -> a second place, to which each checkpoint is copied in the
            background and from which lost and damaged ones are restored; None for none.
          is_regular: see `Keeping`.

        Raises:
          UserError: `keep` is below 1, or the folder cannot be written.
        """
        if keep < 1:
            raise UserError(f"keep={keep} checkpoints: at least 1 must be kept.")
        self._folder = Path(folder).absolute()
        self._keeping = Keeping(keep, is_regular)
        # As the file will have it: a tuple would differ from the list that is read back.
        self._config = json.loads(json.dumps(config))
        self._completed = completed
        self._read_only = read_only
        self._worker: threading.Thread | None = None
        self._outcome = SaveOutcome()
        self._verified_steps: set[int] = set()
        self._from_mirror: set[int] = set()
        self._unusable: set[int] = set()
        self._barrier = SaveBarrier()
        self._orbax = named_arrays.make_checkpointer(self._barrier)
        self._mirror: Mirror | None = None
        self._saving = 0

        def prepare():
            named_arrays.prepare_folder(self._folder)
            if mirror is not None:
                self._mirror = mirror(self._folder, self._keeping)

        if not read_only:
            # Process 0 alone writes the folder.  Its error is raised on all, as the others would
            # wait for it at the first save.
            collectives.on_first(prepare)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self.wait()
        except UserError:  # Already logged; an error of the block itself is more useful.
            if error is None:
                raise

    def steps(self) -> list[int]:
        """Returns the steps of the finished checkpoints, oldest first, without verifying them."""
        return sorted(named_arrays.read_facts(self._folder))

    def regular_steps(self) -> list[int]:
        """Returns the steps of the regular checkpoints here or in the mirror, oldest first.

        They are those that a run without a stop has, also after several stops, and where the newest
        checkpoint alone was fetched from the mirror.
        """
        mirrored = self._mirror.facts() if self._mirror else {}
        facts = mirrored | named_arrays.read_facts(self._folder)
        return sorted(self._keeping.regular(facts))

    def best_step(self) -> int | None:
        """Returns the newest step with the lowest metric, or None if no checkpoint has one."""
        return named_arrays.best_step(named_arrays.read_facts(self._folder))

    def save(
        self, step: int, state: object, extra: Mapping[str, object], metric: float | None = None
    ) -> bool:
        """Starts a background save; returns as soon as `state` may be changed or donated.

        Waits for the previous save first.  If that one failed with a transient error, this save
        replaces it.

        Args:
          step: 0 or more.  A finished, verified checkpoint of this step is not overwritten.
          state: pytree of arrays (jax, numpy or typed random keys).
          extra: JSON-able values that `restore` returns, with `config` added under that name.
          metric: lower is better; the checkpoint with the lowest finite metric is the best.

        Returns:
          Whether a save was started; False if a verified checkpoint of this step exists.

        Raises:
          UserError: this or the previous save failed, or a checkpoint of this step has another
            config.  The partial files are deleted and every finished checkpoint is intact.
        """
        if self._read_only:
            raise ValueError(f"{self._folder} was opened read-only")
        step = operator.index(step)
        if not 0 <= step < 10**18:
            raise ValueError(f"step {step} is not between 0 and 10**18")
        if metric is not None:
            metric = float(metric) if math.isfinite(metric) else None
        # A checkpointer has one save under way, whose outcome decides whether this one replaces it.
        self.finish_save()
        arrays = named_arrays.flatten(state)
        about = {
            "extra": dict(extra) | {"config": self._config},
            "state": named_arrays.describe(arrays),
        }
        about_text = json.dumps(about).encode()
        if len(about_text) > manifest.MAX_BYTES:
            raise ValueError(f"extra has {len(about_text)} bytes; limit: {manifest.MAX_BYTES}")
        if not collectives.on_first(lambda: self._make_saving_folder(step)):
            return False
        saving = self._folder / f"{step}.saving"
        # On every process, in the same order: the barriers of a save are numbered by it.
        self._barrier.start_save()
        write = functools.partial(named_arrays.start_writing, self._orbax, saving / "state", arrays)
        try:
            if jax.process_count() == 1:
                storage.retry(f"Writing {saving}", write)
            else:  # One process alone cannot retry: the others go on to the barrier.
                write()
        except OSError as error:
            raise self._clean_up_failure(step, error) from error
        except BaseException:
            shutil.rmtree(saving, ignore_errors=True)
            raise
        self._worker = threading.Thread(
            target=self._finish_in_background,
            args=(step, about_text, metric),
            name="finish-checkpoint",
        )
        self._worker.start()
        return True

    def _make_saving_folder(self, step: int) -> bool:
        """Makes an empty `<step>.saving`; False if a verified checkpoint of the step exists."""
        if self._is_verified(step):
            return False
        final, saving = self._folder / str(step), self._folder / f"{step}.saving"

        def make():
            if final.exists() or final.is_symlink():
                self._set_aside(final, "it is in the way of a new checkpoint of that step")
            named_arrays.remove(saving)
            saving.mkdir()
            # The inode tells this folder from another of the same name; see
            # `_finish_in_background`.
            self._saving = saving.stat().st_ino

        try:
            storage.retry(f"Making {saving}", make)
        except OSError as error:
            raise self._clean_up_failure(step, error) from error
        return True

    @property
    def retry_due(self) -> bool:
        """Whether this process's last save failed with a transient error and may be retried now."""
        return self._outcome.retry_due

    def finish_save(self) -> UserError | None:
        """Waits for the save under way.

        Returns:
          None if it succeeded on all processes; its error if the error is transient.

        Raises:
          UserError: its error, if that is permanent.
        """
        if self._worker is not None:
            self._worker.join()
            self._worker = None
        return self._outcome.take()

    def wait(self) -> None:
        """Waits for the save under way, and for its copy in the mirror.

        Raises:
          UserError: the last save failed; raised once.
        """
        if (failure := self.finish_save()) is not None:
            raise failure
        if self._mirror is not None:
            self._mirror.wait()

    def restore(
        self,
        abstract_state: object,
        step: int | None = None,
        *,
        without: tuple[str, ...] = (),
    ) -> tuple[Any, JsonObject] | None:
        """Restores the newest verified checkpoint, or the one of `step`, bit by bit.

        A damaged checkpoint, or one with numbers that are not finite, is logged and, unless
        `read_only`, renamed to `<step>.damaged`; its copy in the mirror is restored, else without
        `step` the next older one.  Training on from an older `step` leaves the newer checkpoints in
        place, and they stay the newest: move them, and their copies in the mirror, away first.

        Args:
          abstract_state: tree to fill, or a function (step, extra) -> tree; leaves have `shape`
            and `dtype`.  A leaf whose `sharding` names devices is placed there, a numpy leaf
            stays in numpy, any other leaf becomes an uncommitted array on the default device.
          step: the checkpoint to restore; the newest verified one if None.
          without: first parts of the names of arrays that are not read, and not compared.

        Returns:
          (state, extra), or None if the folder has no checkpoint.

        Raises:
          UserError: all checkpoints are damaged; `step` is missing or damaged; the checkpoint has
            another config or other arrays; or the files cannot be read.
        """
        self.wait()
        while True:
            newest = collectives.on_first(lambda: self._newest_verified(step))
            if newest is None:
                return None
            state = self._read(abstract_state, without, *newest)
            # Each process has read its own shards, so all agree: one that passed over a checkpoint
            # alone would wait for the others.
            broken = non_finite(state)
            if not collectives.any_process(bool(broken)):
                return state, newest[1]
            reason = f"it is not finite ({', '.join(broken) or 'on another process'})"
            collectives.on_first(functools.partial(self._pass_over, newest[0], reason))

    def _pass_over(self, step: int, reason: str) -> None:
        """Sets a checkpoint aside whose bytes are whole and whose state cannot be used."""
        self._unusable.add(step)
        if step in self._from_mirror and self._mirror is not None:
            self._mirror.set_aside(step, reason)
        self._set_aside(self._folder / str(step), reason)

    def _read(self, abstract_state, without, step, extra, arrays) -> Any:
        """Returns the state of a verified checkpoint."""
        path = self._folder / str(step)
        self._refuse_other_config(path, extra["config"])
        tree = abstract_state(step, extra) if callable(abstract_state) else abstract_state
        expected = named_arrays.describe(named_arrays.flatten(tree))
        arrays = {n: about for n, about in arrays.items() if n.partition(".")[0] not in without}
        refuse_difference(path, "holds other arrays", arrays, expected)
        state = path / "state"
        read = functools.partial(named_arrays.read, self._orbax, state, tree)
        # The checksums match: errors mean that it was written with other arrays than described.
        with named_arrays.user_errors(state, Exception):
            return storage.retry(f"Reading {state}", read)

    def _newest_verified(self, step: int | None) -> tuple[int, JsonObject, JsonObject] | None:
        """Returns (step, extra, array descriptions) of the checkpoint that `restore` reads."""
        mirrored = self._mirror.facts() if self._mirror else {}
        steps = sorted({*self._step_folders(), *mirrored}, reverse=True)
        if step is not None and step not in steps:
            available = ", ".join(map(str, reversed(steps))) or "none"
            raise UserError(
                f"{self._folder} has no checkpoint of step {step}; it has: {available}."
            )
        for candidate in steps if step is None else [step]:
            content = self._verify_or_set_aside(candidate)
            if content is None and self._mirror and self._mirror.restore(candidate):
                self._from_mirror.add(candidate)
                content = self._verify_or_set_aside(candidate)
            if content is not None:
                self._verified_steps.add(candidate)
                return candidate, *content
        if step is not None:
            raise UserError(
                f"The checkpoint of step {step} in {self._folder} is damaged; "
                f"finished ones there: {', '.join(map(str, self.steps())) or 'none'}."
            )
        if set(self._step_folders()) - set(steps):
            return self._newest_verified(None)  # A running writer saved and pruned meanwhile.
        damaged = [
            path.name
            for pattern in (named_arrays.DAMAGED, named_arrays.STEP)
            for path in named_arrays.subfolders(self._folder, pattern)
        ]
        if not damaged:
            return None
        raise UserError(
            f"All checkpoints in {self._folder} are damaged: {', '.join(damaged)}. "
            "Choose a new run folder, or delete them to restart from step 0."
        )

    def _step_folders(self) -> list[int]:
        with named_arrays.user_errors(self._folder):
            return named_arrays.saved_steps(self._folder)

    def _verify_or_set_aside(self, step: int) -> tuple[JsonObject, JsonObject] | None:
        """Verifies a checkpoint; returns (extra, array descriptions), or None if it is damaged."""
        path = self._folder / str(step)
        if self._read_only and step in self._unusable:
            return None
        try:
            with named_arrays.user_errors(path):
                return storage.retry(f"Reading {path}", functools.partial(self._verify, path))
        except manifest.Damaged as damage:
            if path.exists():  # A running writer may have pruned it.
                self._set_aside(path, str(damage))
            return None

    def _verify(self, path: Path) -> tuple[JsonObject, JsonObject]:
        """Verifies every byte of a checkpoint; returns (extra, array descriptions)."""
        step = manifest.verify(path).get("step")
        if str(step) != path.name:
            raise manifest.Damaged(f"it is a copy of step {step}")
        about = manifest.load_json(path / "extra.json")
        match about:
            case {"extra": {"config": dict()} as extra, "state": dict(arrays)}:
                return extra, arrays
        raise manifest.Damaged("its extra.json is not that of a checkpoint")

    def _finish_in_background(self, step: int, about: bytes, metric: float | None) -> None:
        """Waits for the arrays, then writes the other files, renames the folder and prunes."""
        saving, final = self._folder / f"{step}.saving", self._folder / str(step)
        try:
            try:
                self._orbax.wait_until_finished()
            except BaseException as error:
                self._barrier.report_failure(error)
                raise
            if not collectives.is_first():
                return

            def complete():
                if final.exists():
                    return
                # Where a disk was lost meanwhile, later files of the save lie in another folder.
                if saving.stat().st_ino != self._saving:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(saving))
                appended.flush()
                # The manifest comes last, with checksums of all other files, and then the rename: a
                # folder with a step as its name is whole.
                (saving / "extra.json").write_bytes(about)
                manifest.write(saving, {"step": step, "metric": metric})
                saving.rename(final)

            storage.retry(f"Writing {final}", complete)
            # Until the folder itself is on the disk, a power cut could undo the rename.
            storage.retry(f"Writing {final}", lambda: storage.flush_folder(self._folder))
        except Exception as error:
            self._outcome.record_failure(error, self._clean_up_failure(step, error))
            return
        self._outcome.record_success()
        self._verified_steps.add(step)
        if self._mirror is not None:
            self._mirror.update()
        try:
            for pruned in named_arrays.prune(self._folder, self._keeping, step):
                self._verified_steps.discard(pruned)
        except OSError as error:
            reason = named_arrays.reason(error)
            logging.warning("Old checkpoints in %s could not be deleted: %s.", self._folder, reason)

    def _clean_up_failure(self, step: int, error: Exception) -> UserError:
        """Deletes the partial files of a failed save; returns the error to raise."""
        saving = self._folder / f"{step}.saving"
        for _ in range(10):
            shutil.rmtree(saving, ignore_errors=True)
            if not saving.exists():
                break
            time.sleep(0.1)  # After one array fails, orbax may still be writing others.
        try:
            steps = self.steps()
        except OSError:
            steps = []
        last = f"the last finished one is step {steps[-1]}" if steps else "there is no earlier one"
        number = storage.error_number(error)
        todo = advice(error if number is None else OSError(number, ""))
        return UserError(
            f"The checkpoint of step {step} could not be written to {self._folder} "
            f"({named_arrays.reason(error)}); {last}. {todo.capitalize()}"
        )

    def _is_verified(self, step: int) -> bool:
        """Whether an undamaged checkpoint of the step exists; a damaged one is set aside."""
        path = self._folder / str(step)
        if not path.is_dir() or path.is_symlink():
            return False
        if step not in self._verified_steps:
            content = self._verify_or_set_aside(step)
            if content is None:
                return False
            self._refuse_other_config(path, content[0]["config"])
            self._verified_steps.add(step)
        return True

    def _refuse_other_config(self, path: Path, saved: JsonObject) -> None:
        whole = json.loads(json.dumps(self._completed(saved)))
        refuse_difference(path, "was made under another config", whole, self._config)

    def _set_aside(self, path: Path, reason: str) -> None:
        self._verified_steps.discard(int(path.name))
        if self._read_only:
            logging.warning("Checkpoint %s cannot be used: %s.", path, reason)
        else:
            named_arrays.set_aside(path, reason)
