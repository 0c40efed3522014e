"""Ports of this machine on which processes of the tests meet."""

import random
import socket


def free_port():
    """A port that nothing listens at.

    It is below those that systems hand out to outgoing connections (from 32768 on, on Linux), as
    one of these could take it before the test's processes do.
    """
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(10_000, 32_000)
        with socket.socket() as found:
            try:
                found.bind(("", port))
            except OSError:
                continue
        return port
