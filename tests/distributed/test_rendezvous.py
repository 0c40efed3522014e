"""Processes that meet, and errors where they do not."""

import socket
import threading
import time

import pytest
from ports import free_port

from sparse_dataflow.distributed import rendezvous
from sparse_dataflow.files.errors import UserError


def meet_all(*members, timeout=120.0):
    """Meets as members (number, count, facts); returns the ProcessSet or error text of each."""
    address, results = f"127.0.0.1:{free_port()}", {}

    def join(place, number, count, facts):
        try:
            results[place] = rendezvous.meet(address, count, number, facts, timeout)
        except UserError as refusal:
            results[place] = str(refusal)

    threads = [threading.Thread(target=join, args=(i, *m)) for i, m in enumerate(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[place] for place in range(len(members))]


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


def test_other_connections_at_the_port_are_ignored():
    address, errors = f"127.0.0.1:{free_port()}", []

    def first():
        try:
            rendezvous.meet(address, 2, 0, {}, 2.0)
        except UserError as refusal:
            errors.append(str(refusal))

    thread = threading.Thread(target=first)
    thread.start()
    for _ in range(50):
        try:
            with socket.create_connection(("127.0.0.1", int(address.split(":")[1]))) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            break
        except OSError:
            time.sleep(0.05)
    thread.join()
    assert "Process 1 of 2 did not join" in errors[0]


@pytest.mark.parametrize("address", ["nowhere", ":80", "host:", "host:port", "host:70000"])
def test_an_invalid_address_is_refused(address):
    with pytest.raises(UserError, match="write host:port"):
        rendezvous.meet(address, 2, 0, {}, 1.0)
