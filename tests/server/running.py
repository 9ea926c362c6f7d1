"""A server under test: real processes, real sockets."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from server.settings import Settings
from tests.server.tokenizers import write_folder

ROOT = Path(__file__).parents[2]
ECHO = "tests.server.echo_engine:build"


@dataclass
class RunningServer:
    process: subprocess.Popen[str]
    url: str
    lines: list[str] = field(default_factory=list)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **options})

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)

    def engine_process(self) -> psutil.Process:
        """The child that runs the engine (the other one tracks multiprocessing's resources)."""
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if "spawn_main" in " ".join(child.cmdline()))


@contextlib.contextmanager
def running_server(
    folder: Path, target: str, engine_args: object, *, template: Any = ..., **settings: Any
) -> Iterator[RunningServer]:
    """Starts it and waits until it is ready; kills what is left at the end. `stdout` lines before that are kept."""
    template_option = {} if template is ... else {"template": template}
    fields = {
        "tokenizer_folder": write_folder(folder / "model", **template_option),
        "model_names": ("test-model", "alias"),
        "port": 0,
        "version": "1.2.3",
        "grace_period_s": 5.0,
        "death_linger_s": 2.0,
    }
    process = spawn(Settings(**(fields | settings)), target, engine_args)
    try:
        server = RunningServer(process, "")
        for line in process.stdout:
            server.lines.append(line.strip())
            if line.startswith("ready: "):
                server.url = line.removeprefix("ready: ").strip()
                break
        else:
            raise RuntimeError(f"the server ended before it was ready: {server.lines}")
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def spawn(settings: Settings, target: str, engine_args: object, **options: Any) -> subprocess.Popen[str]:
    message = pickle.dumps((settings, target, engine_args)).hex()
    command = [sys.executable, "-m", "tests.server.launch", message]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)
