"""K/V pages of the demo that leave the device and come back, behind a real server: the texts are those of a server
without tiers, whatever its requests, weights and adapters do, and whatever becomes of the server and of its files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from model.loading.source import DEMO_FOLDER
from tests.e2e.conftest import DemoServer, serve_exported
from tests.e2e.kv_crowd import (
    ADMIN,
    BODIES,
    BROKEN,
    COMPLETIONS,
    FROM_FILES,
    FROM_HOST,
    IN_FILES,
    NGRAM,
    NUM_PAGES,
    POOL,
    SAVED,
    crowd,
    filled,
    flags_of,
    healthy,
    in_files,
    pages_gib,
    text_alone,
    text_of,
    texts,
    wait_for,
)
from tests.e2e.kv_faults import COUNTED, FAULTS, FaultyRun

NUM_REQUESTS = int(os.environ.get("KV_FAULTS_REQUESTS", "400"))

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def flags(engine_flags) -> list[str]:
    return flags_of(engine_flags)


@pytest.fixture(scope="module")
def told(flags) -> list[str]:
    return texts(tuple(flags))


@pytest.fixture(scope="module", params=[[], [NGRAM]], ids=["plain", "drafts"])
def tiered(flags, request) -> Iterator[tuple[DemoServer, bool]]:
    """A server that keeps all pages in the host's memory, and whether it drafts."""
    with serve_exported(*flags, *request.param, f"--kv-offloading-size={pages_gib(1000)}") as server:
        yield server, bool(request.param)
    assert server.process.returncode == 0


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "pages"
    path.mkdir(mode=0o700)
    return path


def test_a_crowd_gets_the_texts_of_a_server_without_tiers(tiered, told):
    """Twice: the second time, what the first has computed is in the host's memory."""
    server, drafts = tiered
    assert crowd(server) == told
    before = healthy(server)
    assert crowd(server) == told
    with server.http() as http:  # alone, so that there is time for drafts
        assert [text_of(http, body) for body in BODIES[:20]] == told[:20]
    after = healthy(server)
    assert before[SAVED] > NUM_PAGES
    assert after[FROM_HOST] - before[FROM_HOST] > NUM_PAGES
    assert after["external_prefix_cache_hits_total"] - before["external_prefix_cache_hits_total"] > NUM_PAGES
    assert after["external_prefix_cache_queries_total"] >= after["external_prefix_cache_hits_total"]
    assert after[BROKEN] == 0
    assert drafts == (after["spec_decode_num_accepted_tokens_total"] > 0)


def test_requests_that_end_while_their_pages_come_leave_nothing_behind(tiered, told):
    """Every other client goes at once, or after the first chunk."""
    server, _ = tiered
    crowd(server)

    def ask(number: int) -> str | None:
        body = BODIES[number]
        if number % 2 == 0:
            return text_of(http, body)
        with contextlib.suppress(httpx.ReadTimeout):
            timeout = httpx.Timeout(60, read=0.02 * (1 + number % 7) if number % 4 == 1 else 60)
            with http.stream("POST", COMPLETIONS, json=body | {"stream": True}, timeout=timeout) as answer:
                next(answer.iter_lines())
        return None

    limits = httpx.Limits(max_connections=None)
    with server.http(limits=limits) as http, ThreadPoolExecutor(60) as pool:
        found = list(pool.map(ask, range(60)))
    assert found[::2] == told[::2]
    healthy(server)
    assert crowd(server) == told


def test_pages_of_eight_bits_come_back_with_their_scales(engine_flags, folder):
    flags = [*engine_flags, *POOL, "--kv-cache-dtype=int8"]
    bodies = [body for body in BODIES if body["model"] == "demo"]
    with serve_exported(*flags) as plain, plain.http(headers=ADMIN) as http:
        told = [text_alone(http, body) for body in bodies]
    with serve_exported(*flags, *in_files(folder, host_pages=20)) as server:
        assert [crowd(server, bodies) for _ in range(2)] == [told, told]
        assert healthy(server)[FROM_HOST] > 0


def test_a_server_that_was_killed_leaves_files_that_the_next_one_serves(flags, told, folder):
    """With -9 and in the middle of writes."""
    own = [*flags, *in_files(folder)]
    with serve_exported(*own) as server, ThreadPoolExecutor(60) as pool, server.http() as http:
        asked = [pool.submit(text_of, http, body) for body in BODIES]
        wait_for(server, lambda counts: counts[IN_FILES] > 0)
        engine = server.engine_process()
        engine.kill()
        server.process.kill()
        for future in asked:
            with contextlib.suppress(httpx.HTTPError, AssertionError):  # some have ended before
                future.result(60)
        gone, _ = psutil.wait_procs([engine], 30)
        assert gone
    with serve_exported(*own) as server:
        assert crowd(server) == told
        wait_for(server, lambda counts: counts[IN_FILES] > 2 * NUM_PAGES)
        assert healthy(server)[BROKEN] == 0
    with serve_exported(*own) as server:
        assert crowd(server) == told
        assert healthy(server)[FROM_FILES] > 0


def test_files_of_other_weights_are_not_read(flags, folder, tmp_path):
    """The other model has the shapes of the demo, so the programs and the digests of pages are the same."""
    filled(folder, flags)
    model = tmp_path / "model"
    shutil.copytree(DEMO_FOLDER, model)
    tensors = load_file(model / "model.safetensors")
    tensors = {name: tensor * 1.125 if "k_proj" in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    own = [*flags, "--model", str(model), "--served-model-name", "demo"]
    bodies = [body for body in BODIES if body["model"] == "demo"]
    with serve_exported(*own) as plain, plain.http(headers=ADMIN) as http:
        told = [text_alone(http, body) for body in bodies]
    with serve_exported(*own, *in_files(folder, host_pages=1000)) as server:
        assert crowd(server, bodies) == told
        assert healthy(server)[FROM_FILES] == 0


def test_no_text_is_wrong_whatever_becomes_of_servers_and_files(flags, told, folder):
    """`KV_FAULTS_REQUESTS=10000` and `-s` make it longer, and say what has happened."""
    own = [*flags, *in_files(folder, file_pages=300)]
    run = FaultyRun(told, folder, NUM_REQUESTS, of_a_server=max(100, NUM_REQUESTS // 20))
    while not run.is_done:
        with serve_exported(*own) as server:
            run.load(server)
        print(dict(sorted(run.counts.items())))
    assert not run.wrong
    assert run.counts["answers"] == NUM_REQUESTS
    assert {*FAULTS, *COUNTED, "killed", "ended"} <= run.counts.keys()
    assert run.counts[FROM_FILES] > 0 < run.counts[BROKEN]
