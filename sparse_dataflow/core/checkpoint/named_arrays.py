"""Checkpoints in a folder: state trees as named arrays, written and read with orbax bit by bit.

Orbax waits until all processes have written their arrays, and again until process 0 has renamed the
checkpoint.  A process whose write failed would never reach these barriers, and the others would
wait for it until the timeout.  With `SaveBarrier` the failing process does reach the next barrier,
after it has published its error; all processes then raise.
"""

import contextlib
import dataclasses
import errno
import itertools
import json
import logging as std_logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from absl import logging

from sparse_dataflow.core import collectives
from sparse_dataflow.core.ops.dispatch import Shaped
from sparse_dataflow.files import json_files, manifest, storage
from sparse_dataflow.files.errors import UserError, first_line

if TYPE_CHECKING:  # A third of a second, which generation from other models does not need.
    import orbax.checkpoint as ocp

TIMEOUT_SECONDS = 7 * 24 * 3600
"""Timeout of a save: a slow file system may take as long as it needs."""

_numbers = itertools.count()


class PeerSaveError(OSError):
    """Another process failed to write its arrays; `errno` is that of its error, or 0."""


class SaveBarrier:
    """The barriers of one checkpointer.

    All processes create their checkpointers, and start their saves, in the same order.
    """

    def __init__(self):
        self._number = next(_numbers)
        self._saves = self._waits = 0

    def start_save(self) -> None:
        """Starts counting the barriers of a new save; called on every process."""
        self._saves, self._waits = self._saves + 1, 0

    def wait(self, *, key: str, timeout_ms: int) -> None:
        """Waits until all processes are at this barrier.

        Args:
          key: orbax's name of the barrier; unused, as the barriers of a save have a fixed order.
          timeout_ms: timeout in milliseconds.

        Raises:
          PeerSaveError: a process failed; the text names it.
        """
        place = self._arrive(timeout_ms)
        for name, failure in _client().key_value_dir_get(place):
            number, words = json_files.parse(failure)
            raise PeerSaveError(number, f"process {name.rpartition('/')[2]}: {words}")

    def report_failure(self, error: BaseException) -> None:
        """Publishes this process's failure and joins the barrier where the others wait.

        The failure is published under the next barrier.  Under the previous one, a process that
        has not yet looked would raise there and leave the others waiting at the next one.
        """
        if jax.process_count() == 1 or isinstance(error, PeerSaveError):
            return
        number = storage.error_number(error)
        words = os.strerror(number) if number else f"{type(error).__name__}: {error}"[:300]
        name = f"{self._place(self._waits + 1)}/{jax.process_index()}"
        _client().key_value_set(name, json.dumps([number or 0, words]))
        self._arrive(TIMEOUT_SECONDS * 1000)

    def _place(self, wait):
        return f"sparse_dataflow/{self._number}/save/{self._saves}/{wait}"

    def _arrive(self, timeout_ms):
        import orbax.checkpoint as ocp

        self._waits += 1
        place = self._place(self._waits)
        ocp.multihost.get_barrier_sync_fn()(key=place, timeout_ms=timeout_ms)
        return place


def _client() -> Any:
    """Returns the key-value store that jax's processes share, which has no public name."""
    from jax._src import distributed

    return distributed.global_state.client


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
        collectives.raise_on_all(permanent)
        words = collectives.first_message(transient)
        return None if words is None else UserError(words)


def make_checkpointer(barrier: SaveBarrier) -> "ocp.AsyncCheckpointer":
    """Returns orbax's asynchronous checkpointer, with its progress logs silenced.

    Args:
      barrier: joined by all processes in the background.
    """
    import orbax.checkpoint as ocp

    _silence_orbax()
    options = ocp.options.AsyncOptions(
        timeout_secs=TIMEOUT_SECONDS,
        barrier_sync_fn=barrier.wait,
        # So that a folder that cannot be created is an OSError of `save`.  Created in the
        # background, it would leave orbax's other threads waiting until the timeout.
        create_directories_asynchronously=False,
    )
    return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), async_options=options)


