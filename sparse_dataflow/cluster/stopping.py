"""Signals that end a process: at once where nothing is lost, during training after saving.

SIGTERM is how a scheduler takes a machine away, and SIGHUP how a terminal does. Both end an
experiment with status 75, so that it is started again.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from sparse_dataflow.files.errors import TEMPORARY

ENDING = (signal.SIGTERM, signal.SIGHUP)
STUCK_SECONDS = 2.0
"""Python runs a signal handler between two bytecodes. A call into a compiler takes minutes, so a
thread ends a process whose main thread did not react for this long."""

_ending = threading.Event()
_cleanups: list[Callable[[], None]] = []


class Ended(SystemExit):
    """Raised in the main thread by a signal outside training; its code is `TEMPORARY`."""

    def __init__(self, number: int):
        super().__init__(TEMPORARY)
        self.number = number

    def __str__(self) -> str:
        return f"ended by {signal.Signals(self.number).name}; start it again to continue."


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise `Ended`, or end a process that is inside a long call.

    A signal that is ignored, as SIGHUP under nohup, stays ignored. Does nothing outside the main
    thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _ending.clear()
    handled = [number for number in ENDING if signal.getsignal(number) == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, _raise_ended)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=_end_if_stuck, args=(reader,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(reader)
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def cleaned_up(action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` after the block, also if a signal ends the process inside a long call."""
    _cleanups.append(action)
    try:
        yield
    finally:
        _cleanups.remove(action)
        action()


def _raise_ended(number, frame):
    _ending.set()
    for other in ENDING:
        signal.signal(other, signal.SIG_IGN)  # A second one would interrupt the clean-up.
    raise Ended(number)


def _end_if_stuck(reader):
    while numbers := os.read(reader, 1):
        number = numbers[0]
        if number not in ENDING or signal.getsignal(number) is not _raise_ended:
            continue
        if _ending.wait(STUCK_SECONDS):
            continue
        for action in reversed(_cleanups):
            with contextlib.suppress(Exception):
                action()
        with contextlib.suppress(Exception):
            print(f"stopped: {Ended(number)}", file=sys.stderr, flush=True)
        os._exit(TEMPORARY)


@contextlib.contextmanager
def stop_on_signals(say: Callable[[str], None]) -> Iterator[Callable[[], int]]:
    """Yields a function that returns the first of SIGINT, SIGTERM and SIGHUP, 0 while none came.

    A second SIGINT interrupts. A signal that is ignored stays ignored. Outside the main thread, no
    signal comes.

    Args:
      say: logs a line.
    """
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return

    def note(number, frame):
        signals.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        say("stopping: finishing this step and saving (Ctrl-C again to stop at once)")

    before = {
        number: signal.signal(number, note)
        for number in (signal.SIGINT, *ENDING)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield lambda: signals[0] if signals else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
