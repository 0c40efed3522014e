"""Checkpoints of a run: asynchronous, checked by digest, the newest and the best kept.

Layout of the folder, where a step is a decimal number without leading zeros:

    <step>/state/         orbax's files: the arrays, under their names in the state's tree
    <step>/extra.json     {"extra": ..., "state": {name: {"shape", "dtype"}}}
    <step>/manifest.json  every file with its size and SHA-256, the step and its metric
    <step>.saving/        being written, or left by a kill; renamed to <step> once it is whole
    <step>.pruning/       being deleted
    <step>.damaged/       set aside by `restore`

A checkpoint appears under its step by one rename, after all its bytes are on disk; older ones are
deleted only after that. So a kill at any moment leaves every whole checkpoint whole.

Errors that pass (see `storage`) are waited for. Where arrays could not be written, what they held
is gone by the time it is known: the next save is made in their stead.
"""

import functools
import json
import math
import operator
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from absl import logging

from sparse_dataflow.checkpoint import checkpoint_folder, named_arrays
from sparse_dataflow.checkpoint.save_barrier import SaveBarrier
from sparse_dataflow.checkpoint.save_outcome import SaveOutcome
from sparse_dataflow.distributed import processes
from sparse_dataflow.files import manifest, storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_difference import refuse_difference


