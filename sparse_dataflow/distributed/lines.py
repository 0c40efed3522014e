"""Messages over a connection, each a line of JSON."""

import json
import socket
import threading
from typing import Any

from sparse_dataflow.files import json_files

LONGEST = 2**20
"""Bytes of a message: a run's flags are far below; a stranger at the port cannot fill memory."""


class Lines:
    """Sends from any thread, receives in one."""

    def __init__(self, connection: socket.socket):
        self._connection, self._rest, self._lock = connection, b"", threading.Lock()

    def timeout(self, seconds: float | None) -> None:
        """Sending and receiving raise a TimeoutError after so long; None waits."""
        self._connection.settimeout(seconds)

    def send(self, message: dict[str, Any]) -> None:
        """Raises OSError where the other side is gone."""
        with self._lock:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """The next message.

        Raises:
          OSError: the connection failed.
          ValueError: it was closed, or what came is no message.
        """
        while b"\n" not in self._rest:
            piece = self._connection.recv(65536)
            if not piece:
                raise ValueError("the connection was closed")
            self._rest += piece
            if len(self._rest) > LONGEST:
                raise ValueError(f"a message is longer than {LONGEST} bytes")
        line, _, self._rest = self._rest.partition(b"\n")
        message = json_files.parse(line)
        if not isinstance(message, dict):
            raise ValueError("a message is no JSON object")
        return message

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()


def listening(port: int, backlog: int) -> socket.socket:
    """A socket that others connect to; raises OSError where the port is taken."""
    return socket.create_server(("", port), backlog=backlog)


def connected(address: tuple[str, int], seconds: float) -> Lines:
    """A connection; raises OSError where it is not made in so many seconds."""
    return Lines(socket.create_connection(address, timeout=seconds))
