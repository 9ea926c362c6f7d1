"""Servers that a command starts and ends itself."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from scripts.flags.errors import FailedError
from scripts.lab.load.client import Target

ROOT = Path(__file__).parents[3]
READY = re.compile(r"^ready after (\d+\.\d) s: (\S+?)(?:/v1)?$")
FETCH_TIMEOUT_S = 120.0
BENCH = "bench"  # what requests call the model
METRICS_S = 1.2  # the age that a server's figures may have
TOKENS = "generation_tokens_total"


@contextmanager
def launched(*flags: str) -> Iterator[subprocess.Popen[str]]:
    """Our own server with these flags on a free port; its lines are to be read. It ends with the context."""
    command = [sys.executable, "-m", "scripts.launch", "--port", "0", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate()


@contextmanager
def server(*flags: str) -> Iterator[str]:
    """As `launched`: its address, once it is ready. Prints its lines. Raises FailedError if it ends before."""
    with launched(*flags) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if (found := READY.match(line)) is not None:
                yield found[2]
                return
    raise FailedError("the server ended before it was ready")


def fetch(url: str, body: Any = None) -> Any:
    """The JSON answer to a GET, or to a POST of `body`. Raises URLError if it is not 200."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=FETCH_TIMEOUT_S) as response:
        return json.load(response)


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
                said = log.read_text().strip().rpartition("\n")[2]
                raise FailedError(f"{name} did not come up: {said + '; ' if said else ''}see {log}")
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


@dataclass(frozen=True)
class Server:
    """A running server."""

    target: Target
    process: psutil.Process

    def counters(self) -> defaultdict[str, float]:
        """The figures of /metrics by their names without the prefix, those of all labels together. Names of those of
        one tier end with it, such as `kv_offload_pages disk`. Figures may be `METRICS_S` old."""
        found = defaultdict[str, float](float)
        with urllib.request.urlopen(f"{self.target.base_url}/metrics", timeout=FETCH_TIMEOUT_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        for sample in (sample for family in families for sample in family.samples):
            tier = sample.labels.get("tier")
            name = sample.name.rpartition(":")[2]
            found[f"{name} {tier}" if tier else name] += sample.value
        return found

    def counters_with(self, num_tokens: float) -> defaultdict[str, float]:
        """The figures as soon as they have so many generated tokens: however busy the machine is, none of what came
        before these is missing. Raises FailedError."""
        deadline = time.monotonic() + FETCH_TIMEOUT_S
        while (found := self.counters())[TOKENS] < num_tokens:
            if time.monotonic() > deadline:
                raise FailedError(f"{TOKENS} is {found[TOKENS]:.0f}, and should be {num_tokens:.0f}")
            time.sleep(METRICS_S / 4)
        return found


@contextmanager
def our_server(name: str, flags: Sequence[str], port: int, *, timeout_s: float) -> Iterator[Server]:
    """As `serving`: our own server with these flags. It calls its model `BENCH`."""
    launch = [sys.executable, "-m", "scripts.launch", "--port", str(port), "--served-model-name", BENCH]
    with serving(name, shlex.join([*launch, *flags]), port, timeout_s=timeout_s) as process:
        yield Server(Target(base_url=f"http://127.0.0.1:{port}", model=BENCH, ignore_eos=True), process)


def _is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


class ForeignLoad:
    """The number of cores that other processes than the bench and its server kept busy, from Linux's counters."""

    def __init__(self, server: psutil.Process) -> None:
        self._server = server
        self._started = time.perf_counter()
        self._before = self._busy() - self._own()

    def cores(self) -> float:
        """The cores that other processes kept busy, on average."""
        return max(0.0, (self._busy() - self._own() - self._before) / (time.perf_counter() - self._started))

    @staticmethod
    def _busy() -> float:
        times = psutil.cpu_times()
        return times.user + times.nice + times.system + times.irq + times.softirq

    def _own(self) -> float:
        family = [psutil.Process(), self._server, *self._server.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in family)
