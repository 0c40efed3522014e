"""The processes of a run meet before they train, and hear of it when one of them ends.

Over plain TCP, because jax's own runtime aborts the process where one is missing, and says neither
which nor why.  The first process listens at the coordinator's address; the others connect, and say
who they are and what they were told to do.  The connections stay: what ends one process is told to
all, one that is killed is noticed at once, and each tells what it is doing (see `watch`).
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from sparse_dataflow.distributed.lines import Lines, connected, listening
from sparse_dataflow.files.errors import TEMPORARY, UserError

GRACE_SECONDS = 3.0
"""That a process has to end by itself after another has: it may be about to say the same."""

LINGER_SECONDS = 15.0
"""That the first process, whose end would end the others, waits for them."""


class Group:
    """The processes that have met.

    The first is connected with all others, each of them with the first.

    Attributes:
      number: of this process.
      told: {process: (when, by time.monotonic; what it last told)} of those connected with this.
      on_news: is called, in a thread, with what the first process announces.
    """

    def __init__(self, number: int, peers: Mapping[int, Lines]):
        self.number, self._peers = number, dict(peers)
        now = time.monotonic()
        self.told: dict[int, tuple[float, dict[str, Any]]] = {peer: (now, {}) for peer in peers}
        self.on_news: Callable[[str], None] = lambda words: None
        self._leaving, self._another = threading.Event(), threading.Event()
        self._gone = {peer: threading.Event() for peer in peers}
        for peer in peers:
            threading.Thread(target=self._listen, args=(peer,), daemon=True).start()

    @property
    def leaving(self) -> bool:
        """Whether this process is about to end."""
        return self._leaving.is_set()

    def tell(self, doing: Mapping[str, Any]) -> None:
        """Tells those connected with this process, JSON-able, what it is doing."""
        self._tell({"doing": dict(doing)})

    def announce(self, words: str) -> None:
        """From the first process: has `on_news` called on all."""
        self._tell({"news": words})
        self.on_news(words)

    def fail(self, words: str, status: int = 2) -> None:
        """Tells the others why this one ends, and they with `status`; returns once they know."""
        self._leaving.set()
        self._tell({"failed": words, "process": self.number, "status": status})
        self._wait(LINGER_SECONDS if self.number == 0 else 1.0)

    def blame(self, seconds: float) -> None:
        """Returns after so long, unless another process's end ends this one, and is told, first.

        For an error of the runtime, which may speak of that end without naming whose it is.
        """
        if self._another.wait(seconds):
            threading.Event().wait()

    def leave(self) -> None:
        """Ends the group well: returns once all others are here too, or have ended."""
        self._leaving.set()
        self._tell({"done": True})
        self._wait(None)

    def _tell(self, message):
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.send(message)

    def _wait(self, seconds):
        end = None if seconds is None else time.monotonic() + seconds
        for gone in self._gone.values():
            gone.wait(None if end is None else max(0.0, end - time.monotonic()))

    def _listen(self, peer):
        message: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            while not message:
                message = self._heard(peer, self._peers[peer].receive())
        if not message.get("done"):
            self._another.set()
            origin = message.get("process", peer)
            words = message.get("failed", "it ended without a word; its own output may say why.")
            # Where a machine is lost another start is worth it; where a request is illegal, none.
            status = message.get("status", TEMPORARY)
            if self.number == 0:
                told = {"failed": words, "process": origin, "status": status}
                for other in self._peers.keys() - {peer}:
                    with contextlib.suppress(OSError):
                        self._peers[other].send(told)
            # Of one that was killed or is silent nothing else is to come, and jax's runtime, whose
            # service may be gone with it, will soon abort without a word.
            if not self._leaving.wait(0.0 if status == TEMPORARY else GRACE_SECONDS):
                print(f"error: process {origin} ended: {words}", file=sys.stderr, flush=True)
                if self.number == 0:
                    self._gone[peer].set()
                    self._wait(LINGER_SECONDS)
                os._exit(status if type(status) is int else TEMPORARY)
        self._gone[peer].set()

    def _heard(self, peer, message):
        """Takes in what a process tells while it runs; what it says at its end is given back."""
        if "doing" in message:
            self.told[peer] = time.monotonic(), dict(message["doing"])
        elif "news" in message:
            self.on_news(str(message["news"]))
        else:
            return message
        return {}


def meet(
    address: str, count: int, number: int, facts: Mapping[str, object], timeout: float
) -> Group:
    """Waits until all processes are there, and makes sure that all were told to do the same.

    Args:
      address: host:port where the first process listens; the port is free again afterwards.
      count: of processes.
      number: of this one, from 0.
      facts: JSON-able; must be equal on all.
      timeout: seconds to wait for the last one.

    Raises:
      UserError: on every process that is there: one is missing, or differs; the coordinator is not
        reached; illegal arguments.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--coordinator={address} is no address; write host:port.")
    if not 0 <= number < count:
        raise UserError(f"--process={number} of --processes={count}; legal: 0 to {count - 1}.")
    mine = {"process": number, "processes": count, "facts": json.loads(json.dumps(dict(facts)))}
    if number == 0:
        return Group(0, _gather((host, int(port)), count, mine, timeout))
    return Group(number, {0: _arrive((host, int(port)), mine, timeout)})


