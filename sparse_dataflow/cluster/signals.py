"""How a process ends by a signal.

SIGTERM is how a scheduler takes a machine away, and SIGHUP how a terminal does. Both end an
experiment with status 75, so that it is started again: at once where nothing is lost, during
training after saving. Schedulers send them more than once. SIGINT is somebody at a terminal: in
training the first one saves, and the second ends the process at once.

Python runs a signal handler between two bytecodes of the main thread. A step or a compiler may run
for minutes before that, and libraries swallow the exceptions of a handler that runs in one of
their callbacks. So a thread gets the signals too (`signal.set_wakeup_fd`), and ends the process
where the main thread does not: at the second SIGINT, or where no step ends within the seconds that
a training has after SIGTERM or SIGHUP.  Checkpoints that are whole stay.
"""

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from sparse_dataflow.files.errors import TEMPORARY

ENDING = (signal.SIGTERM, signal.SIGHUP)

STUCK_SECONDS = 2.0
"""Seconds after SIGTERM or SIGHUP in which the main thread must have run the handler."""

UNWINDING_SECONDS = 20.0
"""Seconds after them in which the process must have ended, outside of training; process 0 waits for
the others meanwhile."""

_POLL_SECONDS = 0.1

CLEANUP_SECONDS = 2.0
"""Most seconds of the actions of `cleaned_up` where the thread ends the process."""

INTERRUPTED = 130
"""Exit status after SIGINT, as of a shell."""


class Ended(SystemExit):
    """Raised in the main thread by a signal outside training; its code is `TEMPORARY`."""

    def __init__(self, number: int):
        super().__init__(TEMPORARY)
        self.number = number

    def __str__(self) -> str:
        return f"ended by {signal.Signals(self.number).name}; start it again, or --resume its run."


class _State:
    """What the signals have done so far.

    Attributes:
      raised: number of the signal for which `Ended` was raised; 0 for none.
      swallowed: whether a callback swallowed it, as Python reports.
      stopped: whether SIGTERM or SIGHUP has stopped a training, which ends the process.
      training: number of the training that signals stop after saving; 0 outside of training.
      trainings: number of trainings begun.
      handled: number of SIGINTs that the main thread has handled.
      noticed: number of the training that stops because it has seen a signal, between two steps.
      grace: seconds after SIGTERM or SIGHUP in which the training must have noticed it.
      announce: says once that a training stops.
      writer: where the signals are written that the thread reads; None where no thread reads.
    """

    writer: int | None = None

    def __init__(self):
        self.raised = self.training = self.trainings = self.handled = self.noticed = 0
        self.stopped = self.swallowed = False
        self.grace = math.inf
        self.announce: Callable[[], None] = lambda: None

    def mark(self, what: bytes) -> None:
        """Writes BEGINS or ENDS between the signals, so that the thread knows their training."""
        if self.writer is not None:
            with contextlib.suppress(BlockingIOError):
                os.write(self.writer, what)


BEGINS, ENDS = b"\x00", b"\xff"
"""What stands for the begin and the end of a training, beside the numbers of signals."""

_state = _State()
_cleanups: list[Callable[[], None]] = []


def _leave_the_pipe():
    """A child would write its own signals into the pipe of its parent's thread."""
    signal.set_wakeup_fd(-1)
    _state.writer = None


os.register_at_fork(after_in_child=_leave_the_pipe)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise `Ended`, or end a process that does not react to that.

    A signal that is ignored, as SIGHUP under nohup, stays ignored. After the end by a signal,
    further ones are ignored. Does nothing outside the main thread.
    """
    global _state
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state = _State()
    # Only signals that nobody handles: a notebook or a test has its own handlers.
    handled = [number for number in ENDING if signal.getsignal(number) == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, _raise_ended)
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, _raise_interrupt)
    # Python runs handlers between bytecodes, so a process that hangs in C never reacts.  The
    # operating system writes each signal to this pipe, and a thread that waits for it ends such a
    # process.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _state.writer = writer
    thread = threading.Thread(target=_end_if_stuck, args=(reader,), daemon=True)
    thread.start()
    hook = sys.unraisablehook

    def unraisable(ignored):
        if isinstance(ignored.exc_value, Ended):
            _state.swallowed = True
        else:
            hook(ignored)

    sys.unraisablehook = unraisable
    try:
        yield
    finally:
        if sys.unraisablehook is unraisable:
            sys.unraisablehook = hook
        signal.set_wakeup_fd(before)
        _state.writer = None
        os.close(writer)
        thread.join()
        os.close(reader)
        # A second signal while the process ends would interrupt its last writes.
        ended = _state.raised or _state.stopped
        for number in handled:
            signal.signal(number, signal.SIG_IGN if ended else signal.SIG_DFL)
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def cleaned_up(action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` after the block, also where a thread ends the process after a signal."""
    _cleanups.append(action)
    try:
        yield
    finally:
        _cleanups.remove(action)
        action()


