"""Compiled programs that later processes read instead of compiling them again."""

import contextlib
import hashlib
import logging
from pathlib import Path
from typing import Any

from sparse_dataflow.hardware.processor import processor

PROGRAMS = "programs"
"""Folder of compiled programs in the cache folder."""

MOST_BYTES = 2**30
"""Bytes of the programs of one kind of processor; those read longest ago are removed."""


def keep_programs() -> None:
    """Keeps compiled programs in the cache folder, so that a later process starts sooner.

    JAX_COMPILATION_CACHE_DIR, if it is set, decides instead; JAX_ENABLE_COMPILATION_CACHE=0 keeps
    nothing. jax finds a program by its operations, the compiler's version and options, and the
    device. It warns and compiles where a program cannot be read or written, and where a lock is
    busy. A damaged program is compiled again. Without a cache folder nothing is kept.

    Nor is anything kept by several processes on GPUs, unless the variable names a folder that all
    of them share: they measure kernels together while they compile, so a process that finds its
    program leaves the others waiting.
    """
    import jax

    from sparse_dataflow.data import cache
    from sparse_dataflow.files.errors import UserError

    if jax.config.jax_compilation_cache_dir:
        return
    if jax.process_count() > 1 and jax.default_backend() == "gpu":
        return
    with contextlib.suppress(UserError):
        folder = cache.resolved(cache.FOLDER)
        with cache.exclusive(folder, PROGRAMS):  # Claims the folder.
            programs = folder / PROGRAMS / processor()
            jax.config.update("jax_compilation_cache_dir", str(programs))
            jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
            _verify(programs)


class _Verified:
    """jax's cache of programs, each with the SHA-256 of its bytes at its end.

    A program of other bytes is machine code that nobody compiled. jax itself verifies none.
    """

    def __init__(self, cache: Any):
        self._cache = cache
        self._path = cache._path

    def get(self, key: str) -> bytes | None:
        """Returns a program; None if there is none, or it is damaged, which removes it."""
        content = self._cache.get(key)
        if content is None or hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]:
            return content and content[:-_DIGEST]
        logging.getLogger(__name__).warning(
            "%s/%s is damaged, and is compiled again", self._path, key
        )
        for path in self._path.glob(f"{key}-*"):
            path.unlink(missing_ok=True)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keeps a program."""
        self._cache.put(key, value + hashlib.sha256(value).digest())

    def clear(self) -> None:
        """Forgets nothing: the files are the cache."""


_DIGEST = hashlib.sha256().digest_size
_verified_folders: set[str] = set()


def _verify(folder: Path) -> None:
    """Makes jax verify the programs that it reads from a folder."""
    from jax._src import compilation_cache

    opened = compilation_cache.get_file_cache

    def verified(path):
        found = opened(path)
        if found is None or str(path) not in _verified_folders:
            return found
        return _Verified(found[0]), found[1]

    if not _verified_folders:
        compilation_cache.get_file_cache = verified
    _verified_folders.add(str(folder))