def _gather(address, count, mine, timeout):
    end, wrong = time.monotonic() + timeout, ""
    peers: dict[int, Lines] = {}
    try:
        listener = listening(address[1], count)
    except OSError as error:
        raise UserError(
            f"Process 0 cannot listen at port {address[1]} ({error.strerror}); name a free one "
            "with --coordinator."
        ) from error
    with listener:
        while len(peers) < count - 1 and not wrong:
            listener.settimeout(max(0.001, end - time.monotonic()))
            try:
                connection = Lines(listener.accept()[0])
            except TimeoutError:
                break
            connection.timeout(5.0)
            try:
                theirs = connection.receive()
                other = int(theirs["process"])
            except (OSError, ValueError, KeyError, TypeError):
                connection.close()  # No process of a run.
                continue
            connection.timeout(None)
            wrong = _difference(mine, theirs, peers)
            peers[other if other not in peers else -1] = connection
    missing = [str(n) for n in range(1, count) if n not in peers]
    if missing and not wrong:
        several = len(missing) > 1
        wrong = (
            f"process{'es' if several else ''} {', '.join(missing)} of {count} did not join "
            f"within {timeout:g} seconds; start {'them' if several else 'it'} with the same "
            f"flags and --process={missing[0]}, or wait longer with --join_timeout."
        )
    for connection in peers.values():
        with contextlib.suppress(OSError):
            connection.send({"refused": wrong})
    if wrong:
        for connection in peers.values():
            connection.close()
        raise UserError(wrong)
    return peers


def _difference(mine, theirs, peers):
    """Why another process does not belong here; empty where it does."""
    other = theirs["process"]
    if theirs.get("processes") != mine["processes"]:
        return (
            f"process {other} was started with --processes={theirs.get('processes')} and process "
            f"0 with --processes={mine['processes']}; all need the same."
        )
    if other in peers or not 0 < other < mine["processes"]:
        return f"two processes were started as --process={other}; each needs its own number."
    here, there = mine["facts"], theirs.get("facts", {})
    names = [n for n in sorted({*here, *there}) if here.get(n) != there.get(n)]
    if not names:
        return ""
    shown = "; ".join(f"{n} is {there.get(n)} there and {here.get(n)} here" for n in names[:4])
    return f"process {other} was told otherwise than process 0: {shown}. All need the same."


def _arrive(address, mine, timeout):
    end, reason = time.monotonic() + timeout, "no answer"
    while (left := end - time.monotonic()) > 0:
        try:
            connection = connected(address, left)
            break
        except OSError as error:
            reason = error.strerror or str(error) or reason
            time.sleep(min(0.2, max(0.0, end - time.monotonic())))
    else:
        raise UserError(
            f"the coordinator {address[0]}:{address[1]} was not reached within {timeout:g} seconds "
            f"({reason}); --coordinator is the host of process 0 and a port that is open there."
        )
    connection.timeout(max(1.0, end - time.monotonic()) + timeout)
    try:
        connection.send(mine)
        refused = connection.receive()["refused"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"the coordinator {address[0]}:{address[1]} ended before all processes had joined."
        ) from error
    if refused:
        raise UserError(refused)
    connection.timeout(None)
    return connection