def _raise_ended(number, frame):
    if not (_state.raised or _state.stopped):
        _state.raised = number
        raise Ended(number)


def _raise_interrupt(number, frame):
    _state.handled += 1
    raise KeyboardInterrupt


_INTERRUPTING = (_raise_interrupt, signal.default_int_handler)


def _end_if_stuck(reader):
    """Ends the process where the main thread does not, until the other end of `reader` closes."""
    first, since = 0, 0.0  # The first of ENDING that came outside training, and its time.
    # Where the last SIGINT came, and how many the main thread had handled before it.
    pressed, handled = -1, 0
    # The training that SIGTERM or SIGHUP is to stop, and the time by which it must notice.
    stopping, deadline = 0, math.inf
    # Trainings begun, and those not ended, when a signal came.  The main thread may be in the next
    # training by the time this thread reads the signal.
    begun, inside = 0, [0]
    while True:
        # Read before the wait: the main thread may handle a SIGINT before this thread wakes up.
        # Read after it, the count would include that SIGINT. Then a second one would end the
        # process, although the first was handled.
        before = _state.handled
        if not select.select([reader], [], [], _POLL_SECONDS if first or stopping else None)[0]:
            if stopping in (_state.noticed, 0) or stopping != _state.training:
                stopping = 0
            if stopping and time.monotonic() > deadline:
                words = f"stopped: no step ended within {_state.grace:g} seconds (run.grace)"
                _end(TEMPORARY, f"{words}; resume from the last checkpoint")
            if not first:
                continue
            if _state.swallowed:
                _state.swallowed, _state.raised = False, 0
                os.kill(os.getpid(), first)
            late = time.monotonic() - since
            if late > UNWINDING_SECONDS or (late > STUCK_SECONDS and not _state.raised):
                _end(TEMPORARY, f"stopped: {Ended(first)}")
            continue
        received = os.read(reader, 1)
        if not received:
            return
        if received == BEGINS:
            inside.append(begun := begun + 1)
            continue
        if received == ENDS:
            inside.pop()
            continue
        number, handler, training = received[0], signal.getsignal(received[0]), inside[-1]
        if training == _state.training != 0 and number in (signal.SIGINT, *ENDING):
            _state.announce()
        if number in ENDING and training not in (0, stopping, _state.noticed):
            stopping, deadline = training, time.monotonic() + _state.grace
        if number == signal.SIGINT and (training or handler in _INTERRUPTING):
            # Outside training, a long call of the main thread may keep it from handling the first.
            outside = pressed == training == 0 and _state.handled == handled
            if outside or 0 < pressed == begun:
                _end(INTERRUPTED, "stopped at once")
            pressed, handled = training, before
        elif number in ENDING and handler is _raise_ended and not (first or _state.stopped):
            first, since = number, time.monotonic()


def _end(status, words):
    """Ends the process from a thread, after the actions of `cleaned_up`."""

    def clean():
        for action in reversed(_cleanups):
            with contextlib.suppress(Exception):
                action()

    cleaning = threading.Thread(target=clean, daemon=True)
    with contextlib.suppress(Exception):
        cleaning.start()
        cleaning.join(CLEANUP_SECONDS)
    with contextlib.suppress(Exception):
        print(words, file=sys.stderr, flush=True)
    # In a thread sys.exit would end the thread alone.
    os._exit(status)


@contextlib.contextmanager
def stop_on_signals(
    say: Callable[[str], None], grace: float = math.inf
) -> Iterator[Callable[[], int]]:
    """Yields a function that returns the first of SIGINT, SIGTERM and SIGHUP, 0 while none came.

    It is called between two steps. A second SIGINT interrupts; inside `ended_by_signals` it ends
    the process at once. A signal that is ignored stays ignored. Outside the main thread, no signal
    comes.

    Args:
      say: logs a line.
      grace: seconds between SIGTERM or SIGHUP and the next such call, after which the process ends
        with `TEMPORARY`, inside `ended_by_signals`.

    Raises:
      Ended: a signal came before, and a library swallowed the exception.
    """
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    if _state.raised:
        raise Ended(_state.raised)

    callers: dict[str, object] = {}

    def announce():
        # Without a lock: a handler may interrupt its holder.
        if callers.setdefault("by", caller := object()) is caller:
            say("stopping: finishing this step and saving (Ctrl-C again to stop at once)")

    def note(number, frame):
        signals.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        announce()

    before = {
        number: signal.signal(number, note)
        for number in (signal.SIGINT, *ENDING)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    outer = _state.training, _state.announce, _state.grace
    _state.trainings += 1
    _state.training, _state.announce, _state.grace = _state.trainings, announce, grace
    number_of_training = _state.trainings
    _state.mark(BEGINS)

    def first():
        if signals:
            _state.noticed = number_of_training
        return signals[0] if signals else 0

    try:
        yield first
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _state.stopped |= any(number in ENDING for number in signals)
        _state.training, _state.announce, _state.grace = outer
        _state.mark(ENDS)
