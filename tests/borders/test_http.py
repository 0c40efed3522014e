"""A request to the server of `watch` and of profiles: an answer, and nothing on the terminal."""

import contextlib
import socket

import drawn
import pytest
from drawn_inputs import DrawnInputs
from marks import some

from sparse_dataflow.commands import watch
from sparse_dataflow.files import loopback
from sparse_dataflow.files.errors import UserError


def answer(port, request):
    """The status of the answer; 0 where the connection is closed without one."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            line = connection.makefile("rb").readline().split()
            return int(line[1]) if len(line) > 1 and line[0].startswith(b"HTTP/") else 0
    return 0


def get(path="/", **headers):
    lines = [f"GET {path} HTTP/1.0", *(f"{name}: {text}" for name, text in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode(errors="surrogatepass")


@pytest.fixture
def port(tmp_path):
    with loopback.served(0, {"GET": watch.responder([tmp_path], 1000.0)}) as port:
        yield port


@pytest.mark.parametrize(
    "origin", some(
        ["http://[", "http://[::1", "http://a]", "null", "http://evil.example", "http://\x00"],
        "http://[", "null", "http://evil.example",
    ),
)  # fmt: skip
def test_a_foreign_or_malformed_origin_is_refused(port, capfd, origin):
    assert answer(port, get(Host="127.0.0.1", Origin=origin)) in (400, 403)
    assert answer(port, get(Host="127.0.0.1", Origin="http://localhost:7")) == 200
    assert capfd.readouterr().err == ""


def test_a_request_that_is_never_whole_is_closed(monkeypatch, port):
    monkeypatch.setattr(loopback, "SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
        connection.settimeout(0.05)
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 200:  # Ten seconds, a byte in each twentieth of one.
                sent += connection.send(b"x")
                with contextlib.suppress(TimeoutError):
                    if connection.recv(1) == b"":
                        break
    assert sent < 100


def test_any_request_is_answered_or_closed_and_the_server_goes_on(port, capfd):
    counts = DrawnInputs("HTTP requests")
    for _ in counts:
        draw = counts.draw
        headers = {"Host": draw.choice(["127.0.0.1", "localhost:80", "evil", drawn.text(draw)])}
        if draw.random() < 0.3:
            headers["Origin"] = draw.choice(["http://localhost", "http://[", drawn.text(draw)])
        if draw.random() < 0.2:
            headers[drawn.text(draw)] = drawn.text(draw, 200)
        path = draw.choice(
            ["/", "/content", "/?layer=0", "/?layer=" + drawn.text(draw), "//[", "x"]
        )
        request = get(path, **headers)
        if draw.random() < 0.3:
            request = drawn.damaged(draw, request)
        with counts.one(request):
            status = answer(port, request)
            if status != 200:
                raise UserError(f"status {status}")
        assert capfd.readouterr().err == ""
    assert answer(port, get(Host="localhost")) == 200
