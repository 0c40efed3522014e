"""A state tree as named arrays, through orbax to files and back to the same bits."""

import errno
import logging as std_logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from sparse_dataflow.checkpoint.save_barrier import TIMEOUT_SECONDS, SaveBarrier
from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import first_line


def make_checkpointer(barrier: SaveBarrier) -> ocp.AsyncCheckpointer:
    """Orbax's asynchronous writer and reader, without its progress reports on the terminal.

    Args:
      barrier: where its processes wait for each other in the background.
    """
    _hush_orbax()
    options = ocp.options.AsyncOptions(
        timeout_secs=TIMEOUT_SECONDS,
        barrier_sync_fn=barrier.wait,
        # A folder that cannot be made is then an OSError from `save`; made in the background, it
        # leaves orbax's other threads waiting for it until the time is out.
        create_directories_asynchronously=False,
    )
    return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), async_options=options)


def flatten(state: Any) -> dict[str, Any]:
    """Leaves by their dotted names, so that a checkpoint depends on no Python class."""
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
    """JSON-able {name: {"shape": [...], "dtype": "float32"}}; two that are equal hold alike."""
    return {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for name, leaf in arrays.items()
    }


def start_writing(
    checkpointer: ocp.AsyncCheckpointer, folder: Path, arrays: Mapping[str, Any]
) -> None:
    """Writes named arrays in the background; returns once they may be changed or donated.

    `checkpointer.wait_until_finished` ends the writing and raises what went wrong.

    Raises:
      OSError: the arrays are larger than the room on the disk; nothing is written then.
    """
    raw = {name: _written(_raw(leaf)) for name, leaf in arrays.items() if leaf.size}
    if sum(leaf.nbytes for leaf in raw.values()) > shutil.disk_usage(folder.parent).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with jax.transfer_guard("allow"):  # Orbax's transfers are meant, whatever the loop forbids.
        checkpointer.save(folder, args=ocp.args.PyTreeSave(raw))


def read(checkpointer: ocp.AsyncCheckpointer, folder: Path, abstract_state: Any) -> Any:
    """Fills `abstract_state` from `folder`, whose arrays are known to fit, to the same bits.

    A leaf whose `sharding` names devices is placed so, a numpy leaf stays in numpy, any other
    becomes an uncommitted array on the default device.

    Raises:
      ValueError: the arrays there are of other shapes or dtypes, whatever is told of them
        elsewhere; none was read then.
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
            ),
        )
        leaves = [_placed(raw.get(name), leaf) for name, leaf in names.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)


def _refuse_other_shapes(checkpointer, folder, wanted):
    """Reading makes room for what an array's own metadata says, and for its chunks."""
    found = checkpointer.metadata(folder).item_metadata.tree
    for name, leaf in wanted.items():
        raw, there = jax.eval_shape(_raw, leaf) if _is_key(leaf) else leaf, found[name]
        chunk = getattr(there.storage, "chunk_shape", None) or raw.shape
        fits = all(1 <= part <= max(1, size) for part, size in zip(chunk, raw.shape))
        if (tuple(there.shape), there.dtype) != (raw.shape, raw.dtype) or not fits:
            raise ValueError(
                f"{name} is {there.dtype}{list(there.shape)} in chunks of {list(chunk)} there, "
                f"not {raw.dtype}{list(raw.shape)}"
            )


def reason(error: BaseException) -> str:
    """What the system said, found in orbax's and tensorstore's long messages too."""
    number = storage.error_number(error)
    return first_line(error) if number is None else os.strerror(number)


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _raw(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _written(raw: Any) -> Any:
    """Of several processes each has the same in an array of its own devices, which orbax refuses;
    numpy arrays are written by the first."""
    own = isinstance(raw, jax.Array) and raw.is_fully_addressable
    return np.asarray(raw) if own and jax.process_count() > 1 else raw


def _has_devices(leaf: Any) -> bool:
    """Whether `leaf` says on which devices it lives; a plain uncommitted array does not."""
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


def _placed(raw: Any, leaf: Any) -> Any:
    """`raw` as `leaf` wants it; an array without elements, which orbax refuses, is made anew."""
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


def _hush_orbax() -> None:
    logger = logging.get_absl_logger()
    if _worth_reading not in logger.filters:
        logger.addFilter(_worth_reading)
        # Where one array cannot be written the others fail too, after orbax has stopped listening.
        std_logging.getLogger("asyncio").addFilter(_is_heard)
        sys.unraisablehook = _without_late_failures(sys.unraisablehook)


def _is_heard(record: std_logging.LogRecord) -> bool:
    text = record.getMessage()
    return "never retrieved" not in text or "OCDBT" not in text


def _without_late_failures(hook):
    """`hook` for all but the replies of tensorstore's threads to an event loop that is gone."""

    def report(unraisable):
        if unraisable.object is not None or str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    return report


def _worth_reading(record: std_logging.LogRecord) -> bool:
    """Drops orbax's progress reports and errors that it raises as well, and shortens the rest."""
    path = Path(record.pathname)
    if "orbax" not in path.parts:
        return True
    raised_too = path.stem in ("async_checkpointer", "future") and record.exc_info is not None
    record.exc_info = None
    return record.levelno >= std_logging.WARNING and not raised_too
