"""Messages over a TCP connection, one line of JSON each."""

import json
import socket
import threading
from typing import Any

from sparse_dataflow.files import json_files

MAX_BYTES = 2**20
"""Size limit of a message, so that a stranger at the port cannot fill the memory."""


class Lines:
    """A connection; any thread may send, one thread receives."""

    def __init__(self, connection: socket.socket):
        self._connection, self._buffer, self._lock = connection, b"", threading.Lock()

    def set_timeout(self, seconds: float | None) -> None:
        """Sets the seconds after which `send` and `receive` raise TimeoutError; None waits."""
        self._connection.settimeout(seconds)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; raises OSError if the other side closed the connection."""
        with self._lock:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Returns the next message.

        Raises:
          OSError: the connection failed.
          ValueError: the connection was closed, or the data is not a message.
        """
        while b"\n" not in self._buffer:
            piece = self._connection.recv(65536)
            if not piece:
                raise ValueError("the connection was closed")
            self._buffer += piece
            if len(self._buffer) > MAX_BYTES:
                raise ValueError(f"a message is longer than {MAX_BYTES} bytes")
        line, _, self._buffer = self._buffer.partition(b"\n")
        message = json_files.parse(line)
        if not isinstance(message, dict):
            raise ValueError("a message is not a JSON object")
        return message

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


def listen(port: int, backlog: int) -> socket.socket:
    """Returns a listening socket; raises OSError if the port is in use."""
    return socket.create_server(("", port), backlog=backlog)


def connect(address: tuple[str, int], seconds: float) -> Lines:
    """Connects within a number of seconds; raises OSError otherwise."""
    return Lines(socket.create_connection(address, timeout=seconds))
