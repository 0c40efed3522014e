"""Starts the processes of one run on this machine, and ends with all of them.

    python launch/local.py --processes=2 -m experiments.gpt13b_sparse --mesh=data:2

The words after the options are what each process runs: a program, or "-m module" and ".py" files
for this Python.  Every line they print comes out with the number of its process.  See local.md.
"""

import argparse
import contextlib
import dataclasses
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ECHO_SECONDS = 1.0
"""In which a signal that comes again is the same one: some send it to a process and its group."""

_GUARD = """
import os, signal, sys, time
groups = []
for line in sys.stdin:
    if line == "done\\n":
        sys.exit()
    groups.append(int(line))
for number, seconds in ((signal.SIGTERM, {seconds}), (signal.SIGKILL, 0)):
    for group in groups:
        try:
            os.killpg(group, number)
        except OSError:
            pass
    time.sleep(seconds)
"""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds that the launcher waits.

    Attributes:
      stop: after a signal, for all processes to save and end.
      others: after a process failed, for the others to say so and end.
      finish: after a process ended well, for the others to.
      kill: between SIGTERM and SIGKILL for those that ought to be gone already.
    """

    stop: float = 120.0
    others: float = 25.0
    finish: float = 300.0
    kill: float = 10.0


class Run:
    """Processes that live and die together; one that `wait` left running dies with `close`."""

    def __init__(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], limits: Limits):
        """Starts (words, variables) in order, each as a session of its own."""
        self._limits = limits
        # A pipe, as a signal's handler may write to it whatever the code that it interrupts holds,
        # and one that wakes the main thread where another thread was given the signal.
        self._events, self._to_events = os.pipe()
        self._wake, to_wake = os.pipe()
        os.set_blocking(to_wake, False)
        signal.set_wakeup_fd(to_wake, warn_on_full_buffer=False)
        self._lock = threading.Lock()
        self._readers: list[threading.Thread] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        # Should this process be killed, its guard ends what it started.
        end, self._to_guard = os.pipe()
        self._guard = subprocess.Popen(
            [sys.executable, "-c", _GUARD.format(seconds=limits.kill)],
            stdin=end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(end)
        try:
            for words, variables in commands:
                self._start(words, variables)
        except BaseException:
            self.close()
            raise

    def _start(self, words, variables):
        number = len(self.processes)
        process = subprocess.Popen(
            words,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.processes.append(process)
        os.write(self._to_guard, f"{process.pid}\n".encode())
        for pipe, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            reader = threading.Thread(target=self._copy, args=(number, pipe, out), daemon=True)
            reader.start()
            self._readers.append(reader)
        threading.Thread(target=self._watch, args=(number,), daemon=True).start()

    def _copy(self, number, pipe, out):
        prefix = f"[{number}] ".encode()
        for line in pipe:
            with self._lock, contextlib.suppress(OSError, ValueError):
                out.buffer.write(prefix + line.rstrip(b"\n") + b"\n")
                out.buffer.flush()

    def _watch(self, number):
        self.processes[number].wait()
        self._note(number)

    def note(self, number: int, frame: object = None) -> None:
        """Has `wait` hear of a signal; fit to be its handler."""
        self._note(-number)

    def _note(self, event):
        os.write(self._to_events, struct.pack("i", event))

    def _event(self, seconds):
        """The next event: the number of a process that ended, or -signal; None for none in time."""
        while True:
            ready, _, _ = select.select([self._events, self._wake], [], [], seconds)
            if not ready:
                return None
            if self._events in ready:
                break
            os.read(self._wake, 64)
        return struct.unpack("i", os.read(self._events, struct.calcsize("i")))[0]

    def wait(self, say: Callable[[str], None]) -> int:
        """Returns once all have ended: 0, or the status of the first that failed.

        The first signal is handed on to each process, a later one kills all. A process that a
        signal ended has the status 128 + its number, as in a shell.
        """
        status, deadline, asked, left = 0, None, 0.0, set(range(len(self.processes)))
        while left:
            seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
            event = self._event(seconds)
            if event is None:
                say(f"ending process {', '.join(map(str, sorted(left)))}, which did not end itself")
                return status or 1
            if event < 0:
                if asked and time.monotonic() - asked < ECHO_SECONDS:
                    continue
                if asked:
                    say("killing all")
                    self._signal_groups(signal.SIGKILL)
                    return status or 128 - event
                asked = time.monotonic()
                deadline = asked + self._limits.stop
                say(f"handing {signal.Signals(-event).name} on; a second one kills")
                self._send(-event, left)
                continue
            left.discard(event)
            code = self.processes[event].returncode
            if code and not status:
                status = code if code > 0 else 128 - code
                ended = f"with {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
                say(f"process {event} ended {ended}" + ("; ending the others" if left else ""))
                deadline = _sooner(deadline, self._limits.others)
            deadline = _sooner(deadline, self._limits.finish)
        return status

    def _send(self, number, processes):
        for each in processes:
            with contextlib.suppress(ProcessLookupError):
                self.processes[each].send_signal(number)

    def close(self) -> None:
        """Ends whatever is left of every process and of what it started: SIGTERM, then SIGKILL."""
        end = time.monotonic() + self._limits.kill
        self._signal_groups(signal.SIGTERM)
        while time.monotonic() < end and self._signal_groups(0):
            time.sleep(0.1)
        self._signal_groups(signal.SIGKILL)
        for reader in self._readers:
            reader.join(1.0)
        with contextlib.suppress(OSError):
            os.write(self._to_guard, b"done\n")
        os.close(self._to_guard)
        try:
            self._guard.wait(self._limits.kill)
        except subprocess.TimeoutExpired:
            self._guard.kill()

    def _signal_groups(self, number):
        """Whether there was anyone to hear it."""
        heard = False
        for process in self.processes:
            process.poll()  # One that has ended and was not asked for is still there to signal.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, number)
                heard = True
        return heard


def _sooner(deadline, seconds):
    then = time.monotonic() + seconds
    return then if deadline is None else min(deadline, then)


def commands(
    words: Sequence[str], processes: int, gpus: int, environment: Mapping[str, str], port: int
) -> list[tuple[list[str], dict[str, str]]]:
    """What each process runs and its variables: those by which `distributed/cluster.py` knows it.

    Args:
      words: of the command line.
      processes: how many.
      gpus: of each process; 0 leaves them as they are.
      environment: CUDA_VISIBLE_DEVICES there are the GPUs to deal out, else they count from 0.
      port: for the first process to listen at.

    Raises:
      ValueError: there are not GPUs enough.
    """
    words = list(words)
    if words[0] == "-m" or words[0].endswith(".py"):
        words = [sys.executable, *words]
    listed = [gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if gpus and listed and len(listed) < processes * gpus:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES names {len(listed)} GPUs; {processes} processes of {gpus} need "
            f"{processes * gpus}."
        )
    listed = listed or [str(n) for n in range(processes * gpus)]
    found = []
    for number in range(processes):
        variables = {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(number),
        }
        if gpus:
            mine = listed[number * gpus : (number + 1) * gpus]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        found.append((words, variables))
    return found


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _parsed(argv):
    limits = Limits()
    parser = argparse.ArgumentParser(
        usage="python launch/local.py [--NAME=VALUE ...] COMMAND ...",
        description=__doc__.splitlines()[0],
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--processes", type=int, default=2, help="how many (default 2)")
    add("--gpus", type=int, default=0, help="GPUs of each process; 0: each sees all (default)")
    add("--stop", type=float, default=limits.stop, help="seconds to save in after a signal")
    add("--others", type=float, default=limits.others, help="seconds that outlive a failure")
    add("--finish", type=float, default=limits.finish, help="seconds between first and last end")
    add("--kill", type=float, default=limits.kill, help="seconds between SIGTERM and SIGKILL")
    begin = next((i for i, word in enumerate(argv) if word[:2] != "--" and word != "-h"), len(argv))
    values = parser.parse_args(argv[:begin])
    if begin == len(argv) or values.processes < 1 or values.gpus < 0:
        parser.error("give a command, --processes=1 or more, and --gpus=0 or more")
    return values, argv[begin:]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`; returns the exit status."""
    values, words = _parsed(list(sys.argv[1:] if argv is None else argv))

    def say(text):
        with contextlib.suppress(OSError):
            print(f"[launcher] {text}", file=sys.stderr, flush=True)

    try:
        started = commands(words, values.processes, values.gpus, os.environ, _free_port())
        run = Run(started, Limits(values.stop, values.others, values.finish, values.kill))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        for number in FORWARDED:
            signal.signal(number, run.note)
        return run.wait(say)
    finally:
        run.close()


if __name__ == "__main__":
    sys.exit(main())
