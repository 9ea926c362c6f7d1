import socket

import pytest

from scripts.lab.planning import sweep


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def short_simulations(monkeypatch):
    """Of a quarter of the requests: for what is not about the figures' steadiness."""
    monkeypatch.setattr(sweep, "MIN_REQUESTS", 75)
    monkeypatch.setattr(sweep, "TURNOVERS", 1)
