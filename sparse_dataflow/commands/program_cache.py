"""Compiled programs that later processes read instead of compiling them again."""

import contextlib

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
    busy. Without a cache folder nothing is kept.

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
