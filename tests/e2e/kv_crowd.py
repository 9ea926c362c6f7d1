"""A crowd of requests whose prefixes do not fit on the device, for servers with K/V tiers, and what it is told.

The device has 40 pages. The prefixes have about ten times as many, so most of them are away when they are asked for
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from model.config import LlamaConfig
from model.loading.source import DEMO_FOLDER
from tests.c_compiler import compiler
from tests.e2e.conftest import ADMIN_KEY, DemoServer, serve_exported
from tests.server.support.requests import wait_until_idle

COMPLETIONS = "/v1/completions"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
GIB = 1 << 30
NUM_PAGES, PAGE_SIZE = 40, 16
POOL = [f"--num-pages={NUM_PAGES}", f"--page-size={PAGE_SIZE}", "--admin-api-key", ADMIN_KEY]
ADAPTERS = {name: DEMO_FOLDER / "adapters" / name for name in ("pirate", "almanac")}
NGRAM = '--speculative-config={"method": "ngram", "num_speculative_tokens": 3}'
SAVED, BROKEN = "kv_offload_saved_pages_total", "kv_offload_broken_pages_total"
IN_FILES, FROM_FILES = "kv_offload_pages disk", "kv_offload_loaded_pages_total disk"
IN_HOST, FROM_HOST = "kv_offload_pages host", "kv_offload_loaded_pages_total host"

# About ten pages each.
STORIES = [
    f"Once upon a time, there was a {size} {kind} named {name}. {name} lived in a {place} with many friends. Every day "
    f"{name} liked to walk to the {place} and look at the old trees. One day the {kind} saw a red ball under a tree. "
    f"{name} was very happy and wanted to play with the ball. But the ball belonged to a little boy, and the boy was "
    f"sad because he had lost it. So {name} took the ball and"
    for size, kind, name, place in (
        ("big", "dog", "Max", "garden"), ("little", "cat", "Lily", "park"), ("brave", "bird", "Tom", "forest"),
        ("small", "frog", "Ben", "house"), ("old", "bear", "Sam", "village"),
    )
]  # fmt: skip
COUNT = '{"text": "47 + 35 = 82.", "answer": 82}\n' * 8
ENDS = [" went", " said to the boy", " ran home", " asked a friend"]
COUNT_ENDS = ["", "{", '{"text"', '{"text": "47']  # what follows is drafted
GREEDY = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}


def _bodies() -> list[dict[str, Any]]:
    """60 requests. Each prefix is shared by a few of one model and salt; two of seven texts are drawn with a seed."""
    found = []
    for i in range(60):
        prompt = COUNT + COUNT_ENDS[i // 6 % 4] if i % 6 == 5 else STORIES[i % 6] + ENDS[i // 6 % 4]
        body = GREEDY | {"model": ["demo", "pirate", "almanac"][i // 6 % 3], "prompt": prompt}
        if i % 7 < 2:
            body |= {"temperature": 0.8, "seed": i}
        if i % 5 == 4:
            body |= {"cache_salt": "ab"[i % 2]}
        found.append(body)
    Random(0).shuffle(found)
    return found


BODIES = _bodies()


def pages_gib(count: float) -> str:
    """A flag's value that has room for so many pages of K/V in float32, and not for half as many more."""
    config = LlamaConfig.from_file(DEMO_FOLDER)
    page_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4 * PAGE_SIZE
    return f"{1.1 * count * page_bytes / GIB:.6f}"


def in_files(folder: Path, host_pages: float = 50, file_pages: float = 2000) -> list[str]:
    """Files behind a host's memory that holds few pages."""
    bounds = [f"--kv-offloading-size={pages_gib(host_pages)}", f"--kv-offloading-disk={pages_gib(file_pages)}"]
    return [*bounds, f"--kv-offloading-path={folder}"]


@cache
def texts(flags: tuple[str, ...]) -> list[str]:
    """Of each request: computed anew, alone and by a server without tiers. They do not depend on other rows in C."""
    compiler()
    with serve_exported(*flags) as server, server.http(headers=ADMIN) as http:
        return [text_alone(http, body) for body in BODIES]


def flags_of(engine_flags: Sequence[str]) -> list[str]:
    """Of a server without tiers."""
    modules = [f"{name}={path}" for name, path in ADAPTERS.items()]
    return [*engine_flags, *POOL, "--enable-lora", "--max-loras=2", "--lora-modules", *modules]


def text_of(http: httpx.Client, body: dict[str, Any]) -> str:
    answer = http.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def text_alone(http: httpx.Client, body: dict[str, Any]) -> str:
    assert http.post("/reset_prefix_cache?reset_external=true").status_code == 200
    return text_of(http, body)


def crowd(server: DemoServer, bodies: Sequence[dict[str, Any]] = BODIES) -> list[str]:
    """The texts of all requests, sent at once."""
    limits = httpx.Limits(max_connections=None)
    with server.http(limits=limits) as http, ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: text_of(http, body), bodies))


def counts(server: DemoServer) -> dict[str, float]:
    """Every sample by its name without the prefix; those of a tier have it after their names."""
    with server.http() as http:
        families = list(text_string_to_metric_families(http.get("/metrics").text))
    samples = [sample for family in families for sample in family.samples if "le" not in sample.labels]
    return {" ".join([s.name.rpartition(":")[2], *filter(None, [s.labels.get("tier")])]): s.value for s in samples}


def healthy(server: DemoServer) -> dict[str, float]:
    """The counts of a server that has become idle, whose books are in order."""
    wait_until_idle(server)
    found = counts(server)
    assert found["num_compiles_after_warm_up_total"] == found["integrity_failures_total"] == 0
    assert found["failed_steps_total"] == found["corrupted_requests_total"] == 0
    return found


def wait_for(server: DemoServer, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Until the counts, with those of tiers, say so."""
    server.wait_for_metrics(lambda _: holds(counts(server)), 60)
    return counts(server)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def filled(folder: Path, flags: Sequence[str]) -> list[Path]:
    """The files that a server has left, which has ended."""
    with serve_exported(*flags, *in_files(folder)) as server:
        crowd(server)
        wait_for(server, lambda counts: counts[IN_FILES] > 2 * NUM_PAGES)
        healthy(server)
    assert server.process.returncode == 0
    return files_of(folder)
