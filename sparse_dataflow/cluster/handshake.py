"""The handshake of a run's processes: who may join, and what any other client can do.

    process 0   {"nonce"}
    process n   {"process", "processes", "facts", "nonce", "proof"}
    process 0   {"joined", "refused", "proof"}
    process 0   {"refused"}                      once all have joined, or cannot

A proof is an HMAC of a shared secret, the token, over both nonces and the message. A message of
another form or proof comes from another program: its connection is closed, and the run waits on.
So does any exception that reading it raises: no connection ends more than itself. A right proof
with other settings ends the run if there is a token. Without one anybody can prove as much, so that
process alone is refused.

It exists because jax's service lacks three things (`tests/cluster/test_jax_service.py`): it
aborts the process, without an exception, if another one is missing; it admits whoever names a free
number, whatever job or settings that process has; and it compares no settings. Trust that a
scheduler provides, such as a network policy, does not replace the last two: most wrong processes
are mistakes of the same user.
"""

import contextlib
import errno
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Mapping

from sparse_dataflow.cluster.lines import Lines, parse
from sparse_dataflow.files.errors import UserError, escaped, first_line
from sparse_dataflow.files.json_files import JsonObject

HELLO_SECONDS = 10.0
"""Seconds that a connection has for its whole first message."""

HELLO_BYTES = 2**18
_MOST_PENDING = 64
_MOST_WARNINGS = 5
_HELLO = {"process": int, "processes": int, "facts": dict, "nonce": str, "proof": str}
_ANSWER = {"joined": bool, "refused": str, "proof": str}


def proof(token: str, role: str, nonces: tuple[str, str], content: object) -> str:
    """Returns the HMAC-SHA256 (hex) of a message.

    Args:
      token: the shared secret; "" proves nothing.
      role: "coordinator" or "process"; a proof of one is none of the other.
      nonces: of process 0 and of the other process.
      content: what is proven, JSON-able.
    """
    text = json.dumps([role, *nonces, content], sort_keys=True)
    # A variable that is not UTF-8 has surrogates.
    key = token.encode(errors="surrogatepass")
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def is_proof(right: str, received: str) -> bool:
    """Returns whether a received proof is the right one, in constant time."""
    # As text, `compare_digest` refuses what is not ASCII.
    return hmac.compare_digest(right.encode(), received.encode(errors="surrogatepass"))


def has_form(message: object, form: Mapping[str, type]) -> bool:
    """Returns whether a message has these fields, of exactly these types, and no others."""
    return (
        isinstance(message, dict)
        and message.keys() == form.keys()
        and all(type(message[name]) is kind for name, kind in form.items())
    )


class _Client:
    """A connection that has not joined."""

    def __init__(self, connection: socket.socket):
        self.end = time.monotonic() + HELLO_SECONDS
        self.nonce, self._connection = secrets.token_hex(16), connection
        self._buffer = bytearray()
        connection.setblocking(False)
        # So short that the buffer of a socket that does not block takes it at once.
        connection.sendall(json.dumps({"nonce": self.nonce}).encode() + b"\n")

    def read(self) -> dict[str, object] | None:
        """Returns the hello once it is whole, else None; raises an exception for anything else."""
        piece = self._connection.recv(65536)
        self._buffer += piece
        if piece and b"\n" not in piece and len(self._buffer) <= HELLO_BYTES:
            return None
        # A process says nothing after its hello before it is answered.
        line, newline, rest = bytes(self._buffer).partition(b"\n")
        if not newline or rest or not has_form(hello := parse(line), _HELLO):
            raise ValueError("it sent something else than a process of a run")
        return hello


