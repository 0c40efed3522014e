"""Nothing that another program or a peer sends ends more than its own connection."""

import contextlib
import dataclasses
import json
import random
import socket
import threading

import drawn
import pytest
from marks import some
from meetings import connected, meet_all
from ports import free_port

from sparse_dataflow.cluster import handshake, lines, rendezvous, watch
from sparse_dataflow.files.errors import UserError

HELLO = {"process": 1, "processes": 2, "facts": {"a": 1}, "nonce": "0", "proof": "0"}
ANSWER = {"joined": True, "refused": "", "proof": "0"}


def drawn_line(draw, example):
    """Bytes that somebody sends in place of a message."""
    if draw.random() < 0.1:
        return draw.randbytes(draw.randint(0, 200)) + b"\n"
    return drawn.json_bytes(draw, example) + draw.choice([b"\n"] * 8 + [b"", b"\n{}\n"])


@pytest.mark.parametrize("token", some(["", "secret"], "secret"))
def test_no_message_of_another_program_ends_a_run(token):
    draw, port, met = random.Random(1), free_port(), []
    # Without a token, a hello of these facts is right.
    first = threading.Thread(
        target=lambda: met.extend(meet_all((0, 2, {"b": 2}), port=port, token=token))
    )
    first.start()
    for _ in range(300):
        with contextlib.suppress(OSError), connected(port) as client:
            client.settimeout(0.05)
            nonce = json.loads(client.recv(200))["nonce"]
            line = drawn_line(draw, HELLO)
            with contextlib.suppress(Exception):
                if draw.random() < 0.5:  # As somebody who knows that there is no token.
                    hello = json.loads(line) | {"nonce": "0"}
                    content = {name: each for name, each in hello.items() if name != "proof"}
                    proof = handshake.proof("", "process", (nonce, "0"), content)
                    line = json.dumps(hello | {"proof": proof}).encode() + b"\n"
            client.sendall(line)
            if draw.random() < 0.5:
                client.recv(100)
        assert first.is_alive() and not met
    met += meet_all((1, 2, {"b": 2}), port=port, token=token)
    first.join()
    assert [type(group) for group in met] == [rendezvous.ProcessSet] * 2, met


def test_no_line_of_a_false_coordinator_ends_a_process():
    draw = random.Random(2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        count = 0

        def serve():
            nonlocal count
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    count += 1
                    with contextlib.suppress(OSError), connection:
                        connection.settimeout(0.05)
                        connection.sendall(draw.choice([b'{"nonce":"n"}\n', drawn_line(draw, {})]))
                        connection.recv(9999)
                        connection.sendall(drawn_line(draw, ANSWER))

        threading.Thread(target=serve, daemon=True).start()
        address = ("127.0.0.1", server.getsockname()[1])
        hello = {"process": 1, "processes": 2, "facts": {}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(handshake.time, "sleep", lambda seconds: None)
            while count < 300:
                with pytest.raises(UserError, match="did not accept"):
                    handshake.join(address, hello, 0.5, "secret")


@pytest.mark.parametrize("proof", ["é", "\ud800", "\0", "x" * 9000])
def test_a_proof_of_any_characters_is_compared(proof):
    assert not handshake.is_proof("0" * 64, proof)
    assert handshake.is_proof("0" * 64, "0" * 64)


def test_a_token_that_is_not_utf8_is_a_token():
    groups = meet_all((0, 2, {}), (1, 2, {}), token="\udcff\udcfe")
    assert [type(group) for group in groups] == [rendezvous.ProcessSet] * 2


FORGED = "\x1b]0;title\x07\x1b[2J\nerror: forged \u202e line"


def test_text_of_another_program_is_escaped_in_the_log(capfd):
    port, lines = free_port(), []
    first = threading.Thread(
        target=lambda: lines.extend(meet_all((0, 2, {"a": 1}), port=port, token="", timeout=3.0))
    )
    first.start()
    [words] = meet_all((1, 2, {"a": FORGED, FORGED: 1}), port=port, token="", timeout=2.0)
    first.join()
    assert "other settings" in words and "\\x1b[2J\\nerror: forged" in lines[0]
    all_lines = [*lines, words, *capfd.readouterr().err.splitlines()]
    assert all(line.isprintable() for line in all_lines)
    assert not any(line.startswith("error: forged") for line in all_lines)


@pytest.mark.parametrize(
    "message",
    [
        {"failed": FORGED, "process": 1, "exit_status": 1},
        {"failed": "x", "process": 10**300, "exit_status": 10**300},
        {"status": {"host": FORGED}, "failed": 1},
    ],
)
def test_the_last_words_of_a_peer_are_escaped(message, monkeypatch, capfd):
    ended = threading.Event()
    monkeypatch.setattr(rendezvous.os, "_exit", lambda status: ended.set())
    monkeypatch.setattr(rendezvous, "GRACE_SECONDS", 0.0)
    ours, theirs = socket.socketpair()
    rendezvous.ProcessSet(1, {0: lines.Lines(ours)})
    theirs.sendall(json.dumps(message).encode() + b"\n")
    assert ended.wait(10)
    theirs.close()
    output = capfd.readouterr().err
    assert output.startswith("error: process ") and output.rstrip("\n").isprintable()


def test_no_message_of_a_peer_ends_the_thread_that_reads_it(monkeypatch):
    """It is read, or counts as the end of the peer."""
    draw, exits = random.Random(3), []
    monkeypatch.setattr(rendezvous.os, "_exit", exits.append)
    monkeypatch.setattr(rendezvous, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(rendezvous, "print", lambda *_, **__: None, raising=False)
    uncaught = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    examples = ({"status": {"host": "a", "idle": 1.0}}, {"announcement": "x"}, {"done": True},
                {"failed": "x", "process": 1, "exit_status": 2})  # fmt: skip
    for _ in range(300):
        ours, theirs = socket.socketpair()
        group = rendezvous.ProcessSet(1, {0: lines.Lines(ours)})
        theirs.sendall(drawn_line(draw, draw.choice(examples)))
        theirs.close()
        assert group._ended[0].wait(10) and not uncaught
        for when, message in group.statuses.values():
            status = watch.Status.from_message(message, when)
            assert watch.describe({0: status, 1: dataclasses.replace(status, idle=1e6)}, 1.0)
