"""A small HTTP server that only this machine reaches."""

import contextlib
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from sparse_dataflow.files.errors import UserError, first_line

HOST = "127.0.0.1"
_NAMES = (HOST, "localhost")

Answer = tuple[str, str | bytes]
"""Content type and content."""

Respond = Callable[[str, Mapping[str, str]], Answer | None]
"""(path, query) -> the answer, or None for a path that does not exist; UserError refuses."""


SECONDS = 30.0
"""Until a request must be there as a whole."""


class _UntilDeadline(io.RawIOBase):
    """What a connection receives before a deadline.

    Attributes:
      deadline: on the clock of `time.monotonic`.
    """

    def __init__(self, connection: socket.socket):
        self._connection, self.deadline = connection, 0.0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, target: Any) -> int:
        """Receives some bytes; TimeoutError after the deadline."""
        # A timeout of each read alone would let a byte now and then keep the connection.
        self._connection.settimeout(max(1e-3, self.deadline - time.monotonic()))
        try:
            return self._connection.recv_into(target)
        finally:
            self._connection.settimeout(SECONDS)


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"
    timeout = SECONDS

    def setup(self):
        super().setup()
        # The reader of the standard library has no deadline for a request as a whole.
        self.rfile.close()
        self._received = _UntilDeadline(self.connection)
        self.rfile = io.BufferedReader(self._received)

    def handle_one_request(self):
        self._received.deadline = time.monotonic() + SECONDS
        super().handle_one_request()

    def do_GET(self):
        self._answer("GET")

    def do_POST(self):
        self._answer("POST")

    def _answer(self, method):
        # A web page that a browser shows must not reach this server by a name of its own.
        if not self._is_local():
            return self._send(403, "text/plain", "only for this machine")
        respond = self.server.methods.get(method)
        if respond is None:
            return self._send(405, "text/plain", f"{method} is not served here")
        try:
            url = urlsplit(self.path)
            answer = respond(url.path, dict(parse_qsl(url.query)))
        except UserError as error:
            return self._send(400, "text/plain", str(error))
        except Exception as error:  # A request never ends the server.
            return self._send(500, "text/plain", first_line(error))
        self._send(200, *answer) if answer else self._send(404, "text/plain", "not found")

    def _is_local(self):
        """Returns whether the request names this machine, as its host and as its origin."""
        try:
            host = (self.headers.get("Host") or "").partition(":")[0]
            origin = urlsplit(self.headers.get("Origin") or f"http://{HOST}").hostname
        except ValueError:
            return False
        return host in _NAMES and origin in _NAMES

    def _send(self, status, kind, content):
        data = content.encode(errors="replace") if isinstance(content, str) else content
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            # Pages show a training that goes on: a cached one is old.
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, format, *arguments):
        """Logs nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Says nothing: what cannot be read ends its connection alone."""

    def __init__(self, port: int, methods: Mapping[str, Respond]):
        self.methods = methods
        super().__init__((HOST, port), _Handler)


@contextlib.contextmanager
def served(port: int, methods: Mapping[str, Respond]) -> Iterator[int]:
    """Serves on loopback in threads during a block; yields the port.

    Args:
      port: 0 for any free port.
      methods: "GET" or "POST" -> what answers.

    Raises:
      UserError: the port is not free.
    """
    try:
        server = _Server(port, methods)
    except OSError as error:
        raise UserError(
            f"Port {port} of this machine cannot be used ({error.strerror}); name another, or 0 "
            "for any."
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="loopback", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