class _Door:
    """Process 0 while the others join."""

    def __init__(self, listener: socket.socket, mine: JsonObject, token: str):
        self._listener, self._mine, self._token = listener, mine, token
        self._clients: dict[socket.socket, _Client] = {}
        self.peers: dict[int, socket.socket] = {}
        self.problem = self.last_refusal = ""
        self._warnings = 0
        listener.setblocking(False)
        self._ready = selectors.DefaultSelector()
        self._ready.register(listener, selectors.EVENT_READ)

    def wait(self, end: float) -> None:
        """Returns once all have joined, a problem is known, or the time is over."""
        with self._ready:
            while len(self.peers) < self._mine["processes"] - 1 and not self.problem:
                now = time.monotonic()
                if now >= end:
                    break
                # A slow client must not hold its place for longer than a hello takes.
                for connection in [c for c, s in self._clients.items() if s.end < now]:
                    self._drop(connection)
                for key, _ in self._ready.select(min(0.5, end - now)):
                    self._handle(key.fileobj)
            for connection in list(self._clients):
                self._drop(connection)

    def _handle(self, connection):
        if connection is self._listener:
            self._accept()
        elif connection in self._clients:
            try:
                hello = self._clients[connection].read()
                if hello is not None:
                    self._answer(connection, hello)
            except Exception as error:
                self._refuse(connection, first_line(error))
        elif connection in self.peers.values():
            # A process that joined says nothing before it is answered: it has ended.
            self._forget(connection)
            self.peers = {n: peer for n, peer in self.peers.items() if peer is not connection}

    def _accept(self):
        if len(self._clients) >= _MOST_PENDING + self._mine["processes"]:
            # The oldest one makes room.
            self._drop(next(iter(self._clients)))
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.05)  # The next client whose time is over frees a descriptor.
            return
        try:
            self._clients[connection] = _Client(connection)
            self._ready.register(connection, selectors.EVENT_READ)
        except Exception:
            self._clients.pop(connection, None)
            connection.close()

    def _answer(self, connection, hello):
        number, nonces = hello["process"], (self._clients[connection].nonce, hello["nonce"])
        content = {name: value for name, value in hello.items() if name != "proof"}
        right = proof(self._token, "process", nonces, content)
        if not is_proof(right, hello["proof"]):
            raise ValueError("it has another token")
        values = bool(self._token)  # Nobody else is told the values of settings.
        # After the proof, so that a stranger learns nothing of the settings.
        refused = difference(self._mine, hello, self.peers, values)
        answer = {"joined": not refused, "refused": refused}
        answer["proof"] = proof(self._token, "coordinator", nonces, refused)
        connection.sendall(json.dumps(answer).encode() + b"\n")
        if not refused:
            self.peers[number] = connection
            del self._clients[connection]
        elif self._token:
            self.problem = refused
        else:
            self._refuse(connection, difference(self._mine, hello, self.peers, True))
            self._warnings += 1
            if self._warnings <= _MOST_WARNINGS:
                print(f"refused: {self.last_refusal}", file=sys.stderr, flush=True)

    def _refuse(self, connection, reason):
        with contextlib.suppress(OSError):
            self.last_refusal = escaped(f"{connection.getpeername()[0]}: {reason}")[:600]
        self._drop(connection)

    def _drop(self, connection):
        self._forget(connection)
        self._clients.pop(connection, None)

    def _forget(self, connection):
        with contextlib.suppress(KeyError, ValueError):
            self._ready.unregister(connection)
        connection.close()


def accept_all(
    listener: socket.socket, mine: JsonObject, timeout: float, token: str
) -> dict[int, Lines]:
    """Waits on process 0 until all others have joined; returns {process: connection}.

    Args:
      listener: listening socket.
      mine: {"process", "processes", "facts"} of this process.
      timeout: seconds to wait.
      token: the shared secret; "" for none.

    Raises:
      UserError: a process is missing, or one that has the token has other settings.
    """
    door, count = _Door(listener, mine, token), mine["processes"]
    door.wait(time.monotonic() + timeout)
    problem = door.problem
    missing = [str(n) for n in range(1, count) if n not in door.peers]
    if missing and not problem:
        several = len(missing) > 1
        problem = (
            f"Process{'es' if several else ''} {', '.join(missing)} of {count} did not join "
            f"within {timeout:g} seconds; start {'them' if several else 'it'} with the same "
            f"flags and --set parallel.process={missing[0]}, or wait longer with "
            "parallel.join_timeout."
        )
    reason = problem
    if missing and door.last_refusal and not door.problem:
        problem += f" The last connection that was refused came from {door.last_refusal}"
    peers = {}
    for number, connection in door.peers.items():
        # Back to blocking: from here on a thread for each peer reads and writes whole lines.
        connection.settimeout(HELLO_SECONDS)
        peers[number] = Lines(connection)
        with contextlib.suppress(OSError):
            peers[number].send({"refused": reason})
        peers[number].set_timeout(None)
    if problem:
        for peer in peers.values():
            peer.close()
        raise UserError(problem)
    return peers


