"""Messages over a TCP connection, one line of JSON each, which arrays may follow."""

import errno
import ipaddress
import json
import math
import socket
import threading
import time
from collections.abc import Sequence

import numpy as np

from sparse_dataflow.files import json_files

MAX_BYTES = 2**20
"""Size limit of a message, so that no client can fill the memory."""

MAX_ARRAY_BYTES = 2**31
"""Size limit of an array: the residual stream of 16 prompts of 8,192 tokens, width 4,096."""

DTYPES = ("float32", "bfloat16", "float16", "int32")
"""Of arrays that are sent; bfloat16 is known to numpy where jax is loaded."""


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

    def send_arrays(self, message: dict[str, object], arrays: Sequence[np.ndarray]) -> None:
        """Sends a message and arrays, of one of DTYPES each; raises OSError as `send`."""
        forms = [[array.dtype.name, *array.shape] for array in arrays]
        with self._lock:
            self._connection.sendall(json.dumps({**message, "arrays": forms}).encode() + b"\n")
            for array in arrays:
                self._connection.sendall(np.ascontiguousarray(array).view(np.uint8).data)

    def receive_arrays(self) -> tuple[json_files.JsonObject, list[np.ndarray]]:
        """Returns the next message of `send_arrays`, and its arrays; raises as `receive`."""
        message = self.receive()
        forms = message.pop("arrays", None)
        if not isinstance(forms, list):
            raise ValueError("a message has no arrays")
        return message, [self._array(form) for form in forms]

    def _array(self, form):
        name, *shape = form if isinstance(form, list) and form else [None]
        if name not in DTYPES or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{form} is no array")
        dtype = np.dtype(name)
        if (size := math.prod(shape) * dtype.itemsize) > MAX_ARRAY_BYTES:
            raise ValueError(f"an array has more than {MAX_ARRAY_BYTES} bytes")
        while len(self._buffer) < size:
            piece = self._connection.recv(min(2**20, max(65536, size - len(self._buffer))))
            if not piece:
                raise ValueError("the connection was closed")
            self._buffer += piece
        content, self._buffer = self._buffer[:size], self._buffer[size:]
        return np.frombuffer(bytes(content), dtype).reshape(shape)

    def keep_alive(self) -> None:
        """Lets `receive` fail within a minute where the other machine is lost without a word."""
        options = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Small messages go at once: each token waits for its answer.
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in options.items():
            if hasattr(socket, name):  # macOS lacks one of them.
                self._connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


def host_and_port(address: str) -> tuple[str, int]:
    """Returns the host and the port of "host:port"; raises ValueError where it is none."""
    host, _, port = address.rpartition(":")
    legal_port = port.isascii() and port.isdecimal() and len(port) < 6 and int(port) < 65536
    if not (legal_port and is_name(host)):
        raise ValueError(f"{address} is not an address")
    return host.strip("[]"), int(port)


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


def interface(listener: socket.socket) -> str:
    """Returns the address that a socket listens at; empty for every interface."""
    address = listener.getsockname()[0]
    return "" if address in ("0.0.0.0", "::") else address


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
