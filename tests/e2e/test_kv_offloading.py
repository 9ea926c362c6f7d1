"""K/V pages of the demo that leave the device and come back, behind a real server: the texts are those of a server
without tiers, whatever its requests, weights and adapters do. Files: tests/e2e/test_kv_files.py.
"""

from __future__ import annotations

import contextlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import serve_exported
from tests.e2e.kv_crowd import (
    ADAPTERS,
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

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def flags(engine_flags) -> list[str]:
    return flags_of(engine_flags)


@pytest.fixture(scope="module")
def told(flags) -> list[str]:
    return texts(tuple(flags))


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "pages"
    path.mkdir(mode=0o700)
    return path


@pytest.mark.parametrize("own", [[], [NGRAM], ["--num-scheduler-steps=4"]], ids=["plain", "drafts", "several steps"])
def test_a_crowd_gets_the_texts_of_a_server_without_tiers(flags, told, own):
    """Twice: the second time, what the first has computed is in the host's memory."""
    with serve_exported(*flags, *own, f"--kv-offloading-size={pages_gib(1000)}") as server:
        assert crowd(server) == told
        before = healthy(server)
        assert crowd(server) == told
        with server.http() as http:  # alone, so that there is time for drafts
            assert [text_of(http, body) for body in BODIES[:20]] == told[:20]
        after = healthy(server)
    assert server.process.returncode == 0
    assert before[SAVED] > NUM_PAGES
    assert after[FROM_HOST] - before[FROM_HOST] > NUM_PAGES
    assert after["external_prefix_cache_hits_total"] - before["external_prefix_cache_hits_total"] > NUM_PAGES
    assert after["external_prefix_cache_queries_total"] >= after["external_prefix_cache_hits_total"]
    assert after[BROKEN] == 0
    assert ("ngram" in str(own)) == (after["spec_decode_num_accepted_tokens_total"] > 0)


def test_a_crowd_gets_the_same_texts_from_files(flags, told, folder):
    """The host's memory thrashes, too."""
    with serve_exported(*flags, *in_files(folder)) as server:
        assert crowd(server) == told
        wait_for(server, lambda counts: counts[IN_FILES] > 2 * NUM_PAGES)
        assert crowd(server) == told
        after = healthy(server)
    assert server.process.returncode == 0
    assert after[FROM_FILES] > 0 == after[BROKEN]


def test_pages_of_eight_bits_come_back_with_their_scales(engine_flags, folder):
    flags = [*engine_flags, *POOL, "--kv-cache-dtype=int8"]
    bodies = [body for body in BODIES if body["model"] == "demo"]
    with serve_exported(*flags) as plain, plain.http(headers=ADMIN) as http:
        told = [text_alone(http, body) for body in bodies]
    with serve_exported(*flags, *in_files(folder, host_pages=20)) as server:
        assert [crowd(server, bodies) for _ in range(2)] == [told, told]
        assert healthy(server)[FROM_HOST] > 0


def test_requests_that_end_while_their_pages_come_leave_nothing_behind(flags, told):
    """Every other client goes at once, or after the first chunk."""
    with serve_exported(*flags, f"--kv-offloading-size={pages_gib(1000)}") as server:
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
    assert server.process.returncode == 0


def test_what_is_reset_does_not_come_back(flags, told, folder):
    with serve_exported(*flags, *in_files(folder)) as server, server.http(headers=ADMIN) as http:
        crowd(server)
        wait_for(server, lambda counts: counts[IN_FILES] > NUM_PAGES)
        assert http.post("/reset_prefix_cache?reset_external=false").status_code == 200
        before = healthy(server)
        assert [text_of(http, body) for body in BODIES[:20]] == told[:20]  # of some the pages have left the device
        kept = healthy(server)
        assert kept["external_prefix_cache_hits_total"] > before["external_prefix_cache_hits_total"]
        assert http.post("/reset_prefix_cache?reset_external=true").status_code == 200
        before = healthy(server)
        assert text_of(http, BODIES[0]) == told[0]
        after = healthy(server)
        assert after["external_prefix_cache_hits_total"] == before["external_prefix_cache_hits_total"]


def test_tiers_outlive_changes_of_the_base(flags, told, folder):
    """Requests that wait meanwhile are answered after it."""
    with serve_exported(*flags, *in_files(folder)) as server, server.http(headers=ADMIN, timeout=120) as http:
        assert crowd(server) == told
        for changes in (["/sleep?level=1", "/wake_up"], ["/admin/reload"]):
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(crowd, server)
                for change in changes:
                    assert http.post(change, json={}).status_code == 200
                assert found.result() == told
        healthy(server)


def test_names_of_adapters_may_be_exchanged_between_starts(flags, told, folder):
    """Pages are found by the adapter's weights, and not by its name or its place in the list."""
    filled(folder, flags)
    exchanged = [f"{name}={path}" for name, path in zip(ADAPTERS, reversed(ADAPTERS.values()), strict=True)]
    other = {"demo": "demo", "pirate": "almanac", "almanac": "pirate"}
    with serve_exported(*flags[: -len(ADAPTERS)], *exchanged, *in_files(folder)) as server:
        assert crowd(server, [body | {"model": other[body["model"]]} for body in BODIES]) == told
        healthy(server)


def test_an_adapter_that_changes_in_place_gets_no_pages_of_its_old_weights(flags, told, folder):
    adapter = folder.parent / "changing"
    changing = [body | {"model": "changing"} for body in BODIES]
    with serve_exported(*flags, *in_files(folder)) as server, server.http(headers=ADMIN) as http:
        for number, (name, path) in enumerate(ADAPTERS.items()):
            shutil.copytree(path, adapter, dirs_exist_ok=True)
            body = {"lora_name": "changing", "lora_path": str(adapter), "load_inplace": number > 0}
            assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
            found = dict(enumerate(crowd(server, changing)))
            expected = {i: text for i, text in enumerate(told) if BODIES[i]["model"] == name}
            assert expected and expected.items() <= found.items()
        healthy(server)


@pytest.mark.hosts
def test_two_engines_share_a_folder(flags, told, folder):
    with serve_exported(*flags, *in_files(folder), "--data-parallel-size=2") as pair:
        assert [crowd(pair) for _ in range(2)] == [told, told]
        healthy(pair)
    assert pair.process.returncode == 0
