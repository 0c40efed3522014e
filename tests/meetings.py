"""Processes that meet, as threads of one."""

import contextlib
import socket
import threading
import time

from ports import free_port

from sparse_dataflow.cluster import rendezvous
from sparse_dataflow.files.errors import UserError


def meet_all(*members, timeout=120.0, token="secret", port=None):
    """Meets as members (number, count, facts[, token]); returns the ProcessSet or error text of
    each."""
    address, results = f"127.0.0.1:{port or free_port()}", {}

    def join(place, number, count, facts, token=token):
        try:
            results[place] = rendezvous.meet(address, count, number, facts, timeout, token)
        except UserError as refusal:
            results[place] = str(refusal)

    threads = [threading.Thread(target=join, args=(i, *m)) for i, m in enumerate(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[place] for place in range(len(members))]


def connected(port):
    """A connection to a port where somebody will listen."""
    for _ in range(1000):
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        time.sleep(0.02)
    raise AssertionError("nobody listens")
