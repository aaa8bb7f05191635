"""Ports of the loopback interface for servers that tests start."""

import random
import socket

_random = random.Random()  # whatever seeds a test sets, workers draw different ports


def free_port():
    """A port that is free now, and the one 10000 above it, where a node of a Redis cluster listens too.

    Linux gives ports from 32768 on to outgoing connections, so a port that `bind(0)` finds may be taken
    before the server has it. These are below.
    """
    while True:
        port = _random.randrange(12000, 22000)
        if _is_free(port) and _is_free(port + 10000):
            return port


def _is_free(port):
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
