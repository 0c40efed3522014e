"""Processes that meet, and errors where they do not."""

import contextlib
import json
import random
import socket
import threading
import time

import pytest
from meetings import connected, meet_all
from ports import free_port

from sparse_dataflow.cluster import cluster, handshake, lines, processes, rendezvous
from sparse_dataflow.files.errors import UserError


def test_processes_meet_in_any_order_and_leave_together():
    groups = meet_all((2, 3, {"a": 1}), (1, 3, {"a": 1}), (0, 3, {"a": 1}))
    left = []
    threads = [
        threading.Thread(target=lambda g=group: (g.leave(), left.append(g))) for group in groups
    ]
    threads[0].start()
    time.sleep(0.2)
    assert not left  # Not before process 0, which all others wait for.
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(left) == 3


def test_missing_processes_are_named_on_all():
    for words in meet_all((0, 4, {}), (2, 4, {}), timeout=3.0):
        assert words.startswith("Processes 1, 3 of 4 did not join within 3 seconds"), words


def test_differing_settings_are_refused_on_all_with_both_values():
    errors = meet_all((0, 2, {"--seed": 1, "--steps": 5}), (1, 2, {"--seed": 2, "--steps": 5}))
    for words in errors:
        assert "Process 1 has other settings than process 0: --seed is 2 there and 1 here" in words
        assert "--steps" not in words


def test_numbers_and_counts_that_contradict_are_refused_on_all():
    assert all(
        "--set parallel.process=1; each needs its own" in w
        for w in meet_all((0, 3, {}), (1, 3, {}), (1, 3, {}))
    )
    for words in meet_all((0, 2, {}), (1, 3, {})):
        assert (
            "started with --set parallel.processes=3 and process 0 with --set parallel.processes=2"
            in words
        )


def test_an_unreachable_coordinator_is_refused_with_the_reason():
    [words] = meet_all((1, 2, {}), timeout=0.5)
    assert "was not reached within 0.5 seconds (Connection refused)" in words


def test_without_a_token_a_process_with_other_settings_is_refused_alone():
    """Anybody could say the same; neither are the values of this run's settings told."""
    port, met = free_port(), []
    first = lambda: meet_all((0, 2, {"--seed": 1}), port=port, token="")  # noqa: E731
    thread = threading.Thread(target=lambda: met.extend(first()))
    thread.start()
    [words] = meet_all((1, 2, {"--seed": 7}), port=port, token="")
    assert "Process 1 has other settings than process 0: --seed. All need the same" in words
    met += meet_all((1, 2, {"--seed": 1}), port=port, token="")
    thread.join()
    assert [type(group) for group in met] == [rendezvous.ProcessSet] * 2, met


def test_a_process_of_another_token_is_not_accepted_and_ends_nothing():
    right = ((0, 2, {}), (1, 2, {}))
    results = meet_all((1, 2, {}, "another"), *right, timeout=6.0)
    assert [type(r) for r in results[1:]] == [rendezvous.ProcessSet] * 2, results
    assert "SPARSE_DATAFLOW_TOKEN" in results[0] or "was not reached" in results[0]


def test_a_coordinator_of_another_token_is_not_believed():
    for words in meet_all((0, 2, {}, "one"), (1, 2, {}, "two"), timeout=3.0):
        assert "Process 1 of 2 did not join" in words or "SPARSE_DATAFLOW_TOKEN" in words, words


def test_a_process_that_ends_while_others_join_may_come_again():
    port, met = free_port(), []
    thread = threading.Thread(target=lambda: met.extend(meet_all((0, 3, {}), port=port)))
    thread.start()
    hello(port, token="secret", process=1, processes=3)[0].close()
    others = meet_all((1, 3, {}), (2, 3, {}), port=port)
    thread.join()
    assert [type(group) for group in met + others] == [rendezvous.ProcessSet] * 3, met + others


def hello(port, token="", **changes):
    """(connection, answer) after a process's hello with some fields changed."""
    connection = lines.Lines(connected(port))
    nonces = connection.receive()["nonce"], "0"
    message = {"process": 1, "processes": 2, "facts": {}, "nonce": "0"} | changes
    proof = handshake.proof(token, "process", nonces, message)
    connection.send(message | {"proof": proof})
    return connection, connection.receive()