def difference(
    mine: JsonObject, theirs: JsonObject, peers: Mapping[int, object], values: bool
) -> str:
    """Returns how another process contradicts process 0; empty if it does not.

    Args:
      mine: {"process", "processes", "facts"} of process 0.
      theirs: those of the other process.
      peers: the processes that have joined, by number.
      values: whether to name the values of settings.
    """
    other = theirs["process"]
    if theirs["processes"] != mine["processes"]:
        return (
            f"Process {other} was started with --set "
            f"parallel.processes={theirs['processes']} and process "
            f"0 with --set parallel.processes={mine['processes']}; all need the same."
        )
    if other in peers or not 0 < other < mine["processes"]:
        return (
            f"Two processes were started with --set parallel.process={other}; each needs its own "
            "number."
        )
    expected, received = mine["facts"], theirs["facts"]
    names = [n for n in sorted({*expected, *received}) if expected.get(n) != received.get(n)]
    if not names:
        return ""
    shown = "; ".join(
        f"{n} is {received.get(n)} there and {expected.get(n)} here" if values else n
        for n in names[:4]
    )
    return f"Process {other} has other settings than process 0: {shown}. All need the same."


def join(
    address: tuple[str, int],
    mine: Mapping[str, object],
    timeout: float,
    token: str,
    role: str = "coordinator",
    where: str = "parallel.coordinator is the host of process 0 and an open port there",
) -> Lines:
    """Joins process 0 at an address, and waits until it has accepted all processes.

    Args:
      role: what process 0 is, for messages.
      where: what gives its address, for messages.

    Raises:
      UserError: it is not reached in time, does not know the token, or refuses.
    """
    start, reason, reached = time.monotonic(), "no answer", False
    end, name = start + timeout, f"{address[0]}:{address[1]}"
    # Again and again, because process 0 may start later than this one.
    while (left := end - time.monotonic()) > 0:
        try:
            connection = Lines(socket.create_connection(address, timeout=left))
        except OSError as error:
            reason, reached = error.strerror or str(error) or reason, False
        else:
            try:
                if (answer := _introduced(connection, mine, end, token)) is not None:
                    break
                reason = "its answer has another token"
            except Exception as error:  # Any program may answer.
                reason = first_line(error)
            connection.close()
            reached = True
        time.sleep(min(0.2, max(0.0, end - time.monotonic())))
    else:
        if reached:
            raise UserError(
                f"The {role} {name} did not accept this process within {timeout:g} seconds "
                f"({reason}); all processes need the same SPARSE_DATAFLOW_TOKEN, or none, and "
                f"{where}."
            )
        raise UserError(
            f"The {role} {name} was not reached within {timeout:g} seconds ({reason}); {where}."
        )
    try:
        refused = answer["refused"]
        if answer["joined"]:
            # Process 0 may have begun to wait later than this process.
            final = connection.receive(start + 2 * timeout + HELLO_SECONDS)
            if not has_form(final, {"refused": str}):
                raise ValueError("it sent something else")
            refused = final["refused"]
    except Exception as error:
        raise UserError(f"The {role} {name} ended before all processes had joined.") from error
    if refused:
        raise UserError(refused)
    connection.set_timeout(None)
    return connection


def _introduced(connection, mine, end, token) -> dict[str, object] | None:
    """Returns process 0's answer to the hello of this process; None if its proof is wrong."""
    challenge = connection.receive(end)
    if not has_form(challenge, {"nonce": str}):
        raise ValueError("it is no process of a run")
    nonces = challenge["nonce"], secrets.token_hex(16)
    hello = {**mine, "nonce": nonces[1]}
    connection.send({**hello, "proof": proof(token, "process", nonces, hello)})
    answer = connection.receive(end)
    if not has_form(answer, _ANSWER):
        raise ValueError("it is no process of a run")
    right = proof(token, "coordinator", nonces, answer["refused"])
    return answer if is_proof(right, answer["proof"]) else None
