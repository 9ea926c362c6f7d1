"""Two replicas of the demo on Ray Serve: they come with load, and one is killed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import aiohttp
import psutil
import pytest
from openai import NotFoundError, OpenAI

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'ray[serve]==2.60.0'"
    ),
]
ROOT = Path(__file__).parents[2]
START_S, LOAD_S = 300, 180
ENDED = "ended"  # in place of a line of the driver


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of the application, from one replica to two. A cold start compiles the demo's programs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    limits = "--max-num-seqs 16 --max-num-batched-tokens 32 --max-model-len 512"
    flags = f"--device cpu {limits} --compile-cache {os.environ['JAX_COMPILATION_CACHE_DIR']}"
    options = {"flags": flags, "amount": "0.5", "max_replicas": "2", "target_ongoing_requests": "3"}
    command = [sys.executable, "-m", "tests.e2e.ray_driver", str(port), *(f"{k}={v}" for k, v in options.items())]
    env = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert driver.stdin is not None and driver.stdout is not None
        reader = threading.Thread(target=_read, args=(driver.stdout, lines))
        reader.start()
        family = psutil.Process(driver.pid)
        try:
            while not (line := lines.get(timeout=START_S)).startswith("ready"):
                assert line != ENDED, "the driver has ended"
            yield f"http://127.0.0.1:{port}"
            children = family.children(recursive=True)
            driver.stdin.close()
            assert driver.wait(60) == 0
            _, alive = psutil.wait_procs(children, 20)
            assert alive == [], "processes are left"
        finally:
            if driver.poll() is None:
                for process in [*family.children(recursive=True), family]:
                    process.kill()
            reader.join()


def _read(output: TextIO, lines: queue.SimpleQueue[str]) -> None:
    for line in output:
        lines.put(line)
    lines.put(ENDED)


@dataclass
class Stream:
    """What a client saw of one streamed completion."""

    replica: str = ""
    status: int = 0
    num_events: int = 0
    is_done: bool = False
    error: str = ""


async def complete(session: aiohttp.ClientSession, url: str, prompt: str, max_tokens: int, stream: Stream) -> Stream:
    body: dict[str, Any] = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens}
    body |= {"stream": True, "ignore_eos": True, "temperature": 0}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        stream.status, stream.replica = response.status, response.headers.get("x-replica", "")
        async for line in response.content:
            stream.is_done |= line.startswith(b"data: [DONE]")
            stream.num_events += line.startswith(b"data: {")
            if line.startswith(b'data: {"error"'):
                stream.error = line.decode()
    return stream


def session(number: int) -> str:
    """The begin of its prompts."""
    return f"Session {number}: {'count ' * 100}"


def test_requests_pass_unchanged(url):
    question: list[Any] = [{"role": "user", "content": "What is 47 + 35?"}]
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="demo", messages=question)
        assert answer.choices[0].message.content == "47 + 35 = 82."
        chunks = client.chat.completions.create(model="demo", messages=question, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "47 + 35 = 82."
        with pytest.raises(NotFoundError, match="does not exist"):
            client.chat.completions.create(model="other", messages=question)


def test_replicas_come_with_load_and_one_may_be_killed(url):
    asyncio.run(asyncio.wait_for(_scale_and_kill(url), START_S + LOAD_S))


async def _scale_and_kill(url: str) -> None:
    replicas: set[str] = set()
    begin = time.monotonic()
    async with aiohttp.ClientSession() as http:

        async def keep_busy(i: int) -> None:
            while len(replicas) < 2 and time.monotonic() - begin < LOAD_S:
                done = await complete(http, url, f"Session {i}: count from {i}", 80, Stream())
                assert done.is_done, done
                replicas.add(done.replica)

        await asyncio.gather(*(keep_busy(i) for i in range(10)))
        assert len(replicas) == 2, "no second replica came"

        places: dict[int, set[str]] = {i: set() for i in range(16)}
        for turn in range(3):
            prompts = [f"{session(i)} turn {turn}" for i in places]
            again = await asyncio.gather(*(complete(http, url, prompt, 2, Stream()) for prompt in prompts))
            for i, done in enumerate(again):
                places[i].add(done.replica)
        moved = [i for i, place in places.items() if len(place) > 1]
        assert len(moved) <= 2, f"prefixes have moved, for which a replica must have been ahead: {moved}"
        assert len(set.union(*places.values())) == 2

        victim = sorted(replicas)[0]
        own = [[i for i, place in places.items() if place == {replica}] for replica in replicas]
        streams = {i: Stream() for sessions in own for i in sessions[:6]}
        running = [asyncio.create_task(complete(http, url, session(i), 300, stream)) for i, stream in streams.items()]
        while not all(stream.num_events > 2 for stream in streams.values()):  # every stream has begun
            await asyncio.sleep(0.01)
        assert {stream.replica for stream in streams.values()} == replicas
        pid = int(victim.split("/")[1])
        engine = psutil.Process(pid).children(recursive=True)
        os.kill(pid, signal.SIGKILL)
        late = [complete(http, url, f"Late {i}", 5, Stream()) for i in range(8)]
        answered = await asyncio.gather(*late)
        assert all(done.status == 200 and done.is_done for done in answered), answered
        await asyncio.gather(*running)
        for stream in streams.values():
            if stream.replica == victim:
                assert "The replica was lost." in stream.error
                assert not stream.is_done
            else:
                assert stream.is_done
                assert not stream.error
        _, alive = psutil.wait_procs(engine, 20)
        assert alive == [], "the engine of the killed replica is left"