FORMS = [
    {"process": "1"}, {"process": 1e999}, {"process": True}, {"process": None}, {"process": [1]},
    {"processes": "2"}, {"facts": "facts"}, {"facts": []}, {"facts": None}, {"nonce": 3},
    {"more": 1}, {"process": -1}, {"process": 0}, {"process": 10**30}, {"facts": {"a": 1}},
]  # fmt: skip
"""Fields of a hello that end no run."""


@pytest.mark.parametrize("token", ["", "secret"])
def test_a_run_joins_while_others_send_anything(token):
    """A seeded fuzz: bytes, wrong forms, wrong proofs, silence, one byte at a time, floods."""
    draw, port, joined = random.Random(8), free_port(), []
    met = threading.Thread(
        target=lambda: joined.extend(meet_all((0, 2, {}), port=port, token=token, timeout=60.0))
    )
    met.start()
    open_connections = [connected(port) for _ in range(100)]  # Silent ones.
    end = threading.Event()

    def drip():
        with contextlib.suppress(OSError), connected(port) as connection:
            for byte in b'{"process": 1, "processes": 2, "facts": {' + b" " * 10**6:
                connection.sendall(bytes([byte]))
                if end.wait(0.05):
                    return

    dripping = [threading.Thread(target=drip) for _ in range(5)]
    for thread in dripping:
        thread.start()
    for form in FORMS:
        with contextlib.suppress(OSError, ValueError):
            # Of these, with a token, only programs without it.
            connection, answer = hello(port, "", **form)
            assert answer["joined"] is False
    for _ in range(200):
        choices = [draw.randbytes(draw.randint(0, 60)), b"GET / HTTP/1.1\r\n\r\n", b"[" * 10**5]
        choices += [b"{}\n", b"null\n", b"\x00\n", b'{"facts": 1e999}\n', b"9" * 5000 + b"\n"]
        with contextlib.suppress(OSError), connected(port) as connection:
            connection.sendall(draw.choice(choices))
    start = time.monotonic()
    assert not joined
    others = meet_all((1, 2, {}), port=port, token=token)
    met.join()
    assert [type(group) for group in joined + others] == [rendezvous.ProcessSet] * 2, joined
    assert time.monotonic() - start < 10.0  # It is not served after them, one by one.
    end.set()
    for thread in dripping:
        thread.join()
    for connection in open_connections:
        connection.close()


def test_a_peer_that_drips_is_not_awaited_beyond_the_timeout():
    port, end = free_port(), threading.Event()

    def drip():
        with contextlib.suppress(OSError), connected(port) as connection:
            while not end.wait(0.2):
                connection.sendall(b" ")

    thread = threading.Thread(target=drip)
    thread.start()
    start = time.monotonic()
    [words] = meet_all((0, 2, {}), port=port, timeout=2.0)
    assert "did not join within 2 seconds" in words and time.monotonic() - start < 8.0
    end.set()
    thread.join()


def test_a_coordinator_that_drips_is_not_awaited_beyond_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as server:
        end = threading.Event()

        def serve():
            connection, _ = server.accept()
            with contextlib.suppress(OSError):
                while not end.wait(0.2):
                    connection.sendall(b" ")
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        start = time.monotonic()
        [words] = meet_all((1, 2, {}), port=server.getsockname()[1], timeout=2.0)
        assert "did not accept this process within 2 seconds" in words
        assert time.monotonic() - start < 8.0
        end.set()
        thread.join()


@pytest.mark.parametrize(
    "message",
    [{"status": "x"}, {"status": {}, "more": 1}, {"announcement": 3}, {"failed": 1}, {"done": 1}],
)
def test_a_message_of_another_form_counts_as_the_end_of_its_sender(message, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(rendezvous.os, "_exit", lambda status: ended.set())
    ours, theirs = socket.socketpair()
    group = rendezvous.ProcessSet(1, {0: lines.Lines(ours)})
    theirs.sendall(json.dumps(message).encode() + b"\n")
    assert ended.wait(10), group.statuses
    theirs.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_process_0_listens_at_the_coordinators_address_alone(host):
    with lines.listen(host, free_port(), 1) as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")


def test_a_name_that_other_hosts_resolve_otherwise_is_listened_at_everywhere(monkeypatch):
    """As Debian maps a machine's own name to 127.0.1.1, and a service's address is on no
    interface."""
    for address in ("127.0.1.1", "203.0.113.7"):
        infos = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]
        monkeypatch.setattr(lines.socket, "getaddrinfo", lambda *_, f=infos, **__: f)
        with lines.listen("n07", free_port(), 1) as listener:
            assert listener.getsockname()[0] in ("0.0.0.0", "::")


