"""The benches' own arithmetic by hand, and their client against a server of known behaviour over a real socket."""

import asyncio
import json

import numpy as np
import pytest
from aiohttp import web

from scripts.lab import serving
from scripts.lab.load.arrivals import arrival_times
from scripts.lab.load.client import Outcome, Target, run
from scripts.lab.load.lengths import Trace
from scripts.lab.load.metrics import inter_token_latencies, request_metrics, summary, table
from scripts.lab.load.workload import BenchRequest


def finished(start: float, chunk_times: list[float], end: float, tokens: int | None = None) -> Outcome:
    return Outcome(start=start, chunk_times=chunk_times, end=end, prompt_tokens=7, completion_tokens=tokens)


def test_request_metrics_by_hand():
    outcome = finished(10.0, [10.2, 10.3, 10.5], 10.6, tokens=4)
    assert request_metrics(outcome) == pytest.approx({"ttft": 200.0, "tpot": 100.0, "e2el": 600.0})
    assert inter_token_latencies([outcome, finished(0, [1], 1)]) == pytest.approx([100.0, 200.0])


def test_summary_counts_failures_apart_and_goodput_by_every_slo():
    fast = finished(0.0, [0.1, 0.2], 0.2, tokens=2)
    slow = finished(0.0, [1.0, 1.1], 1.1, tokens=2)
    stuttering = finished(0.0, [0.1, 0.9], 0.9, tokens=2)
    failed = Outcome(start=0.0, error="HTTP 500: no")
    result = summary([fast, slow, stuttering, failed], 2.0, slos_ms={"ttft": 500, "itl": 300})
    assert (result["completed"], result["failed"], result["errors"]) == (3, 1, ["HTTP 500: no"])
    assert result["output_tokens_per_s"] == 3.0
    assert result["input_tokens"] == 21
    assert result["goodput"]["requests"] == 1
    assert result["ttft_ms"]["p50"] == pytest.approx(100.0)
    assert "2 requests" not in table(result, "title")
    assert "3 completed, 1 failed" in table(result, "title")


def test_arrivals_have_the_rate_and_the_burstiness_asked_for():
    def gaps(burstiness: float) -> np.ndarray:
        times = arrival_times(20_000, rate=5.0, burstiness=burstiness, random=np.random.default_rng(2))
        assert times[0] == 0.0
        return np.diff(times)

    for burstiness, variation in ((1.0, 1.0), (0.25, 2.0), (4.0, 0.5)):
        drawn = gaps(burstiness)
        assert drawn.mean() == pytest.approx(0.2, rel=0.05)
        assert drawn.std() / drawn.mean() == pytest.approx(variation, rel=0.05)  # gamma: 1 / sqrt(shape)
    assert not arrival_times(5, rate=float("inf"), burstiness=1.0, random=np.random.default_rng(0)).any()
    with pytest.raises(ValueError, match="rate"):
        arrival_times(5, rate=0.0, burstiness=1.0, random=np.random.default_rng(0))


def test_trace_is_read_windowed_and_scaled(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
        "2023-11-16 18:15:50.9951690,396,109\r\n2023-11-16 18:15:51.4951690,4000,600\r\n"
    )
    trace = Trace.read(path)
    assert trace.arrival_s == pytest.approx([0.0, 4.314579, 4.814579])
    part = trace.window(1, 2).scaled(0.1, 100)
    assert part.arrival_s == pytest.approx([0.0, 0.5])
    assert part.input_lens.tolist() == [40, 99]
    assert part.output_lens.tolist() == [11, 1]
    with pytest.raises(ValueError, match="3 requests"):
        trace.window(2, 2)


async def list_models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m"}]})


async def serve_stream(handler) -> tuple[web.AppRunner, str]:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    app.router.add_get("/v1/models", list_models)
    runner = web.AppRunner(app, handle_signals=False)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def event(body: dict) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


async def scripted(request: web.Request) -> web.StreamResponse:
    """max_tokens picks the behaviour: 1 is refused, 2 fails in the stream, 3 breaks off, 4 ends without [DONE], more
    are streamed whole."""
    body = await request.json()
    wanted = body["max_tokens"]
    if wanted == 1:
        return web.json_response({"error": {"message": "no"}}, status=400)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    if wanted == 2:
        await response.write(event({"error": {"message": "broken"}}) + b"data: [DONE]\n\n")
        return response
    frames = b"".join(event({"choices": [{"text": "x", "finish_reason": None}]}) for _ in range(wanted))
    if wanted == 4:
        frames += event({"choices": [{"text": "", "finish_reason": "length"}], "usage": {"completion_tokens": 4}})
    elif wanted != 3:
        frames += (
            event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": wanted}}) + b"data: [DONE]\n\n"
        )
    for cut in range(0, len(frames), 37):  # events do not arrive one per read
        await response.write(frames[cut : cut + 37])
    return response


def test_the_client_counts_every_token_and_names_every_failure():
    async def drive():
        runner, url = await serve_stream(scripted)
        try:
            requests = [BenchRequest("p", n) for n in (1, 2, 3, 4, 40)]
            return await run(
                Target(base_url=url, model="m", keep_text=True), requests, arrivals=None, max_concurrency=2
            )
        finally:
            await runner.cleanup()

    outcomes, duration_s = asyncio.run(drive())
    errors = [outcome.error for outcome in outcomes]
    assert errors[0].startswith("HTTP 400")
    assert "broken" in errors[1]
    assert errors[2] == "the stream broke off: neither a finish_reason nor [DONE]"
    assert errors[3:] == [None, None]
    assert [outcome.output_tokens for outcome in outcomes[3:]] == [4, 40]
    assert outcomes[4].text == "x" * 40
    assert outcomes[4].prompt_tokens == 5
    assert duration_s >= max(outcome.end for outcome in outcomes) - min(outcome.start for outcome in outcomes)


def measure(*flags: str) -> None:
    """The command, against a server of this test."""

    async def drive() -> int:
        runner, url = await serve_stream(scripted)
        try:
            return await asyncio.to_thread(serving.main, ["--base-url", url, *flags])
        finally:
            await runner.cleanup()

    assert asyncio.run(drive()) == 0


def test_the_command_writes_its_result(tmp_path, capsys):
    of_load = ("--num-prompts", "6", "--request-rate", "200", "--output-len", "uniform:5:8", "--num-warmups", "1")
    measure(*of_load, "--goodput", "ttft:60000", "--output-json", str(tmp_path / "result.json"))
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"], result["goodput"]["requests"]) == (6, 0, 6)
    assert 30 <= result["output_tokens"] <= 48
    assert result["ttft_ms"].keys() == {"mean", "p50", "p90", "p99"}
    assert "6 completed" in capsys.readouterr().out


def test_a_goodput_is_found_by_trials_at_rising_rates(tmp_path, capsys):
    of_load = ("--num-prompts", "3", "--output-len", "5", "--request-rate", "1000")
    measure(*of_load, "--find-goodput", "ttft=60000,tpot=60000", "--output-json", str(tmp_path / "trials.json"))
    trials = json.loads((tmp_path / "trials.json").read_text())["trials"]
    assert [trial["rate"] for trial in trials] == [1000 * 2**i for i in range(len(trials))]  # none fails
    assert all(trial["passed"] and trial["goodput"]["requests"] == 3 for trial in trials)
    assert f"goodput: {trials[-1]['rate']:.2f} requests/s with at least 90% of the requests" in capsys.readouterr().out
