"""Alerts while a training stands still."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from sparse_dataflow.cluster.clock import Clock
from sparse_dataflow.cluster.watch import UNTIMED


@contextlib.contextmanager
def stall_alerts(clock: Clock, alert: Callable[[str], None], seconds: float) -> Iterator[None]:
    """Inside, calls `alert` once each time that the clock stands still for `seconds`.

    Activities without a time limit, such as compiling, are not watched.

    Args:
      clock: of the training, in this process.
      alert: takes the text; called in a thread of its own.
      seconds: 0 watches nothing.
    """
    if not seconds:
        yield
        return
    ended = threading.Event()

    def watch():
        progress, since, alerted = clock.progress, time.monotonic(), False
        while not ended.wait(min(10.0, seconds / 4)):
            if clock.progress != progress or clock.activity in UNTIMED:
                progress, since, alerted = clock.progress, time.monotonic(), False
            elif time.monotonic() - since > seconds and not alerted:
                alerted = True
                alert(f"no progress for {seconds:g} seconds in {clock.step or clock.activity}")

    thread = threading.Thread(target=watch, name="stall alerts", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
