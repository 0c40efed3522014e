"""Keeps freed host memory in the process, so that a CPU step does not fault its pages in again."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # glibc's malloc.h


def keep_freed_memory() -> bool:
    """Tells glibc's malloc to reuse large freed buffers rather than give them back to the kernel.

    XLA on a CPU allocates a step's temporaries anew in every step; above 32 MiB glibc would map
    and unmap them each time, and the page faults cost more than a block-sparse product.  Nothing
    is trimmed from the end of the heap either, however much is free there.  Affects this process
    from now on; call it before the first large allocation.

    Returns:
      Whether the C library is glibc and took the settings; elsewhere nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {
        _M_MMAP_MAX: 0,
        _M_TRIM_THRESHOLD: -1,
        _M_TOP_PAD: 2**28,
        _M_ARENA_MAX: 1,
    }
    return all([mallopt(option, value) for option, value in settings.items()])
