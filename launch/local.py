"""Starts the processes of one run on this machine and waits for all of them.

    python launch/local.py --processes=2 -m experiments.gpt13b_sparse --mesh=data:2

After the options comes the command of each process: a program, or "-m module" or a ".py" file for
this Python. Each line of output is prefixed with the number of its process. See local.md.
"""

import argparse
import contextlib
import dataclasses
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ECHO_SECONDS = 1.0
"""A signal repeated within this time counts once: some senders signal a process and its group."""

PATIENCE_SECONDS = 1.0
"""Seconds that the launcher waits for a reader of its own messages, and for the last output."""

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
    """Timeouts of the launcher in seconds.

    Attributes:
      stop: after a signal, until all processes have saved and ended.
      others: after a process failed, until the others have printed their errors and ended.
      finish: after a process succeeded, until the others have ended.
      kill: between SIGTERM and SIGKILL to remaining processes.
    """

    stop: float = 120.0
    others: float = 25.0
    finish: float = 300.0
    kill: float = 10.0


class Run:
    """The processes of one run; `close` ends those that still run after `wait`."""

    def __init__(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], limits: Limits):
        """Starts a process for each (command, environment variables), each in a new session."""
        self._limits = limits
        # A signal handler may write to a pipe whatever locks the interrupted code holds. The second
        # pipe wakes the main thread if the system delivered the signal to another thread.
        self._events, self._to_events = os.pipe()
        self._wake, to_wake = os.pipe()
        os.set_blocking(to_wake, False)
        signal.set_wakeup_fd(to_wake, warn_on_full_buffer=False)
        self._readers: list[threading.Thread] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        # The guard ends the processes if this launcher is killed.
        read_end, self._to_guard = os.pipe()
        self._guard = subprocess.Popen(
            [sys.executable, "-c", _GUARD.format(seconds=limits.kill)],
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read_end)
        try:
            for command, variables in commands:
                self._start(command, variables)
        except BaseException:
            self.close()
            raise

    def _start(self, command, variables):
        number = len(self.processes)
        process = subprocess.Popen(
            command,
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
            _write(out, prefix + line.rstrip(b"\n") + b"\n")

    def _watch(self, number):
        self.processes[number].wait()
        self._add_event(number)

    def on_signal(self, number: int, frame: object = None) -> None:
        """Signal handler that passes a signal to `wait`."""
        self._add_event(-number)

    def _add_event(self, event):
        os.write(self._to_events, struct.pack("i", event))

    def _next_event(self, seconds):
        """Returns the number of a process that ended, or -signal; None after a timeout."""
        while True:
            ready, _, _ = select.select([self._events, self._wake], [], [], seconds)
            if not ready:
                return None
            if self._events in ready:
                break
            os.read(self._wake, 64)
        return struct.unpack("i", os.read(self._events, struct.calcsize("i")))[0]

    def wait(self) -> int:
        """Waits until all processes have ended.

        The first signal is forwarded to each process; a second one kills them.

        Returns:
          0, or the status of the first process that failed; 128 + signal if a signal ended it.
        """
        status, deadline, signal_time = 0, None, 0.0
        running = set(range(len(self.processes)))
        while running:
            seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
            event = self._next_event(seconds)
            if event is None:
                say(f"timeout: terminating process {', '.join(map(str, sorted(running)))}")
                return status or 1
            if event < 0:
                if signal_time and time.monotonic() - signal_time < ECHO_SECONDS:
                    continue
                if signal_time:
                    say("second signal: killing all processes")
                    self._signal_groups(signal.SIGKILL)
                    return status or 128 - event
                signal_time = time.monotonic()
                deadline = signal_time + self._limits.stop
                say(f"forwarding {signal.Signals(-event).name}; a second signal kills")
                self._send(-event, running)
                continue
            running.discard(event)
            code = self.processes[event].returncode
            if code and not status:
                status = code if code > 0 else 128 - code
                cause = f"with {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
                say(f"process {event} ended {cause}" + ("; ending the others" if running else ""))
                deadline = _earlier(deadline, self._limits.others)
            deadline = _earlier(deadline, self._limits.finish)
        return status

    def _send(self, number, processes):
        for index in processes:
            with contextlib.suppress(ProcessLookupError):
                self.processes[index].send_signal(number)

    def close(self) -> None:
        """Ends all processes and their children that still run: SIGTERM, then SIGKILL."""
        end = time.monotonic() + self._limits.kill
        self._signal_groups(signal.SIGTERM)
        while time.monotonic() < end and self._signal_groups(0):
            time.sleep(0.1)
        self._signal_groups(signal.SIGKILL)
        end = time.monotonic() + PATIENCE_SECONDS
        for reader in self._readers:
            reader.join(max(0.0, end - time.monotonic()))
        with contextlib.suppress(OSError):
            os.write(self._to_guard, b"done\n")
        os.close(self._to_guard)
        try:
            self._guard.wait(self._limits.kill)
        except subprocess.TimeoutExpired:
            self._guard.kill()

    def _signal_groups(self, number):
        """Signals each process group; returns whether any still exists."""
        exists = False
        for process in self.processes:
            process.poll()  # Reaps a zombie, which would still receive the signal.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, number)
                exists = True
        return exists


_LOCKS = {sys.stdout: threading.Lock(), sys.stderr: threading.Lock()}


def _write(out, line):
    """Writes a whole line."""
    with _LOCKS[out], contextlib.suppress(AttributeError, OSError, ValueError):
        out.buffer.write(line)
        out.buffer.flush()


def say(text: str) -> None:
    """Prints a message of the launcher to standard error; a reader that stopped delays nothing."""
    line = f"[launcher] {text}\n".encode(errors="backslashreplace")
    thread = threading.Thread(target=_write, args=(sys.stderr, line), daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)


def _earlier(deadline, seconds):
    """Returns the earlier of a deadline, if there is one, and `seconds` from now."""
    new = time.monotonic() + seconds
    return new if deadline is None else min(deadline, new)


def commands(
    command: Sequence[str], processes: int, gpus: int, environment: Mapping[str, str], port: int
) -> list[tuple[list[str], dict[str, str]]]:
    """Returns (command, environment variables) of each process.

    `cluster/cluster.py` reads the variables.

    Args:
      command: command line of each process.
      processes: number of processes.
      gpus: GPUs per process; 0 does not assign GPUs.
      environment: CUDA_VISIBLE_DEVICES lists the GPUs to assign; without it they count from 0.
      port: port of the first process, the coordinator.

    Raises:
      ValueError: there are too few GPUs.
    """
    command = list(command)
    if command[0] == "-m" or command[0].endswith(".py"):
        command = [sys.executable, *command]
    available = [gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if gpus and available and len(available) < processes * gpus:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES lists {len(available)} GPUs; {processes} processes with {gpus} "
            f"each need {processes * gpus}."
        )
    available = available or [str(n) for n in range(processes * gpus)]
    token = environment.get("SPARSE_DATAFLOW_TOKEN") or secrets.token_hex(16)
    result = []
    for number in range(processes):
        variables = {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(number),
            "SPARSE_DATAFLOW_TOKEN": token,
        }
        if gpus:
            assigned = available[number * gpus : (number + 1) * gpus]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(assigned)
        result.append((command, variables))
    return result


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _parse(argv):
    limits = Limits()
    parser = argparse.ArgumentParser(
        usage="python launch/local.py [--NAME=VALUE ...] COMMAND ...",
        description=__doc__.splitlines()[0],
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--processes", type=int, default=2, help="number of processes (default 2)")
    add("--gpus", type=int, default=0, help="GPUs per process; 0 (default): each sees all GPUs")
    add("--stop", type=float, default=limits.stop, help="seconds to save after a signal")
    add("--others", type=float, default=limits.others, help="seconds for others after a failure")
    add("--finish", type=float, default=limits.finish, help="seconds for others after a success")
    add("--kill", type=float, default=limits.kill, help="seconds between SIGTERM and SIGKILL")
    split = next((i for i, word in enumerate(argv) if word[:2] != "--" and word != "-h"), len(argv))
    values = parser.parse_args(argv[:split])
    if split == len(argv) or values.processes < 1 or values.gpus < 0:
        parser.error("give a command, --processes=1 or more, and --gpus=0 or more")
    return values, argv[split:]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`; returns the exit status."""
    values, command = _parse(list(sys.argv[1:] if argv is None else argv))
    try:
        each = commands(command, values.processes, values.gpus, os.environ, _free_port())
        run = Run(each, Limits(values.stop, values.others, values.finish, values.kill))
    except (OSError, ValueError) as error:
        say(f"error: {error}")
        return 2
    try:
        for number in FORWARDED:
            signal.signal(number, run.on_signal)
        return run.wait()
    finally:
        run.close()


if __name__ == "__main__":
    # The end of Python would wait for a reader that stopped.
    os._exit(main())