def flatten(state: object) -> dict[str, Any]:
    """Returns {dotted name: leaf}, so that a checkpoint depends on no Python class."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "value"
        if name in named:
            raise ValueError(f"two leaves of the state are both named {name}")
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise TypeError(f"{name} is a {type(leaf).__name__}; the state holds arrays only")
        named[name] = leaf
    return named


def describe(arrays: Mapping[str, Shaped]) -> dict[str, json_files.JsonObject]:
    """Returns {name: {"shape": [...], "dtype": "float32"}}, JSON-able."""
    return {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for name, leaf in arrays.items()
    }


def start_writing(
    checkpointer: "ocp.AsyncCheckpointer", folder: Path, arrays: Mapping[str, Shaped]
) -> None:
    """Writes named arrays in the background; returns once they may be changed or donated.

    `checkpointer.wait_until_finished` waits for the end and raises any error.

    Raises:
      OSError: the arrays are larger than the free disk space; nothing is written then.
    """
    import orbax.checkpoint as ocp

    # orbax stores neither random keys nor arrays without elements.
    raw = {name: _writable(_raw(leaf)) for name, leaf in arrays.items() if leaf.size}
    # Before anything is written: a full disk would end all other writes of the run too.
    if sum(leaf.nbytes for leaf in raw.values()) > shutil.disk_usage(folder.parent).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with jax.transfer_guard("allow"):  # The training loop may forbid transfers.
        checkpointer.save(folder, args=ocp.args.PyTreeSave(raw))


def read(checkpointer: "ocp.AsyncCheckpointer", folder: Path, abstract_state: Any) -> Any:
    """Returns `abstract_state` filled from `folder`, bit by bit.

    A leaf whose `sharding` names devices is placed there, a numpy leaf stays in numpy, any other
    leaf becomes an uncommitted array on the default device.

    Args:
      checkpointer: from `make_checkpointer`.
      folder: written by `start_writing`, with arrays of the same names.
      abstract_state: tree of leaves with `shape` and `dtype`.

    Raises:
      ValueError: the stored arrays have other shapes or dtypes; nothing is read then.
    """
    import orbax.checkpoint as ocp

    names = flatten(abstract_state)
    stored = {name: leaf for name, leaf in names.items() if leaf.size}
    _refuse_other_shapes(checkpointer, folder, stored)
    with jax.transfer_guard("allow"):
        raw = checkpointer.restore(
            folder,
            args=ocp.args.PyTreeRestore(
                # The item names what is read; dtypes and places are those of `restore_args`.
                item={name: 0 for name in stored},
                restore_args={name: _restore_args(leaf) for name, leaf in stored.items()},
                partial_restore=True,
            ),
        )
        leaves = [_place(raw.get(name), leaf) for name, leaf in names.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)


def _refuse_other_shapes(checkpointer, folder, expected):
    """Compares the arrays' own metadata, as reading allocates the shapes and chunks in it."""
    metadata = checkpointer.metadata(folder).item_metadata.tree
    for name, leaf in expected.items():
        raw, stored = jax.eval_shape(_raw, leaf) if _is_key(leaf) else leaf, metadata[name]
        chunk = getattr(stored.storage, "chunk_shape", None) or raw.shape
        fits = all(1 <= size <= max(1, limit) for size, limit in zip(chunk, raw.shape))
        if (tuple(stored.shape), stored.dtype) != (raw.shape, raw.dtype) or not fits:
            raise ValueError(
                f"{name} is {stored.dtype}{list(stored.shape)} in chunks of {list(chunk)} there, "
                f"not {raw.dtype}{list(raw.shape)}"
            )


def reason(error: BaseException) -> str:
    """Returns the system's words for an error, also for orbax's and tensorstore's long messages."""
    number = storage.error_number(error)
    return first_line(error) if number is None else os.strerror(number)


@contextlib.contextmanager
def user_errors(path: Path, kind: type[Exception] = OSError) -> Iterator[None]:
    """Turns errors of a kind, while a path is read, into a UserError."""
    try:
        yield
    except UserError:
        raise
    except kind as error:
        raise UserError(f"{path} cannot be read: {reason(error)}.") from error


