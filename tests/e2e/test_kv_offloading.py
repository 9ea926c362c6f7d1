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
from tests.e2e import kv_crowd as kv
from tests.e2e.conftest import DemoServer, serve_exported
from tests.e2e.kv_faults import COUNTED, FAULTS, FaultyRun

NUM_REQUESTS = int(os.environ.get("KV_FAULTS_REQUESTS", "400"))

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def flags(engine_flags) -> list[str]:
    return kv.flags_of(engine_flags)


@pytest.fixture(scope="module")
def told(flags) -> list[str]:
    return kv.texts(tuple(flags))


@pytest.fixture(scope="module", params=[[], [kv.NGRAM]], ids=["plain", "drafts"])
def tiered(flags, request) -> Iterator[tuple[DemoServer, bool]]:
    """A server that keeps all pages in the host's memory, and whether it drafts."""
    with serve_exported(*flags, *request.param, f"--kv-offloading-size={kv.pages_gib(1000)}") as server:
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
    assert kv.crowd(server) == told
    before = kv.healthy(server)
    assert kv.crowd(server) == told
    with server.http() as http:  # alone, so that there is time for drafts
        assert [kv.text_of(http, body) for body in kv.BODIES[:20]] == told[:20]
    after = kv.healthy(server)
    assert before[kv.SAVED] > kv.NUM_PAGES
    assert after[kv.FROM_HOST] - before[kv.FROM_HOST] > kv.NUM_PAGES
    assert after["external_prefix_cache_hits_total"] - before["external_prefix_cache_hits_total"] > kv.NUM_PAGES
    assert after["external_prefix_cache_queries_total"] >= after["external_prefix_cache_hits_total"]
    assert after[kv.BROKEN] == 0
    assert drafts == (after["spec_decode_num_accepted_tokens_total"] > 0)


def test_requests_that_end_while_their_pages_come_leave_nothing_behind(tiered, told):
    """Every other client goes at once, or after the first chunk."""
    server, _ = tiered
    kv.crowd(server)

    def ask(number: int) -> str | None:
        body = kv.BODIES[number]
        if number % 2 == 0:
            return kv.text_of(http, body)
        with contextlib.suppress(httpx.ReadTimeout):
            timeout = httpx.Timeout(60, read=0.02 * (1 + number % 7) if number % 4 == 1 else 60)
            with http.stream("POST", kv.COMPLETIONS, json=body | {"stream": True}, timeout=timeout) as answer:
                next(answer.iter_lines())
        return None

    limits = httpx.Limits(max_connections=None)
    with server.http(limits=limits) as http, ThreadPoolExecutor(60) as pool:
        found = list(pool.map(ask, range(60)))
    assert found[::2] == told[::2]
    kv.healthy(server)
    assert kv.crowd(server) == told


def test_pages_of_eight_bits_come_back_with_their_scales(engine_flags, folder):
    flags = [*engine_flags, *kv.POOL, "--kv-cache-dtype=int8"]
    bodies = [body for body in kv.BODIES if body["model"] == "demo"]
    with serve_exported(*flags) as plain, plain.http(headers=kv.ADMIN) as http:
        told = [kv.text_alone(http, body) for body in bodies]
    with serve_exported(*flags, *kv.in_files(folder, host_pages=20)) as server:
        assert [kv.crowd(server, bodies) for _ in range(2)] == [told, told]
        assert kv.healthy(server)[kv.FROM_HOST] > 0


def test_a_server_that_was_killed_leaves_files_that_the_next_one_serves(flags, told, folder):
    """With -9 and in the middle of writes."""
    own = [*flags, *kv.in_files(folder)]
    with serve_exported(*own) as server, ThreadPoolExecutor(60) as pool, server.http() as http:
        asked = [pool.submit(kv.text_of, http, body) for body in kv.BODIES]
        kv.wait_for(server, lambda counts: counts[kv.IN_FILES] > 0)
        engine = server.engine_process()
        engine.kill()
        server.process.kill()
        for future in asked:
            with contextlib.suppress(httpx.HTTPError, AssertionError):  # some have ended before
                future.result(60)
        gone, _ = psutil.wait_procs([engine], 30)
        assert gone
    with serve_exported(*own) as server:
        assert kv.crowd(server) == told
        kv.wait_for(server, lambda counts: counts[kv.IN_FILES] > 2 * kv.NUM_PAGES)
        assert kv.healthy(server)[kv.BROKEN] == 0
    with serve_exported(*own) as server:
        assert kv.crowd(server) == told
        assert kv.healthy(server)[kv.FROM_FILES] > 0


def test_files_of_other_weights_are_not_read(flags, folder, tmp_path):
    """The other model has the shapes of the demo, so the programs and the digests of pages are the same."""
    kv.filled(folder, flags)
    model = tmp_path / "model"
    shutil.copytree(DEMO_FOLDER, model)
    tensors = load_file(model / "model.safetensors")
    tensors = {name: tensor * 1.125 if "k_proj" in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    own = [*flags, "--model", str(model), "--served-model-name", "demo"]
    bodies = [body for body in kv.BODIES if body["model"] == "demo"]
    with serve_exported(*own) as plain, plain.http(headers=kv.ADMIN) as http:
        told = [kv.text_alone(http, body) for body in bodies]
    with serve_exported(*own, *kv.in_files(folder, host_pages=1000)) as server:
        assert kv.crowd(server, bodies) == told
        assert kv.healthy(server)[kv.FROM_FILES] == 0


def test_no_text_is_wrong_whatever_becomes_of_servers_and_files(flags, told, folder):
    """`KV_FAULTS_REQUESTS=10000` and `-s` make it longer, and say what has happened."""
    own = [*flags, *kv.in_files(folder, file_pages=300)]
    run = FaultyRun(told, folder, NUM_REQUESTS, of_a_server=max(100, NUM_REQUESTS // 20))
    while not run.is_done:
        with serve_exported(*own) as server:
            run.load(server)
        print(dict(sorted(run.counts.items())))
    assert not run.wrong
    assert run.counts["answers"] == NUM_REQUESTS
    assert {*FAULTS, *COUNTED, "killed", "ended"} <= run.counts.keys()
    assert run.counts[kv.FROM_FILES] > 0 < run.counts[kv.BROKEN]
