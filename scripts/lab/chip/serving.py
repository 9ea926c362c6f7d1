"""A server in processes of its own, for the parts that measure it over HTTP."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

from scripts.lab.chip.options import ROOT

READY = re.compile(r"ready after .*: (http\S+)/v1$")
TIMEOUT_S = 120.0


@contextlib.contextmanager
def server(*flags: str) -> Iterator[str]:
    """`scripts/serve` with `flags` on a free port: its address, once it is ready. Its lines go to the log.

    Raises:
        RuntimeError: it ended before it was ready.
    """
    command = [sys.executable, "-m", "scripts.launch", "--port", "0", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield _address(process)
        finally:
            process.terminate()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if (found := READY.search(line.strip())) is not None:
            return found[1]
    raise RuntimeError("the server ended before it was ready: see the log")


def fetch(url: str, body: Any = None) -> Any:
    """The JSON answer to a GET, or to a POST of `body`. Raises URLError if it is not 200."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return json.load(response)
