"""Free ports of this machine for processes that tests start."""

import random
import socket


def free_port():
    """Returns a port that no process listens on.

    It is below the ephemeral ports (from 32768 on Linux): an outgoing connection could take one of
    those before the test's processes do.
    """
    rng = random.SystemRandom()
    while True:
        port = rng.randrange(10_000, 32_000)
        with socket.socket() as server:
            try:
                server.bind(("", port))
            except OSError:
                continue
        return port
