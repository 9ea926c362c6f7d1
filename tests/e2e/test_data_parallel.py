"""Two engines of the demo behind one server."""

from __future__ import annotations

import re

import pytest

from tests.demo.one_layer import one_layer
from tests.e2e.conftest import PREFIX, serve, serve_exported

PREFIX_TOKENS = 192
pytestmark = [pytest.mark.e2e, pytest.mark.hosts, pytest.mark.slow]


def test_prefixes_that_do_not_fit_one_engine_are_shared_out_and_come_back_after_evictions(server):
    """An engine has pages for six prefixes. Requests come one after the other: in turns, each would miss."""

    def ask(one, number: int) -> tuple[str, int]:
        """The text, and the prompt's cached tokens."""
        prompt = [2 + (7 * number + i) % 200 for i in range(PREFIX_TOKENS)] + [5, 6, 7]
        body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        with one.http() as http:
            answer = http.post("/v1/completions", json=body).json()
        details = answer["usage"]["prompt_tokens_details"] or {}
        return answer["choices"][0]["text"], details.get("cached_tokens", 0)

    expected = [ask(server, number)[0] for number in range(9)]
    limits = ("--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--max-model-len", "256", "--page-size", "16")
    with serve_exported(*limits, "--num-pages", "84", "--data-parallel-size", "2") as pair:

        def ask_all(numbers: range) -> tuple[list[str], list[int]]:
            texts, cached = zip(*(ask(pair, number) for number in numbers), strict=True)
            return list(texts), list(cached)

        assert ask_all(range(9)) == (expected, [0] * 9)
        assert ask_all(range(9)) == (expected, [PREFIX_TOKENS] * 9)  # each engine has its own
        ask_all(range(9, 27))
        assert ask_all(range(9)) == (expected, [0] * 9)  # they were evicted
        assert ask_all(range(9)) == (expected, [PREFIX_TOKENS] * 9)
        finished = pair.wait_for_metrics(lambda metrics: metrics["num_requests_running"] == 0)
        assert finished["num_compiles_after_warm_up_total"] == 0
        with pair.http() as http:
            text = http.get("/metrics").text
        assert all(f'{PREFIX}engine_alive{{engine="{number}",model_name="demo"}} 1.0' in text for number in (0, 1))
    assert pair.process.returncode == 0


def test_the_first_engine_compiles_and_the_other_reads(tmp_path):
    small = ("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "64", "--num-pages", "32")
    small += ("--model", str(one_layer(tmp_path / "model")))
    flags = (*small, "--compile-all-first", "--log-level", "debug", "--compile-cache", str(tmp_path / "programs"))
    with serve(*flags, "--data-parallel-size", "2") as pair:
        said = r"engine (\d): compiled (\d+) programs.*?(?:(\d+) more were exported before|$)"
        found = [match for line in pair.lines if (match := re.search(said, line))]
    counts = {match[1]: (int(match[2]), int(match[3] or 0)) for match in found}
    assert counts["0"][0] > 0
    assert counts == {"0": (counts["0"][0], 0), "1": (0, counts["0"][0])}
