"""What an HTTP process gets when it is started, and where it is reached."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from server.board import Board
from server.settings import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """One HTTP process among several."""

    settings: Settings
    listener: socket.socket
    number: int  # its row of the board
    door: int  # no other process has had this number
    replaces: bool  # whether it takes the place of a process that has ended
    engines: Sequence[str]  # the addresses at which they take commands
    folder: Path  # of the private sockets
    board: Board
    log_level: int
    is_logging: bool  # whether the parent's log is configured


def socket_name(door: int) -> str:
    """The name of a process's private socket."""
    return f"h{door}"


def events_name(engine: int, door: int) -> str:
    """The name of the socket for what an engine tells a process."""
    return f"e{engine}-{door}"
