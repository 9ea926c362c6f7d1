import random
import socket
from contextlib import ExitStack, suppress

import pytest

from scripts.lab.planning import sweep


@pytest.fixture
def free_port() -> int:
    """The first of eight ports that are free: a bench gives its servers one after the other. The system gives none of
    them to another program that asks for any port."""
    while True:
        first = random.randrange(16_000, 32_000, 8)
        with suppress(OSError), ExitStack() as probes:
            for port in range(first, first + 8):
                probes.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


@pytest.fixture
def short_simulations(monkeypatch):
    """Of a quarter of the requests: for what is not about the figures' steadiness."""
    monkeypatch.setattr(sweep, "MIN_REQUESTS", 75)
    monkeypatch.setattr(sweep, "TURNOVERS", 1)
