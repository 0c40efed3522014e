"""Applies a function to each group of outputs of a projection, on all cores."""

import concurrent.futures
import contextlib
import functools
from collections.abc import Callable, Iterable

import threadpoolctl

from sparse_dataflow.hardware.detect import cpu_count

LARGE = 2048
"""Inputs from which the matrices of one group occupy all cores."""
MOST_THREADS = 8
"""Most groups at once, each of which has matrices [in, in] of its own."""


@functools.cache
def _libraries():
    return threadpoolctl.ThreadpoolController()


def one_thread(inputs: int) -> contextlib.AbstractContextManager:
    """Returns a context in which a product has one thread, unless its matrices are large: threads
    of a BLAS wait for each other longer than small matrices take, above all on a busy machine."""
    return _libraries().limit(limits=1 if inputs < LARGE else None, user_api="blas")


def for_each(function: Callable[[object], None], items: Iterable[object], inputs: int) -> None:
    """Calls a function, which stores its result, with each item, in threads whose products have one
    thread each."""
    if inputs >= LARGE:
        for item in items:
            function(item)
        return
    with (
        one_thread(inputs),
        concurrent.futures.ThreadPoolExecutor(min(cpu_count(), MOST_THREADS)) as pool,
    ):
        # Consumed, so that an exception of a thread is raised here.
        for _ in pool.map(function, items):
            pass
