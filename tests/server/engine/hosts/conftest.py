from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.engine.hosts.loopback import Hosts


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    yield hosts
    for close in hosts.open:
        close()
