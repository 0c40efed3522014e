"""A state tree as named arrays, written and read with orbax bit by bit."""

import contextlib
import errno
import logging as std_logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from sparse_dataflow.core.checkpoint.save_barrier import TIMEOUT_SECONDS, SaveBarrier
from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError, first_line


def make_checkpointer(barrier: SaveBarrier) -> ocp.AsyncCheckpointer:
    """Returns orbax's asynchronous checkpointer, with its progress logs silenced.

    Args:
      barrier: joined by all processes in the background.
    """
    _silence_orbax()
    options = ocp.options.AsyncOptions(
        timeout_secs=TIMEOUT_SECONDS,
        barrier_sync_fn=barrier.wait,
        # So that a folder that cannot be created is an OSError of `save`.  Created in the
        # background, it would leave orbax's other threads waiting until the timeout.
        create_directories_asynchronously=False,
    )
    return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), async_options=options)


def flatten(state: Any) -> dict[str, Any]:
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


def describe(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns {name: {"shape": [...], "dtype": "float32"}}, JSON-able."""
    return {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for name, leaf in arrays.items()
    }


def start_writing(
    checkpointer: ocp.AsyncCheckpointer, folder: Path, arrays: Mapping[str, Any]
) -> None:
    """Writes named arrays in the background; returns once they may be changed or donated.

    `checkpointer.wait_until_finished` waits for the end and raises any error.

    Raises:
      OSError: the arrays are larger than the free disk space; nothing is written then.
    """
    raw = {name: _writable(_raw(leaf)) for name, leaf in arrays.items() if leaf.size}
    if sum(leaf.nbytes for leaf in raw.values()) > shutil.disk_usage(folder.parent).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with jax.transfer_guard("allow"):  # The training loop may forbid transfers.
        checkpointer.save(folder, args=ocp.args.PyTreeSave(raw))


def read(checkpointer: ocp.AsyncCheckpointer, folder: Path, abstract_state: Any) -> Any:
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
    names = flatten(abstract_state)
    stored = {name: leaf for name, leaf in names.items() if leaf.size}
    _refuse_other_shapes(checkpointer, folder, stored)
    with jax.transfer_guard("allow"):
        raw = checkpointer.restore(
            folder,
            args=ocp.args.PyTreeRestore(
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


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _raw(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _writable(raw: Any) -> Any:
    """Converts a process-local array to numpy if there are several processes.

    Each process has an equal copy; orbax refuses such jax arrays, and process 0 writes numpy ones.
    """
    local = isinstance(raw, jax.Array) and raw.is_fully_addressable
    return np.asarray(raw) if local and jax.process_count() > 1 else raw


def _has_devices(leaf: Any) -> bool:
    """Whether `leaf` names its devices; an uncommitted array does not."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.Array):
        return leaf.committed
    mesh = getattr(sharding, "mesh", None)
    return sharding is not None and not isinstance(mesh, jax.sharding.AbstractMesh)


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
    if not _has_devices(leaf):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    raw = jax.eval_shape(_raw, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return ocp.ArrayRestoreArgs(
        sharding=leaf.sharding, global_shape=raw.shape, dtype=raw.dtype, strict=True
    )


def _place(raw: Any, leaf: Any) -> Any:
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


def _key_impl(leaf: Any) -> str:
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
