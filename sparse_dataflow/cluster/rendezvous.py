"""Rendezvous: the processes of a run meet before training, and learn when one of them ends.

Uses plain TCP, because jax's runtime aborts if a process is missing without naming it. Process 0
listens at the coordinator's address; the others connect and send their index and settings (see
`handshake`). The connections stay open: every process learns the reason when one ends, a killed
one is noticed at once, and each sends its status (see `watch`).
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping

from sparse_dataflow.cluster import handshake, lines
from sparse_dataflow.cluster.lines import Lines, listen
from sparse_dataflow.files.errors import LONGEST, TEMPORARY, UserError, escaped
from sparse_dataflow.files.json_files import JsonObject

GRACE_SECONDS = 3.0
"""Seconds that a process may take to end by itself after another ended: it may report the same."""

_FORM = {
    "status": dict, "announcement": str, "failed": str, "process": int, "exit_status": int,
    "done": bool,
}  # fmt: skip

LINGER_SECONDS = 15.0
"""Seconds that process 0, whose end would end the others, waits for them."""


class ProcessSet:
    """The processes that have met.

    Process 0 is connected to all others, and each of them to process 0.

    Attributes:
      number: index of this process.
      statuses: {connected process: (`time.monotonic` of its last status, that status)}.
      interface: address that process 0 listened at; empty for every interface.
      on_announcement: called in a thread with each announcement of process 0.
    """

    def __init__(self, number: int, peers: Mapping[int, Lines], interface: str = ""):
        self.number, self._peers, self.interface = number, dict(peers), interface
        now = time.monotonic()
        self.statuses: dict[int, tuple[float, dict[str, object]]] = {
            peer: (now, {}) for peer in peers
        }
        self.on_announcement: Callable[[str], None] = lambda text: None
        self._leaving, self._peer_failed = threading.Event(), threading.Event()
        self._first_failure = threading.Lock()
        self._ended = {peer: threading.Event() for peer in peers}
        for peer in peers:
            threading.Thread(target=self._listen, args=(peer,), daemon=True).start()

    @property
    def leaving(self) -> bool:
        """Whether this process is ending."""
        return self._leaving.is_set()

    def send_status(self, status: Mapping[str, object]) -> None:
        """Sends a JSON-able status of this process to the connected ones."""
        self._send({"status": dict(status)})

    def announce(self, text: str) -> None:
        """Calls `on_announcement` on all processes; for process 0."""
        self._send({"announcement": text})
        self.on_announcement(text)

    def fail(self, reason: str, exit_status: int = 2) -> None:
        """Ends the other processes with this reason and exit status; returns once they know."""
        self._leaving.set()
        self._send({"failed": reason, "process": self.number, "exit_status": exit_status})
        self._wait(LINGER_SECONDS if self.number == 0 else 1.0)

    def wait_for_cause(self, seconds: float) -> None:
        """Waits for the failure of another process, which then ends this one with its reason.

        Returns if none fails within `seconds`. For errors of jax's runtime, which may be caused by
        the end of another process without naming it.
        """
        if self._peer_failed.wait(seconds):
            # The thread that reads the failure ends the process; this one only waits for that.
            threading.Event().wait()

    def leave(self) -> None:
        """Ends without error: returns once all others leave too, or have ended."""
        self._leaving.set()
        self._send({"done": True})
        self._wait(None)

    def _send(self, message):
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.send(message)

    def _wait(self, seconds):
        end = None if seconds is None else time.monotonic() + seconds
        for ended in self._ended.values():
            ended.wait(None if end is None else max(0.0, end - time.monotonic()))

    def _listen(self, peer):
        message: JsonObject = {}
        with contextlib.suppress(Exception):  # Whatever cannot be read is the end of its sender.
            while not message:
                message = self._receive(peer)
        with self._first_failure:
            follows = self._peer_failed.is_set()
            if not message.get("done"):
                self._peer_failed.set()
        # Whatever ends after another has failed ends for that reason.
        if not message.get("done") and not follows:
            origin = message.get("process", peer)
            reason = escaped(
                message.get("failed", "it gave no reason; its own output may say why.")[:LONGEST]
            )
            # A lost machine is worth another start; an illegal request is not.
            status = message.get("exit_status", TEMPORARY)
            # Only process 0 is connected to all, so it passes a failure on.
            if self.number == 0:
                failure = {"failed": reason, "process": origin, "exit_status": status}
                for other in self._peers.keys() - {peer}:
                    with contextlib.suppress(OSError):
                        self._peers[other].send(failure)
            # A killed or silent process sends nothing else, and jax's runtime, whose service may
            # have ended with it, would soon abort without a reason.
            if not self._leaving.wait(0.0 if status == TEMPORARY else GRACE_SECONDS):
                print(f"error: process {origin} ended: {reason}", file=sys.stderr, flush=True)
                if self.number == 0:
                    self._ended[peer].set()
                    self._wait(LINGER_SECONDS)
                os._exit(status if 0 < status < 256 else TEMPORARY)
        self._ended[peer].set()

    def _receive(self, peer):
        """Handles the next message of a running process; returns a final message, else {}."""
        message = self._peers[peer].receive()
        if any(type(value) is not _FORM.get(name) for name, value in message.items()):
            raise ValueError("a message has an unknown field or type")
        if "status" in message:
            self.statuses[peer] = time.monotonic(), message["status"]
        elif "announcement" in message:
            self.on_announcement(escaped(message["announcement"][:LONGEST]))
        else:
            return message
        return {}


def meet(
    address: str,
    count: int,
    number: int,
    facts: Mapping[str, object],
    timeout: float,
    token: str = "",
) -> ProcessSet:
    """Waits until all processes have joined, and checks that their settings are equal.

    Args:
      address: host:port where process 0 listens; the port is free again afterwards.
      number: index of this process, from 0.
      facts: JSON-able settings; must be equal on all processes.
      timeout: seconds to wait for the last process.
      token: secret that all processes share; "" for none.

    Raises:
      UserError: on every process that joined: a process is missing or differs, the coordinator
        cannot be reached, or an argument is illegal.
    """
    host, port = _legal_address(address)
    if not 0 <= number < count:
        raise UserError(
            f"--set parallel.process={number} of --set parallel.processes={count}; legal: 0 to "
            f"{count - 1}."
        )
    # Through JSON, because facts are compared with those that came over the network: a tuple would
    # differ from the list that it became there.
    mine = {"process": number, "processes": count, "facts": json.loads(json.dumps(dict(facts)))}
    if number:
        where = (host, port)
        return ProcessSet(number, {0: handshake.join(where, mine, timeout, token)})
    try:
        # The queue has room for all processes at once, and for connections of others: a full queue
        # lets a process wait for its next try.
        listener = listen(host, port, count + 128)
    except OSError as error:
        raise UserError(
            f"Process 0 cannot listen at port {port} ({error.strerror}); name a free port "
            "with parallel.coordinator."
        ) from error
    with listener:
        interface = lines.interface(listener)
        if not token:
            warn_of_open_port(host, port, interface)
        return ProcessSet(0, handshake.accept_all(listener, mine, timeout, token), interface)


def _legal_address(address):
    try:
        host, port = lines.host_and_port(address)
    except ValueError:
        port = 0
    if not port:
        raise UserError(f"--set parallel.coordinator={address} is not an address; write host:port.")
    return host, port


def warn_of_open_port(host: str, port: int, interface: str) -> None:
    """Says who can join a run without a token; raises UserError if that is the whole internet."""
    addresses = [interface] if interface else lines.addresses(host, port)
    reach = [lines.reach(address) for address in addresses]
    if reach == [lines.LOOPBACK] and interface:
        return
    if lines.PUBLIC in reach:
        raise UserError(
            f"The coordinator {host} has a public address, where anybody could join this run; set "
            "SPARSE_DATAFLOW_TOKEN to one secret for all processes, or name a private address."
        )
    where = interface or "every interface of this machine, as the name is no address of its own"
    print(
        f"warning: without SPARSE_DATAFLOW_TOKEN, whoever reaches port {port} of {host} can join "
        f"or end this run; process 0 listens at {where}.",
        file=sys.stderr,
        flush=True,
    )