def _is_key(leaf: Shaped) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _raw(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _writable(raw: object) -> Any:
    """Converts a process-local array to numpy if there are several processes.

    Each process has an equal copy; orbax refuses such jax arrays, and process 0 writes numpy ones.
    """
    local = isinstance(raw, jax.Array) and raw.is_fully_addressable
    return np.asarray(raw) if local and jax.process_count() > 1 else raw


def _has_devices(leaf: object) -> bool:
    """Whether `leaf` names its devices; an uncommitted array does not."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.Array):
        return leaf.committed
    mesh = getattr(sharding, "mesh", None)
    return sharding is not None and not isinstance(mesh, jax.sharding.AbstractMesh)


def _restore_args(leaf: Shaped) -> "ocp.RestoreArgs":
    import orbax.checkpoint as ocp

    if not _has_devices(leaf):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    raw = jax.eval_shape(_raw, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return ocp.ArrayRestoreArgs(
        sharding=leaf.sharding, global_shape=raw.shape, dtype=raw.dtype, strict=True
    )


def _place(raw: Any, leaf: Shaped) -> Any:
    """Returns `raw` with the array type, devices and key type of `leaf`.

    `raw` is None for an array without elements, which orbax cannot store.
    """
    if isinstance(leaf, np.ndarray | np.generic):
        return np.empty(leaf.shape, leaf.dtype) if raw is None else raw
    if raw is None:
        kind = jax.eval_shape(_raw, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        raw = np.empty(kind.shape, kind.dtype)
    if not isinstance(raw, jax.Array):
        raw = jax.device_put(raw, leaf.sharding if _has_devices(leaf) else None)
    return jax.random.wrap_key_data(raw, impl=_key_impl(leaf)) if _is_key(leaf) else raw


def _key_impl(leaf: Shaped) -> str:
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        if jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype == leaf.dtype:
            return impl
    raise TypeError(f"random keys of {leaf.dtype} cannot be restored")


def _silence_orbax() -> None:
    logger = logging.get_absl_logger()
    if _is_useful not in logger.filters:
        logger.addFilter(_is_useful)
        # After one array fails, the others fail too, when orbax no longer waits for them.
        std_logging.getLogger("asyncio").addFilter(_is_not_late_failure)
        sys.unraisablehook = _without_late_failures(sys.unraisablehook)


def _is_not_late_failure(record: std_logging.LogRecord) -> bool:
    text = record.getMessage()
    return "never retrieved" not in text or "ocdbt" not in text.lower()


def _without_late_failures(hook):
    """Returns `hook` without the errors of tensorstore's threads after the event loop closed."""

    def report(unraisable):
        if unraisable.object is not None or str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    return report


def _is_useful(record: std_logging.LogRecord) -> bool:
    """Drops orbax's progress logs and errors that it also raises; strips other tracebacks."""
    path = Path(record.pathname)
    if "orbax" not in path.parts:
        return True
    also_raised = path.stem in ("async_checkpointer", "future") and record.exc_info is not None
    record.exc_info = None
    return record.levelno >= std_logging.WARNING and not also_raised


STEP = re.compile(r"0|[1-9][0-9]{0,17}")
DAMAGED = re.compile(r"[0-9]+\.damaged(-[0-9]+)?")
_LEFTOVER = re.compile(r"[0-9]+\.(saving|pruning)")


def subfolders(folder: Path, pattern: re.Pattern[str]) -> Iterator[Path]:
    """Yields the subfolders whose name matches, sorted, without links; none without `folder`."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            yield path


def saved_steps(folder: Path) -> list[int]:
    """Returns the steps of all folders named by a step, oldest first, without reading them."""
    return sorted(int(path.name) for path in subfolders(folder, STEP))


def read_facts(folder: Path) -> dict[int, json_files.JsonObject]:
    """Returns {step: facts of its manifest} of the finished checkpoints, without verifying them."""
    facts = {}
    for path in subfolders(folder, STEP):
        try:
            fact = manifest.read(path)
        except (manifest.Damaged, OSError):
            continue
        # A copy under another number is no checkpoint of that step.
        if fact.get("step") == int(path.name):
            facts[int(path.name)] = fact
    return facts


def best_step(facts: dict[int, json_files.JsonObject]) -> int | None:
    """Returns the newest step with the lowest metric, or None if no step has a metric."""
    rated = [step for step, fact in facts.items() if isinstance(fact.get("metric"), float)]
    return min(rated, key=lambda step: (facts[step]["metric"], -step), default=None)


def prepare_folder(folder: Path) -> None:
    """Creates the folder, checks that it is writable and removes unfinished saves.

    Raises:
      UserError: the folder cannot be written.
    """

    def make():
        storage.make_folder(folder)
        for path in subfolders(folder, _LEFTOVER):
            remove(path)
        # A name that the next start removes, if this one is killed here.
        probe = folder / "0.saving"
        probe.mkdir()
        probe.rmdir()

    try:
        storage.retry(f"Preparing {folder}", make)
    except OSError as error:
        raise UserError(
            f"Checkpoints cannot be written to {folder}: {reason(error)}. "
            "Choose a run folder that can be written."
        ) from error


def set_aside(path: Path, cause: str) -> None:
    """Renames an unusable checkpoint to a free `<step>.damaged` name and logs the reason.

    Raises:
      UserError: it cannot be renamed.
    """
    aside, count = path.with_name(f"{path.name}.damaged"), 1
    while aside.exists() or aside.is_symlink():
        count += 1
        aside = path.with_name(f"{path.name}.damaged-{count}")
    try:
        path.rename(aside)
    except OSError as error:
        raise UserError(
            f"Checkpoint {path} cannot be used ({cause}) and could not be moved aside: "
            f"{reason(error)}."
        ) from error
    say_set_aside(path, cause, aside.name)


def say_set_aside(place: object, cause: str, name: str) -> None:
    """Says that a checkpoint is damaged, and under which name it is kept."""
    logging.warning("Checkpoint %s cannot be used: %s. It is now %s.", place, cause, name)


@dataclasses.dataclass(frozen=True)
class Keeping:
    """Which checkpoints of a folder are kept.

    Regular ones are those of a run without a stop. They are counted alone, so that a run that is
    stopped often has the same ones to roll back to.

    Attributes:
      newest: number of newest regular checkpoints to keep, in addition to the best ones.
      is_regular: step -> whether a run without a stop has a checkpoint then.
    """

    newest: int
    is_regular: Callable[[int], bool] = lambda step: True

    def regular(self, facts: dict[int, json_files.JsonObject]) -> set[int]:
        """Returns the regular steps that are kept: the newest and the best one.

        Args:
          facts: see `read_facts`.
        """
        regular = {step: fact for step, fact in facts.items() if self.is_regular(step)}
        best = best_step(regular)
        return {*sorted(regular)[-self.newest :], *([] if best is None else [best])}

    def steps(self, facts: dict[int, json_files.JsonObject]) -> set[int]:
        """Returns the steps that are kept: regular ones, the newest and the best of any kind."""
        best = best_step(facts)
        return {*self.regular(facts), *sorted(facts)[-1:], *([] if best is None else [best])}


def prune(folder: Path, keeping: Keeping, just_saved: int) -> Iterator[int]:
    """Deletes all but the checkpoint just saved and those to keep; yields each step.

    A checkpoint is renamed before it is deleted, so a reader sees all of it or nothing.
    """
    facts = read_facts(folder)
    for step in sorted(facts.keys() - {just_saved} - keeping.steps(facts)):
        pruning = folder / f"{step}.pruning"
        # What a killed process may have left of it.
        remove(pruning)
        (folder / str(step)).rename(pruning)
        yield step
        remove(pruning)


def remove(path: Path) -> None:
    """Deletes a folder with its content; a link or a missing folder is left alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)


def read_part(
    folder: Path, step: int, abstract_part: Callable[[json_files.JsonObject], Mapping[str, object]]
) -> dict[str, Any]:
    """Returns some arrays of the checkpoint of a step.

    Args:
      folder: the `checkpoints` folder of a variant.
      step: one of `saved_steps`.
      abstract_part: extra.json's values -> {name of a part of the state: tree of numpy arrays of
        the shapes and dtypes to read}.

    Raises:
      UserError: it is gone or damaged, or has no such arrays.
    """
    path = folder / str(step)
    # Damaged or vanishing files raise errors of any type in orbax.
    with user_errors(path, Exception):
        tree = abstract_part(manifest.load_json(path / "extra.json")["extra"])
        if not jax.tree.leaves(tree):
            return dict(tree)
        with contextlib.closing(make_checkpointer(SaveBarrier())) as checkpointer:
            return read(checkpointer, path / "state", dict(tree))