class Checkpoints:
    """The checkpoints in one folder, written by one run.

    Of several processes, which all see the folder, each writes the arrays that its devices hold;
    the first alone makes, names, checks and deletes, and all go by what it found.

    Leave its `with` block, or call `wait`, before the process ends: Python cannot finish a save
    while it shuts down.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 3,
        *,
        config: Mapping[str, Any],
        read_only: bool = False,
    ):
        """Makes the folder, proves that it can be written and removes what a kill left unfinished.

        Args:
          folder: one variant's `checkpoints` folder.
          keep: how many of the newest checkpoints stay, beside the best one.
          config: JSON-able; what must be the same for a checkpoint to fit, such as the resolved
            model and optimizer. It is stored in each checkpoint and compared on restore.
          read_only: for a reader beside or after the run: nothing in the folder is touched.

        Raises:
          UserError: `keep` below 1, or a folder that cannot be written.
        """
        if keep < 1:
            raise UserError(f"keep={keep} checkpoints: at least 1 must be kept.")
        self._folder = Path(folder).absolute()
        self._keep = keep
        self._config = json.loads(json.dumps(config))
        self._read_only = read_only
        self._worker: threading.Thread | None = None
        self._outcome = SaveOutcome()
        self._known_whole: set[int] = set()
        self._barrier = SaveBarrier()
        self._orbax = named_arrays.make_checkpointer(self._barrier)
        if not read_only:
            processes.on_first(functools.partial(checkpoint_folder.prepare, self._folder))

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self.wait()
        except UserError:  # Already logged; what ended the block is worth more to the reader.
            if error is None:
                raise

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, oldest first. Their bytes are checked on restore."""
        return sorted(checkpoint_folder.facts(self._folder))

    def best_step(self) -> int | None:
        """The step with the lowest metric, the newest of several; None where none has one."""
        return checkpoint_folder.best(checkpoint_folder.facts(self._folder))

    def save(
        self, step: int, state: Any, extra: Mapping[str, Any], metric: float | None = None
    ) -> bool:
        """Starts to save a checkpoint and returns as soon as `state` may be changed or donated.

        Waits for the save before it, if that is still under way; this one takes its place where it
        failed for a reason that passes.

        Args:
          step: 0 or more. A whole checkpoint of this step is kept as it is.
          state: a pytree of arrays (jax, numpy or typed random keys).
          extra: JSON-able facts, returned by `restore`; `config` is added under that name.
          metric: lower is better; the checkpoint with the lowest finite one is the best.

        Returns:
          Whether a save was started; false where a whole checkpoint of this step exists.

        Raises:
          UserError: this or the save before it could not be written, or a checkpoint of this step
            was made under another config. The partial files are gone and every whole checkpoint
            is still there.
        """
        if self._read_only:
            raise ValueError(f"{self._folder} was opened read-only")
        step = operator.index(step)
        if not 0 <= step < 10**18:
            raise ValueError(f"step {step} is not between 0 and 10**18")
        if metric is not None:
            metric = float(metric) if math.isfinite(metric) else None
        self.ended()
        arrays = named_arrays.flatten(state)
        about = {
            "extra": dict(extra) | {"config": self._config},
            "state": named_arrays.describe(arrays),
        }
        about_text = json.dumps(about).encode()
        if len(about_text) > manifest.MAX_BYTES:
            raise ValueError(f"extra holds {len(about_text)} of {manifest.MAX_BYTES} bytes")
        if not processes.on_first(lambda: self._make_way(step)):
            return False
        saving = self._folder / f"{step}.saving"
        self._barrier.begin()
        # Of several processes one alone cannot begin anew: the others are on their way.
        waits = None if jax.process_count() == 1 else ()
        try:
            storage.retry(
                f"Writing {saving}",
                lambda: named_arrays.start_writing(self._orbax, saving / "state", arrays),
                waits,
            )
        except OSError as error:
            raise self._failed(step, error) from error
        except BaseException:
            shutil.rmtree(saving, ignore_errors=True)
            raise
        self._worker = threading.Thread(
            target=self._finish, args=(step, about_text, metric), name="finish-checkpoint"
        )
        self._worker.start()
        return True

    def _make_way(self, step: int) -> bool:
        """An empty folder to write to; false where there is a whole checkpoint of that step."""
        if self._is_whole(step):
            return False
        final, saving = self._folder / str(step), self._folder / f"{step}.saving"

        def make():
            if final.exists() or final.is_symlink():
                self._set_aside(final, "it is in the way of a new checkpoint of that step")
            checkpoint_folder.remove(saving)
            saving.mkdir(parents=True)

        try:
            storage.retry(f"Making {saving}", make)
        except OSError as error:
            raise self._failed(step, error) from error
        return True

    @property
    def again(self) -> bool:
        """Whether a save ended that is worth another one now, on this process; see SaveOutcome."""
        return self._outcome.again

    def ended(self) -> UserError | None:
        """None once no save is under way, or what kept the last from being written and may pass.

        Raises:
          UserError: what will not pass.
        """
        if self._worker is not None:
            self._worker.join()
            self._worker = None
        return self._outcome.taken()

    def wait(self) -> None:
        """Returns once no save is under way.

        Raises:
          UserError: the last save could not be written; told once.
        """
        if (failure := self.ended()) is not None:
            raise failure

    def restore(
        self, abstract_state: Any, step: int | None = None
    ) -> tuple[Any, dict[str, Any]] | None:
        """The newest whole checkpoint, or the one of `step`, to the same bits as saved.

        A damaged checkpoint is named in a warning and moved to `<step>.damaged`; without `step`
        the one before it is taken. Training that goes on from an older `step` leaves the newer
        checkpoints, and they stay the newest: move them away first.

        Args:
          abstract_state: the tree to fill, or a function from step and extra to it; leaves
            have `shape` and `dtype`. A leaf whose `sharding` names devices is placed so, a numpy
            leaf stays in numpy, any other becomes an uncommitted array on the default device.
          step: which checkpoint, or None for the newest whole one.

        Returns:
          (state, extra), or None where there is no checkpoint.

        Raises:
          UserError: checkpoints exist but none is whole; `step` is missing or damaged; it was made
            under another config or holds other arrays; or the files may not be read.
        """
        self.wait()
        found = processes.on_first(lambda: self._newest(step))
        if found is None:
            return None
        candidate, extra, arrays = found
        path = self._folder / str(candidate)
        refuse_difference(path, "was made under another config", extra["config"], self._config)
        tree = abstract_state(candidate, extra) if callable(abstract_state) else abstract_state
        wanted = named_arrays.describe(named_arrays.flatten(tree))
        refuse_difference(path, "holds other arrays", arrays, wanted)
        state = path / "state"
        read = functools.partial(named_arrays.read, self._orbax, state, tree)
        try:
            return storage.retry(f"Reading {state}", read), extra
        except Exception as error:
            # The bytes are those of its manifest, so whoever wrote this wrote no such arrays.
            raise UserError(f"{state} cannot be read: {named_arrays.reason(error)}.") from error

    def _newest(self, step: int | None) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
        """(step, extra, description of the arrays) of what `restore` restores."""
        try:
            found = checkpoint_folder.named(self._folder, checkpoint_folder.STEP)
            steps = sorted((int(path.name) for path in found), reverse=True)
        except OSError as error:
            raise UserError(
                f"{self._folder} cannot be read: {named_arrays.reason(error)}."
            ) from error
        if step is not None:
            if step not in steps:
                known = ", ".join(map(str, reversed(steps))) or "none"
                raise UserError(
                    f"{self._folder} has no checkpoint of step {step}; it has: {known}."
                )
            steps = [step]
        pruned = False
        for candidate in steps:
            path = self._folder / str(candidate)
            try:
                check = functools.partial(self._checked, path)
                extra, arrays = storage.retry(f"Reading {path}", check)
            except manifest.Damaged as damage:
                if path.exists():
                    self._set_aside(path, str(damage))
                else:  # By the writer that this reader runs beside.
                    pruned = True
                continue
            except OSError as error:
                raise UserError(f"{path} cannot be read: {named_arrays.reason(error)}.") from error
            self._known_whole.add(candidate)
            return candidate, extra, arrays
        if step is not None:
            raise UserError(
                f"The checkpoint of step {step} in {self._folder} is damaged; "
                f"finished ones there: {', '.join(map(str, self.steps())) or 'none'}."
            )
        if pruned:
            return self._newest(None)
        damaged = [
            path.name
            for pattern in (checkpoint_folder.DAMAGED, checkpoint_folder.STEP)
            for path in checkpoint_folder.named(self._folder, pattern)
        ]
        if not damaged:
            return None
        raise UserError(
            f"No whole checkpoint in {self._folder}: {', '.join(damaged)} cannot be used. "
            "Start in a new run folder, or remove them to start afresh."
        )

    def _checked(self, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """(extra, description of the arrays) of a checkpoint whose every byte was verified."""
        step = manifest.verify(path).get("step")
        if str(step) != path.name:
            raise manifest.Damaged(f"it is a copy of step {step}")
        about = manifest.load_json(path / "extra.json")
        match about:
            case {"extra": {"config": dict()} as extra, "state": dict(arrays)}:
                return extra, arrays
        raise manifest.Damaged("its extra.json is not that of a checkpoint")

    def _finish(self, step: int, about: bytes, metric: float | None) -> None:
        """Ends a save in the background: files, manifest, rename, and only then pruning."""
        saving, final = self._folder / f"{step}.saving", self._folder / str(step)
        try:
            try:
                self._orbax.wait_until_finished()
            except BaseException as error:
                self._barrier.failed(error)
                raise
            if not processes.is_first():
                return

            def complete():
                if final.exists():
                    return
                (saving / "extra.json").write_bytes(about)
                manifest.write(saving, {"step": step, "metric": metric})
                saving.rename(final)

            storage.retry(f"Writing {final}", complete)
            storage.retry(f"Writing {final}", lambda: manifest.flush_folder(self._folder))
        except Exception as error:
            self._outcome.failed(error, self._failed(step, error))
            return
        self._outcome.written()
        self._known_whole.add(step)
        try:
            checkpoint_folder.prune(self._folder, self._keep, step, self._known_whole.discard)
        except OSError as error:
            logging.warning(
                "Old checkpoints in %s could not be deleted: %s.",
                self._folder,
                named_arrays.reason(error),
            )

    def _failed(self, step: int, error: Exception) -> UserError:
        saving = self._folder / f"{step}.saving"
        for _ in range(10):
            shutil.rmtree(saving, ignore_errors=True)
            if not saving.exists():
                break
            time.sleep(0.1)  # Where one array failed, orbax may still be writing another.
        steps = self.steps()
        left = f"the last whole one is step {steps[-1]}" if steps else "there is no earlier one"
        return UserError(
            f"The checkpoint of step {step} could not be written to {self._folder} "
            f"({named_arrays.reason(error)}); {left}. Make room or choose another run folder."
        )

    def _is_whole(self, step: int) -> bool:
        path = self._folder / str(step)
        if not path.is_dir() or path.is_symlink():
            return False
        if step in self._known_whole:
            return True
        try:
            extra, _ = self._checked(path)
        except manifest.Damaged as damage:
            self._set_aside(path, str(damage))
            return False
        except OSError as error:
            raise UserError(f"{path} cannot be read: {named_arrays.reason(error)}.") from error
        refuse_difference(path, "was made under another config", extra["config"], self._config)
        self._known_whole.add(step)
        return True

    def _set_aside(self, path: Path, reason: str) -> None:
        self._known_whole.discard(int(path.name))
        if self._read_only:
            logging.warning("Checkpoint %s cannot be used: %s.", path, reason)
        else:
            checkpoint_folder.set_aside(path, reason)
