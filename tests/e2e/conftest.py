"""The whole product on the demo checkpoint: one server in processes of its own, and one runner in this process.

All compile quickly (tests/conftest.py) and share a folder of programs. `test_company` compiles as servers do for users.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scripts.building.runner import Built, build_runner
from scripts.flags.settings import EngineSettings
from tests.conftest import COMPILED
from tests.server.support.judged import answers_are_valid, faults_of_answers  # noqa: F401, fixtures
from tests.server.support.requests import requests_end_with_their_test  # noqa: F401, a fixture
from tests.server.support.running import RunningServer

ROOT = Path(__file__).parents[2]
PREFIX = "pallas_serve:"
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512, "seed": 0}
ADMIN_KEY = "boss"


@pytest.fixture(scope="session")
def settings() -> EngineSettings:
    return EngineSettings(device="cpu", compile_cache=os.environ["JAX_COMPILATION_CACHE_DIR"], **LIMITS)


@pytest.fixture(scope="session")
def built(settings) -> Built:
    """The demo on a runner, compiled and warmed up. An engine is made over it anew by each test."""
    built = build_runner(settings, lambda line: None)
    built.engine().warm_up(lambda line: None)
    return built


class DemoServer(RunningServer):
    def metrics(self) -> dict[str, float]:
        """Every sample without labels of its own (a bucket, a reason), by name without the prefix."""
        with self.http() as http:
            families = text_string_to_metric_families(http.get("/metrics").text)
        return {
            sample.name.removeprefix(PREFIX): sample.value
            for family in families
            for sample in family.samples
            if sample.labels.keys() <= {"model_name", "engine"}
        }

    def wait_for_metrics(self, holds: Callable[[dict[str, float]], bool], timeout_s: float = 30) -> dict[str, float]:
        """The engine's readings are up to a second old: asks until they say what they must. TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not holds(metrics := self.metrics()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"still: {metrics}")
            time.sleep(0.05)
        return metrics


@contextlib.contextmanager
def serve(*flags: str, env: Mapping[str, str] | None = None, descriptors: int | None = None) -> Iterator[DemoServer]:
    """`python -m scripts.launch FLAGS`, until it is ready; what is left of it is killed.

    `env` is its environment, by default this process's. `descriptors`: as after `ulimit -n`.
    """
    command = [sys.executable, "-m", "scripts.launch", "--device", "cpu", "--port", "0", *flags]
    if descriptors is not None:
        command = ["bash", "-c", f'ulimit -n {descriptors} && exec "$@"', "bash", *command]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    server = DemoServer(process, admin_key=dict(pairwise(flags)).get("--admin-api-key"))
    with server.until_done(lambda line: line.split("curl ")[1].split("/v1")[0] if "curl http" in line else None):
        yield server


def serve_exported(*flags: str, **options: Any) -> contextlib.AbstractContextManager[DemoServer]:
    """`serve`, for a test whose flags change every program: they are kept for the next run of the test."""
    return serve("--compile-cache", str(COMPILED), *flags, **options)


@pytest.fixture(scope="session")
def engine_flags() -> list[str]:
    """What `scripts.launch`, `scripts.generate` and `tests.soak.__main__` take alike."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    return [*flags, "--compile-cache", os.environ["JAX_COMPILATION_CACHE_DIR"]]


@pytest.fixture(scope="session")
def server(engine_flags) -> Iterator[DemoServer]:
    """Shared by all tests that leave it as they found it. It ends cleanly on SIGTERM, after all they did to it."""
    with serve(*engine_flags, "--admin-api-key", ADMIN_KEY) as server:
        yield server
    assert server.process.returncode == 0
