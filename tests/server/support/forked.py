"""Servers that are forks of one process (`forking.py`), which starts with the first of them and ends with the tests."""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[3]


class ForkedServer:
    """The part of `subprocess.Popen` that the tests use. `message` is that of `launch.serve`."""

    def __init__(self, message: bytes, *, stderr: IO[str], env: Mapping[str, str] | None) -> None:
        from_tests, to_server = os.pipe()
        output, stdout = os.pipe()
        status, told = os.pipe()
        socket.send_fds(_forking(), [b"x"], [from_tests, stdout, stderr.fileno(), told])
        for descriptor in (from_tests, stdout, told):
            os.close(descriptor)
        with open(to_server, "wb") as file:
            pickle.dump((dict(os.environ if env is None else env), message), file)
        self.stdout = os.fdopen(output)
        self._status = os.fdopen(status)
        self.pid = int(self._status.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, a negative signal where one ended it, or None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"the server with the process id {self.pid}", timeout)
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _forking() -> socket.socket:
    """The way to the process that forks."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.server.support.forking", str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])

    def end() -> None:
        ours.close()
        process.wait(60)

    atexit.register(end)
    return ours
