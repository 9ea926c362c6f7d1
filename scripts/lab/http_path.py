"""What the HTTP process costs per streamed token: the real server over an engine that draws its tokens in no time.

    python -m scripts.lab http_path [--streams 64 256] [--tokens 400] [--tokens-per-s 20000] [--api-server-count 2]

The engine's steps come at the pace that gives `--tokens-per-s` over all streams. If the HTTP process keeps up, a stream
gets every token in an event of its own, soon after its step; if it does not, events hold several tokens. Prints the
tokens/s that arrived, events per token, CPU time per token of the HTTP processes and of the engine's process, and the
time from a request to its first event: of the streams, which all begin at once, and of further requests of one token
that arrive while they run. The engine answers a request's first token at once. The client is this process: raw sockets
in one epoll loop, which counts events in the bytes and parses nothing. Its CPU time is printed, too.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import select
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from scripts.lab.instant_engine import InstantConfig
from scripts.lab.tables import Table, say, say_head
from server.flag import EachCounts
from server.main import run
from server.settings import Settings
from server.text.tokenizer import ByteLevelTokenizer

ENGINE = "scripts.lab.instant_engine:build"
TOKENIZER = Path(__file__).parents[2] / "model/demo"
TEXT = "The sum of 47 and 35 is 82. Once upon a time there was a small town by the sea."
TIMEOUT_S = 120.0
PROBE_EVERY_S = 0.05
EVENT, END = b"data: {", b"data: [DONE]\n\n"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One run."""

    streams: int
    tokens_per_s: float
    events_per_token: float
    http_us: float  # CPU time per token, of all HTTP processes and of their parent
    http_shares: list[float]  # each HTTP process's part of it
    engine_us: float
    client_us: float
    first_ms: float  # median, from a request to its first event
    first_meanwhile_ms: float  # median, of requests that arrive while the streams run


@contextmanager
def serving(config: InstantConfig, api_servers: int) -> Iterator[tuple[str, int, int]]:
    """Runs the server in processes of its own. Gives its host, its port and the id of its first process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, config, api_servers))
    process.start()
    try:
        if not ours.poll(TIMEOUT_S):
            raise RuntimeError("the server did not start in time")
        address = urlsplit(ours.recv())
        assert address.hostname is not None and address.port is not None and process.pid is not None
        yield address.hostname, address.port, process.pid
    finally:
        process.terminate()
        process.join(TIMEOUT_S)


def _serve(ready: Connection, config: InstantConfig, api_servers: int) -> None:
    settings = Settings(
        tokenizer_folder=TOKENIZER,
        model_names=("instant",),
        port=0,
        grace_period_s=1.0,
        api_server_count=api_servers,
    )
    sys.exit(run(settings, ENGINE, config, report=lambda line: None, on_ready=ready.send))


def measure(streams: int, tokens: int, tokens_per_s: float, api_servers: int = 1) -> Figures:
    """Streams `tokens` tokens to each of so many clients at once, through so many HTTP processes."""
    tokenizer = ByteLevelTokenizer.from_folder(TOKENIZER)
    text = tuple(tokenizer.encode_plain([TEXT])[0])
    config = InstantConfig(
        text=text, steps_per_s=tokens_per_s / streams, max_model_len=tokens + 100, vocab_size=len(tokenizer.token_bytes)
    )
    with serving(config, api_servers) as (host, port, pid):
        request = _request(tokens)
        first = psutil.Process(pid)
        spawned = [child for child in first.children() if "spawn_main" in " ".join(child.cmdline())]
        engine, *others = sorted(spawned, key=lambda child: (child.create_time(), child.pid))
        https = [first, *others]  # with several HTTP processes the first is their parent
        clients = [_Client(host, port) for _ in range(streams)]
        _run([clients[0]], request, [])  # warm
        probes: list[_Client] = []
        clients[0] = _Client(host, port)
        before = [_cpu_s(engine), time.process_time(), *map(_cpu_s, https)]
        started = time.perf_counter()
        _run(clients, request, probes)
        seconds = time.perf_counter() - started
        after = [_cpu_s(engine), time.process_time(), *map(_cpu_s, https)]
    count = streams * tokens
    engine_us, client_us, *https_us = ((b - a) / count * 1e6 for a, b in zip(before, after, strict=True))
    return Figures(
        streams=streams,
        tokens_per_s=count / seconds,
        events_per_token=sum(client.num_events for client in clients) / count,
        http_us=sum(https_us),
        http_shares=https_us,
        engine_us=engine_us,
        client_us=client_us,
        first_ms=_first_ms(clients),
        first_meanwhile_ms=_first_ms(probes) if probes else math.nan,
    )


class _Client:
    def __init__(self, host: str, port: int) -> None:
        self.address = (host, port)
        self.socket = socket.create_connection(self.address)
        self.num_events = 0
        self.sent_s = self.first_s = 0.0
        self.tail = b""  # of what was read: an event may begin in it

    def send(self, request: bytes) -> None:
        self.sent_s = time.perf_counter()
        self.socket.sendall(request)

    def read(self) -> bool:
        """Reads what has come. Returns whether the stream has ended."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise RuntimeError("the server closed a stream before its end")
        joined = self.tail + data
        self.tail = joined[-len(END) :]
        count = joined.count(EVENT) - (joined[: len(joined) - len(data)].count(EVENT))
        if count and not self.num_events:
            self.first_s = time.perf_counter()
        self.num_events += count
        return END in joined


