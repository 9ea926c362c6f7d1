"""The settings of a cluster: the hosts of one engine, and their addresses."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

LEADER = 0  # the number of the leader's host
MIN_SECRET_CHARS = 16
# The leader's ports, counted from the coordinator's, which is JAX's own.
COMMANDS_OFFSET, REPORTS_OFFSET = 1, 2


class HostsError(ConnectionError):
    """The hosts of one engine cannot start together, or can no longer work together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The hosts of one engine, as this host sees them.

    The leader listens on three ports, at the coordinator's address only: `port` for `jax.distributed`, the next for
    commands to the followers, and the one after it for their reports.
    """

    coordinator: str  # the leader's name or address
    port: int
    num_hosts: int
    host_id: int  # 0: the leader
    timeout_s: float  # for all hosts to arrive at the start
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        if self.num_hosts < 2:
            raise ValueError(f"a cluster has at least two hosts: --num-hosts {self.num_hosts}")
        if not 0 <= self.host_id < self.num_hosts:
            raise ValueError(f"--host-id is from 0 to {self.num_hosts - 1}, not {self.host_id}")
        if not 0 < self.port <= 65535 - REPORTS_OFFSET:
            raise ValueError(f"--coordinator: port {self.port} and the two after it must be below 65536")
        if not self.timeout_s > 0:
            raise ValueError(f"--hosts-timeout must be above 0, not {self.timeout_s:g}")
        if len(self.secret) < MIN_SECRET_CHARS:
            raise ValueError(f"the hosts' secret has {len(self.secret)} characters; {MIN_SECRET_CHARS} are the least")

    @property
    def is_leader(self) -> bool:
        return self.host_id == LEADER

    def endpoint(self, offset: int = 0) -> str:
        """HOST:PORT of one of the leader's ports, for the followers. The name is not looked up here."""
        return f"{_bracketed(self.coordinator)}:{self.port + offset}"

    def own_endpoint(self, offset: int = 0) -> str:
        """IP:PORT of one of the leader's ports, for the leader to listen on. Raises HostsError if the coordinator's
        name is unknown."""
        try:
            found = socket.getaddrinfo(self.coordinator, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise HostsError(f"--coordinator {self.coordinator}: {error.strerror or error}") from error
        return f"{_bracketed(str(found[0][4][0]))}:{self.port + offset}"


class Inbox[T]:
    """A queue of items from one thread to another. A HostsError in it is raised by `next`."""

    def __init__(self) -> None:
        self._items: SimpleQueue[T | HostsError] = SimpleQueue()
        self.put = self._items.put

    def next(self, until: float | None = None) -> T | None:
        """Waits for the next item. Returns None at the time `until`. Raises a HostsError that was put in."""
        try:
            item = self._items.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
        except Empty:
            return None
        if isinstance(item, HostsError):
            raise item
        return item


def _bracketed(address: str) -> str:
    """The address, in brackets if it is IPv6, so that a port can follow."""
    return f"[{address}]" if ":" in address else address
