"""Keeps freed host memory in the process, which avoids page faults in every CPU step."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # glibc's malloc.h


def keep_freed_memory() -> bool:
    """Makes glibc's malloc reuse large freed buffers instead of returning them to the kernel.

    XLA on a CPU allocates its temporaries again in every step. Above 32 MiB, glibc would map and
    unmap them each time, and the page faults cost more than a block-sparse product. The end of the
    heap is not trimmed either. Affects the whole process; call it before the first large
    allocation.

    Returns:
      Whether the C library is glibc and accepted the settings; otherwise nothing changes.
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
