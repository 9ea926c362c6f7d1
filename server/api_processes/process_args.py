"""The arguments of an HTTP process, and the names of its sockets."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from server.settings import Settings
from server.shared_counts import SharedCounts

BUS = "bus"  # the name of the parent's socket


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessArgs:
    """The arguments of one HTTP process among several."""

    settings: Settings
    listener: socket.socket
    number: int  # its row of the shared counts
    api_server: int  # no other process has had this number
    replaces: bool  # whether it takes the place of a process that has ended
    engines: Sequence[str]  # the addresses at which the engines take commands
    folder: Path  # has the private sockets
    shared_counts: SharedCounts
    log_level: int
    is_logging: bool  # whether the parent's log is configured


def events_name(engine: int, api_server: int) -> str:
    """The name of the socket for an engine's events to a process."""
    return f"e{engine}-{api_server}"