def join_refusal(monkeypatch, address, token=""):
    """What process 0 ends with whose coordinator's name leads to an address of no interface."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    infos = [(family, socket.SOCK_STREAM, 6, "", (address, 0))]
    monkeypatch.setattr(lines.socket, "getaddrinfo", lambda *_, **__: infos)
    with pytest.raises(UserError) as refused:
        rendezvous.meet(f"n07:{free_port()}", 2, 0, {}, 0.1, token)
    return str(refused.value)


@pytest.mark.parametrize("address", ["8.8.8.8", "2a00:1450:4001:800::200e"])
def test_without_a_token_a_public_coordinator_is_refused(monkeypatch, address):
    assert "SPARSE_DATAFLOW_TOKEN" in join_refusal(monkeypatch, address)
    assert "did not join" in join_refusal(monkeypatch, address, token="secret")


@pytest.mark.parametrize("address", ["10.0.0.7", "192.168.1.7", "100.64.0.7", "127.0.1.1"])
def test_without_a_token_process_0_says_who_can_join(monkeypatch, capfd, address):
    """The last is how Debian maps a machine's own name, which is then listened at everywhere."""
    assert "did not join" in join_refusal(monkeypatch, address)
    message = capfd.readouterr().err
    assert "warning: without SPARSE_DATAFLOW_TOKEN, whoever reaches port" in message
    assert "every interface" in message
    assert "did not join" in join_refusal(monkeypatch, address, token="secret")
    assert "warning" not in capfd.readouterr().err


def test_on_this_machine_alone_nothing_is_said(capfd):
    with pytest.raises(UserError, match="did not join"):
        rendezvous.meet(f"127.0.0.1:{free_port()}", 2, 0, {}, 0.1)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("interface", "bound"),
    [("127.0.0.1", "127.0.0.1:61000"), ("fd00::7", "[fd00::7]:61000"), ("", None)],
)
def test_jaxs_own_service_listens_where_process_0_does(monkeypatch, interface, bound):
    options = {}
    group = rendezvous.ProcessSet(0, {}, interface)
    monkeypatch.setattr(processes.rendezvous, "meet", lambda *_: group)
    monkeypatch.setattr(
        processes.jax.distributed, "initialize", lambda *_, **kw: options.update(kw)
    )
    monkeypatch.setattr(processes.jax.distributed, "shutdown", lambda: None)
    monkeypatch.setattr(processes.jax.config, "update", lambda *_: None)
    with processes.joined(cluster.Membership("n07:61000", 2, 0), {}, 1.0, 1.0) as met:
        assert met is group
    assert options["coordinator_bind_address"] == bound


def test_the_token_comes_from_the_environment():
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    assert cluster.token({}) == cluster.token({"SLURM_JOB_ID": "7"}) == ""
    assert cluster.token(slurm) == "SLURM 7.0"
    assert cluster.token({**slurm, "SPARSE_DATAFLOW_TOKEN": "x"}) == "x"


NO_ADDRESSES = [
    "nowhere", ":80", "host:", "host:port", "host:70000", "host:٣", "node..cluster:80", "..:80",
    f"{'n' * 64}:80", f"a.{'b' * 90}.c:80", "x\0y:80", "[]:80", "n\N{COMBINING TILDE}\u0378:80",
]  # fmt: skip


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_an_invalid_address_is_refused(address):
    with pytest.raises(UserError, match="write host:port"):
        rendezvous.meet(address, 2, 0, {}, 1.0)


def test_a_process_that_ends_because_another_did_is_not_named(monkeypatch, capfd):
    statuses = []
    ended = threading.Event()
    monkeypatch.setattr(
        rendezvous.os, "_exit", lambda status: (statuses.append(status), ended.set())
    )
    pairs = {number: socket.socketpair() for number in (1, 2, 3)}
    group = rendezvous.ProcessSet(0, {n: lines.Lines(pair[0]) for n, pair in pairs.items()})
    pairs[2][1].close()
    assert group._peer_failed.wait(10)
    for number in (1, 3):
        pairs[number][1].close()
    assert ended.wait(10) and statuses == [75]
    errors = capfd.readouterr().err.splitlines()
    assert errors == ["error: process 2 ended: it gave no reason; its own output may say why."]