def _first_ms(clients: list[_Client]) -> float:
    return statistics.median(client.first_s - client.sent_s for client in clients) * 1e3


def _run(clients: list[_Client], request: bytes, probes: list[_Client]) -> None:
    """Sends the request by every client and reads all streams to their ends. Meanwhile it sends PROBE now and then, by
    new clients, which it adds to `probes`."""
    poll = select.epoll()
    by_descriptor = {client.socket.fileno(): client for client in clients}
    for descriptor, client in by_descriptor.items():
        poll.register(descriptor, select.EPOLLIN)
        client.send(request)
    deadline = time.monotonic() + TIMEOUT_S
    num_open = len(clients)
    next_probe = time.monotonic() + PROBE_EVERY_S
    while num_open:
        if time.monotonic() >= next_probe:
            next_probe += PROBE_EVERY_S
            probe = _Client(*clients[0].address)
            by_descriptor[probe.socket.fileno()] = probe
            poll.register(probe.socket, select.EPOLLIN)
            probe.send(_request(1))
            probes.append(probe)
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(by_descriptor)} streams have not ended in {TIMEOUT_S:g} s")
        for descriptor, _ in poll.poll(PROBE_EVERY_S):
            if by_descriptor[descriptor].read():
                poll.unregister(descriptor)
                client = by_descriptor.pop(descriptor)
                client.socket.close()
                num_open -= client in clients
    for probe in by_descriptor.values():
        probe.socket.close()
        probes.remove(probe)
    poll.close()


def _request(tokens: int) -> bytes:
    body = json.dumps({"model": "instant", "prompt": "a", "max_tokens": tokens, "stream": True, "ignore_eos": True})
    return f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", action=EachCounts, default=[64, 256])
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--api-server-count", type=int, default=1, help="HTTP processes")
    parser.add_argument("--tokens-per-s", type=float, default=20000, help="that the engine draws for all streams")
    args = parser.parse_args(argv)
    say_head()
    say("Microseconds of CPU per token; milliseconds to the first event, of all at once and of one meanwhile.\n")
    costs = {"HTTP us": "5.1f", "parent and each": "<", "engine us": "5.1f", "client us": "5.1f"}
    firsts = {"first of all, ms": "5.1f", "of one, ms": "5.1f"}
    table = Table({"streams": "5", "tokens/s": "7.0f", "events per token": "5.2f", **costs, **firsts}, say)
    for streams in args.streams:
        f = measure(streams, args.tokens, args.tokens_per_s, args.api_server_count)
        shares = " + ".join(f"{share:.1f}" for share in f.http_shares) if args.api_server_count > 1 else None
        own = f.http_us, shares, f.engine_us, f.client_us
        table.row(f.streams, f.tokens_per_s, f.events_per_token, *own, f.first_ms, f.first_meanwhile_ms)
    return 0
