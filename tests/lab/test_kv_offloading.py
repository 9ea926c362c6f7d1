"""The bench "kv_offloading" from end to end, with real servers of one layer and a small one in llama-server's place."""

from __future__ import annotations

import json
import shlex
import sys

import numpy as np
import pytest

from scripts.lab import kv_offloading
from scripts.lab.kv_offloading import RATIOS
from scripts.lab.load.conversations import ANSWER, QUESTION, Conversations
from scripts.lab.load.lengths import Lengths
from tests.conftest import COMPILED
from tests.demo.one_layer import one_layer

# Answers with as many chunks as are asked for. Its slots are files, and a request after a restart needs its slot.
LLAMA_SERVER = """
import sys
from pathlib import Path
from aiohttp import web

flags = dict(zip(sys.argv[1:], sys.argv[2:]))
folder, slots = Path(flags["--slot-save-path"]), set()

async def health(request):
    return web.Response()

async def metrics(request):
    return web.Response(text="llamacpp:prompt_tokens_total 3\\n")

async def slot(request):
    number, file = request.match_info["number"], folder / (await request.json())["filename"]
    if request.query["action"] == "save":
        file.write_text(number)
    slots.add(file.read_text())
    return web.json_response({})

async def complete(request):
    body = await request.json()
    assert len(body["prompt"]) + body["max_tokens"] < int(flags["-c"])
    assert not slots or str(body.get("id_slot", "")) in slots
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(body["max_tokens"]):
        await response.write(b'data: {"choices": [{"text": "x"}]}\\n\\n')
    await response.write(b"data: [DONE]\\n\\n")
    return response

app = web.Application()
app.router.add_get("/health", health)
app.router.add_get("/metrics", metrics)
app.router.add_post("/slots/{number}", slot)
app.router.add_post("/v1/completions", complete)
web.run_app(app, host="127.0.0.1", port=int(flags["--port"]), print=None)
"""
SMALL = ["--conversations", "32", "--pool", "4", "--lengths", "uniform:40:80", "--context", "512", "--page-size", "32"]
SMALL += ["--num-pages", "48", "--streams", "2", "--rate", "2", "--seconds", "1", "--prefix-len", "100"]
OF_ROUNDS = ("away", "others, away", "others, in the pool", "fits")
METRICS = {metric for metric, *_ in RATIOS}
OF_SERVERS = ["--", "--max-num-batched-tokens", "16", "--compile-cache", str(COMPILED)]


@pytest.mark.slow
def test_every_row_and_ratio_comes_from_one_run(tmp_path, capsys, free_port):
    out, program = tmp_path / "out.json", tmp_path / "llama-server"
    (tmp_path / "server.py").write_text(LLAMA_SERVER)
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {tmp_path}/server.py "$@"\n')
    program.chmod(0o700)
    flags = [*SMALL, "--model", str(one_layer(tmp_path / "model")), "--port", str(free_port), "--rounds", "1"]
    flags += ["--llama-server", str(program), "--llama-model", "none.gguf", "--output-json", str(out)]
    assert kv_offloading.main([*flags, *OF_SERVERS]) == 0
    results = json.loads(out.read_text())
    tiers = ["off", "host", "disk", "llama-server"]
    of_restarts = ["computed", "in the pool", "first after a restart", "later after a restart"]
    expected = [f"{row}, {tier}" for row in OF_ROUNDS for tier in tiers]
    expected += [f"{row}, {tier}" for tier in ("disk", "llama-server") for row in of_restarts]
    assert sorted(results) == sorted(expected)
    rows = {name: part for name, (part,) in results.items()}
    for name, part in rows.items():
        assert part["failed"] == 0 < part["completed"], name
    for tier in ("host", "disk"):
        part = rows[f"away, {tier}"]
        assert part["external_prefix_cache_hits_total"] > 0 < part[f"kv_offload_loaded_pages_total {tier}"]
    hits, lookups = (
        {row: rows[f"{row}, off"][f"prefix_cache_{count}_total"] for row in OF_ROUNDS} for count in ("hits", "queries")
    )
    assert hits["away"] == 0
    assert hits["others, in the pool"] >= 2 * 32 > hits["others, away"] == 0  # a page of each visitor
    assert hits["fits"] > lookups["fits"] * 2 / 3
    printed = capsys.readouterr().out
    assert sum(f"({metric})" in line for line in printed.splitlines() for metric in METRICS) == len(RATIOS)
    assert "away, off / away, host (TTFT p50): " in printed


def test_the_prompt_of_a_turn_begins_with_the_one_before():
    chats = Conversations(3, Lengths.parse("uniform:5:9"), 3, np.random.default_rng(0))
    first, second, third = (chats.next_turn(which) for which in ([0, 1, 2], [2, 0], [2]))
    assert [request.max_tokens for request in first] == [ANSWER] * 3
    assert third[0].prompt[: len(second[0].prompt)] == second[0].prompt
    assert second[0].prompt[: len(first[2].prompt)] == first[2].prompt
    assert len(third[0].prompt) == len(first[2].prompt) + 2 * (ANSWER + QUESTION) <= chats.longest() - ANSWER
    assert second[1].prompt[: len(first[0].prompt)] == first[0].prompt
    assert first[0].prompt[:5] != first[1].prompt[:5]


def test_a_flag_that_the_server_refuses_is_named(capsys, tmp_path, free_port):
    flags = [*SMALL, "--tiers", "off", "llama-server", "--model", "demo", "--port", str(free_port)]
    assert kv_offloading.main([*flags, "--", "--no-such-flag"]) == 1
    out, error = capsys.readouterr()
    assert "llama-server is left out" in out
    assert "kv_offloading: kv-off did not come up: " in error
    assert "--no-such-flag" in error
