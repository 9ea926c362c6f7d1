"""JAX's port of host 0: where it listens, and what a stranger can do who reaches it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from scripts import launch
from tests.e2e.conftest import ROOT
from tests.server.engine.hosts.loopback import free_port

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

HOST = """
import sys
from scripts.building.several_hosts import _join
from server.engine.hosts.cluster import Cluster

port, number = map(int, sys.argv[1:])
_join(Cluster(coordinator="127.0.0.1", port=port, num_hosts=2, host_id=number, timeout_s=300, secret="0" * 16))
print("joined", flush=True)
sys.stdin.read()
"""
STRANGER = """
import sys
from jax._src.lib import _jax

_jax.get_distributed_runtime_client(f"127.0.0.1:{sys.argv[1]}", 1, use_compression=False).connect()
"""


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextlib.contextmanager
def hosts() -> Iterator[tuple[int, list[subprocess.Popen[str]]]]:
    port = free_port()
    both = [python(HOST, port, number) for number in range(2)]
    try:
        assert [host.stdout.readline() for host in both if host.stdout] == ["joined\n"] * 2
        yield port, both
    finally:
        for host in both:
            host.kill()
            host.communicate()


def test_jax_listens_at_the_coordinators_address_and_a_stranger_there_ends_all_hosts(capsys):
    """Where this fails, a later JAX checks who calls: see the help and scripts/deploy/README.md."""
    with hosts() as (port, both):
        listening = [one.laddr for one in psutil.Process(both[0].pid).net_connections("tcp") if one.status == "LISTEN"]
        assert {(where.ip.removeprefix("::ffff:"), where.port) for where in listening} == {("127.0.0.1", port)}
        stranger = python(STRANGER, port)
        try:
            assert [host.wait(120) for host in both] == [-signal.SIGABRT] * 2
        finally:
            stranger.kill()
            stranger.communicate()
    with pytest.raises(SystemExit):
        launch.parse(["--help", "hosts"])
    assert "whoever reaches it can end the server on all hosts by one call" in " ".join(capsys.readouterr().out.split())
