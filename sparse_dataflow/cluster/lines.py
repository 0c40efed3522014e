"""Messages over a TCP connection, one line of JSON each."""

import errno
import ipaddress
import json
import socket
import threading
import time

from sparse_dataflow.files import json_files

MAX_BYTES = 2**20
"""Size limit of a message, so that no client can fill the memory."""


def parse(line: bytes) -> dict[str, object]:
    """Returns the message in a line; raises ValueError if it is none."""
    message = json_files.parse(line)
    if not isinstance(message, dict):
        raise ValueError("a message is not a JSON object")
    return message


class Lines:
    """A connection; any thread may send, one thread receives."""

    def __init__(self, connection: socket.socket):
        self._connection, self._buffer = connection, bytearray()
        self._lock = threading.Lock()

    def set_timeout(self, seconds: float | None) -> None:
        """Sets the seconds after which `send` and `receive` raise TimeoutError; None waits."""
        self._connection.settimeout(seconds)

    def send(self, message: dict[str, object]) -> None:
        """Sends a message; raises OSError if the other side closed the connection."""
        # Two threads may send: without the lock their lines would mix.
        with self._lock:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, end: float | None = None) -> json_files.JsonObject:
        """Returns the next message.

        Args:
          end: `time.monotonic()` by which the whole message must be here; None waits.

        Raises:
          OSError: the connection failed.
          ValueError: the connection was closed, or the data is not a message.
        """
        while b"\n" not in self._buffer:
            if end is not None:
                if (left := end - time.monotonic()) <= 0:
                    raise TimeoutError("it did not answer in time")
                self._connection.settimeout(left)
            piece = self._connection.recv(65536)
            if not piece:
                raise ValueError("the connection was closed")
            self._buffer += piece
            if len(self._buffer) > MAX_BYTES:
                raise ValueError(f"a message is longer than {MAX_BYTES} bytes")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return parse(bytes(line))

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """Returns a socket that listens where a name leads to, on this machine.

    A name of this machine itself may lead to the loopback address here and to another address
    elsewhere, and the address of a service lies on no interface. Then the socket listens on every
    interface.

    Args:
      host: name or address of this machine, as the other processes know it.
      backlog: number of connections that may wait.

    Raises:
      OSError: the port is in use.
    """
    host = host.strip("[]")
    for family, address in _resolved(host, port):
        loopback = reach(address[0]) == LOOPBACK
        if loopback and not (host.startswith("localhost") or _is_address(host)):
            continue
        try:
            return socket.create_server(address, family=family, backlog=backlog)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("", port), backlog=backlog)


def is_name(host: str) -> bool:
    """Returns whether a text can be the name or address of a host, which need not exist.

    The libraries that resolve other texts raise errors of many kinds.
    """
    try:
        host.strip("[]").encode("idna")
    except UnicodeError:
        return False
    return bool(host.strip("[]")) and host.isprintable()


LOOPBACK, PRIVATE, PUBLIC = range(3)


def reach(address: str) -> int:
    """Returns from where an IP address is reached: LOOPBACK (this machine), PRIVATE or PUBLIC."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    return LOOPBACK if ip.is_loopback else PUBLIC if ip.is_global else PRIVATE


def addresses(host: str, port: int) -> list[str]:
    """Returns the IP addresses of a host; that of every interface if its name is unknown."""
    return [address for _, (address, _) in _resolved(host.strip("[]"), port)] or ["0.0.0.0"]


def _resolved(host, port) -> list[tuple[int, tuple[str, int]]]:
    """Returns (family, (address, port)) of each address of a host."""
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(family, (str(address[0]), int(address[1]))) for family, *_, address in resolved]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
