"""Servers that a command starts and ends itself."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from scripts.flags.errors import FailedError


@contextmanager
def serving(name: str, command: str, port: int, *, timeout_s: float) -> Iterator[psutil.Process]:
    """Runs a shell command that serves on `port`, and waits until it is ready. Its output is in the system's
    temporary folder. Its process group ends with the context. Raises FailedError if it does not become ready."""
    log = Path(tempfile.gettempdir()) / f"bench-{name}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + timeout_s
        while not _is_up(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise FailedError(f"{name} did not come up: see {log}")
            time.sleep(0.5)
        yield psutil.Process(process.pid)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
