"""A server under test: real processes, real sockets."""

from __future__ import annotations

import contextlib
import pickle
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from server.settings import Settings
from tests.server.support.forked import ForkedServer
from tests.server.support.sse_events import stream_events
from tests.server.support.tokenizers import write_folder

ROOT = Path(__file__).parents[3]
ECHO = "tests.server.support.echo_engine:build"
# By default each client reads the list of all authorities: 20 ms, and few servers here have a certificate.
NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@dataclass
class RunningServer:
    process: subprocess.Popen[str] | ForkedServer
    url: str = ""
    lines: list[str] = field(default_factory=list)  # what it printed until it was ready
    log_file: Path | None = None
    clients: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # closed when the server ends
    admin_key: str | None = None  # None: it has none

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.partition("://")[2].rpartition(":")
        return host, int(port)

    @contextlib.contextmanager
    def until_done(self, url_in: Callable[[str], str | None]) -> Iterator[None]:
        """Waits for the line that has the URL; in the end asks the server to go. TimeoutExpired where it does not."""
        try:
            for line in self.process.stdout:
                self.lines.append(line.strip())
                if (url := url_in(self.lines[-1])) is not None:
                    self.url = url
                    break
            else:
                raise RuntimeError(f"the server ended before it was ready: {self.lines}")
            yield
        finally:
            self.clients.close()
            if self.process.poll() is None:
                self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise
            finally:
                self.process.stdout.close()

    def client(self, **options: Any) -> openai.OpenAI:
        """A client that is closed with the server at the latest. The garbage collector would lose its sockets."""
        options = {"api_key": "none", "max_retries": 0, **options}
        if "http_client" not in options:
            options["http_client"] = openai.DefaultHttpxClient(verify=NO_AUTHORITIES)
        client = openai.OpenAI(base_url=f"{self.url}/v1", **options)
        self.clients.callback(client.close)
        return client

    def http(self, **options: Any) -> httpx.Client:
        """A plain client."""
        return httpx.Client(**{"base_url": self.url, "timeout": 60, "verify": NO_AUTHORITIES, **options})

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """By a client of its own."""
        with self.http() as http:
            return http.post(path, json=body)

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Of a streamed answer, by a client of its own."""
        with self.http() as http:
            return stream_events(http, path, body)

    def engine_process(self) -> psutil.Process:
        """The child that runs the engine, or the first one."""
        return self.engine_processes()[0]

    def engine_processes(self) -> list[psutil.Process]:
        """The children that run engines, in their order (another one tracks multiprocessing's resources)."""
        engines = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, and its parent does not know yet
                if "spawn_main" in " ".join(child.cmdline()):
                    engines.append((child.create_time(), child.pid, child))
        return [child for *_, child in sorted(engines, key=lambda engine: engine[:2])]


@contextlib.contextmanager
def running_server(
    folder: Path,
    target: str,
    engine_args: object,
    *,
    template: Any = ...,
    descriptors: Any = None,
    env: Any = None,
    more_engines: tuple[object, ...] = (),
    **settings: Any,
) -> Iterator[RunningServer]:
    """Starts it and waits until it is ready; kills what is left at the end. `stdout` lines before that are kept.

    What it writes to `stderr` is in `RunningServer.log`. `descriptors` are the soft and the hard limit of their number,
    `env` is its environment.
    """
    template_option = {} if template is ... else {"template": template}
    fields = {
        "tokenizer_folder": write_folder(folder / "model", **template_option),
        "model_names": ("test-model", "alias"),
        "port": 0,
        "version": "1.2.3",
        "grace_period_s": 5.0,
        "death_linger_s": 2.0,
        "admin_api_keys": ("of-the-tests",),
    }
    path = folder / "stderr"
    asked = Settings(**(fields | settings))
    served = (asked, target, engine_args)
    process: subprocess.Popen[str] | ForkedServer
    with path.open("a") as log:
        if descriptors is None:
            process = ForkedServer(pickle.dumps((*served, more_engines)), stderr=log, env=env)
        else:
            process = spawn(*served, descriptors=descriptors, more_engines=more_engines, stderr=log, env=env)
    server = RunningServer(process, log_file=path, admin_key=asked.admin_api_keys[0])
    with server.until_done(lambda line: line.removeprefix("ready: ") if line.startswith("ready: ") else None):
        yield server


def server_of(engine_args: object, *, target: str = ECHO, scope: Any = "module", **settings: Any) -> Any:
    """A fixture: one server for all tests of its scope."""

    @pytest.fixture(scope=scope)
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
        with running_server(tmp_path_factory.mktemp("server"), target, engine_args, **settings) as running:
            yield running

    return server


def spawn(
    settings: Settings,
    target: str,
    engine_args: object,
    *,
    descriptors: tuple[int, int] | None = None,
    more_engines: tuple[object, ...] = (),
    **options: Any,
) -> subprocess.Popen[str]:
    message = pickle.dumps((settings, target, engine_args, more_engines)).hex()
    command = [sys.executable, "-m", "tests.server.support.launch", message]
    if descriptors is not None:  # by a shell: a function that runs between fork and exec does not go with jax's threads
        soft, hard = descriptors
        command = ["bash", "-c", f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"', "bash", *command]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)
