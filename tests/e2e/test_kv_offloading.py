"""K/V pages of the demo that leave the device and come back, behind a real server: the texts are those of a server
without tiers, whatever its requests, weights and adapters do. Files: tests/e2e/test_kv_files.py.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import serve_exported
from tests.e2e.kv_crowd import (
    ADMIN,
    BODIES,
    BROKEN,
    COMPLETIONS,
    FROM_HOST,
    NGRAM,
    NUM_PAGES,
    POOL,
    SAVED,
    crowd,
    flags_of,
    healthy,
    in_files,
    pages_gib,
    text_alone,
    text_of,
    texts,
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


@pytest.mark.parametrize("own", [[], [NGRAM]], ids=["plain", "drafts"])
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
