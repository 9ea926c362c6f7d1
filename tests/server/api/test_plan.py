"""The planner of the page, by real requests to a server with a real planner."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import wait_until
from tests.server.support.running import ECHO, ROOT, RunningServer, running_server, server_of

pytestmark = pytest.mark.slow

PLANNER = (sys.executable, "-m", "scripts.lab", "plan", "--answer-choices", "demo")
CHOICE = {"model": "1b", "target": "1xl4", "workload": "chat", "ttft_ms": 500}
# A search that takes minutes.
LONG = {"model": "1b", "target": "1xl4", "workload": "custom", "prompt_tokens": 9, "output_tokens": 9999}

planned = server_of(EchoConfig(), planner=PLANNER)


def planners(server: RunningServer) -> list[psutil.Process]:
    alive = [c for c in psutil.Process(server.process.pid).children() if c.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "plan" in child.cmdline()]


def search(server: RunningServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a search that runs to its end."""
    text = server.post("/ui/plan", body | {"simulate": True}).text
    *lines, last = [line for line in text.splitlines() if line.startswith("data:")]
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_the_form_offers_models_chips_workloads_and_prices(planned: RunningServer) -> None:
    with planned.http() as http:
        options = http.get("/ui/plan").json()
    assert options["models"]["served"] == "demo"
    assert options["targets"]["8xh100"]["count"] == 8
    assert {"chat", "rag", "batch", "agents"} <= options["workloads"].keys()
    assert all(api["source"] and api["as_of"] for api in options["apis"])


@pytest.mark.parametrize("model", ["1b", "served"])
def test_a_plan_has_the_figures_of_the_command(planned: RunningServer, model: str) -> None:
    choice = CHOICE | {"model": model, "price_per_hour": 0.8, "api_prices": ["Some One=0.05/0.08"]}
    answer = planned.post("/ui/plan", choice)
    assert answer.status_code == 200, answer.text
    figures = answer.json()
    _, *flags = shlex.split(figures.pop("plan_command"))
    command = [sys.executable, "-m", "scripts.lab", "plan", *flags, "--json"]
    assert figures == json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    assert figures["command"].startswith("scripts/serve --model ")
    marks = {figures[part]["mark"] for part in ("best", "cost", "memory")}
    assert marks == {"counted", "estimated"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": "70b"}, None),
        ({"model": "/etc/passwd"}, "model"),
        ({"target": "9xl4"}, "target"),
        ({"workload": "trace.csv"}, "workload"),
        ({"workload": "custom", "prompt_tokens": 1}, "output_tokens"),
        ({"workload": "custom", "prompt_tokens": 10**6, "output_tokens": 1}, "workload"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"request_rate": -1}, "request_rate"),
        ({"request_rate": 1e6}, "request_rate"),
        ({"ttft_ms": "soon"}, "ttft_ms"),
        ({"ttft_ms": 0.001}, None),
        ({"price_per_hour": 0}, "price_per_hour"),
        ({"price_per_hour": 1, "api_prices": ["Me=free"]}, "api_price"),
        ({"quantization": "int3"}, "quantization"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_choice_that_cannot_be_planned_is_refused_with_words(
    planned: RunningServer, change: dict[str, Any], field: str | None
) -> None:
    answer = planned.post("/ui/plan", CHOICE | change)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field
    assert error["message"]
    assert planned.post("/ui/plan", CHOICE).status_code == 200


def test_a_search_reports_its_progress_and_ends_with_a_plan(planned: RunningServer) -> None:
    body = {"model": "1b", "target": "1xl4", "workload": "custom", "prompt_tokens": 50, "output_tokens": 2}
    *progress, plan = search(planned, body)
    shares = [event["progress"] for event in progress]
    assert shares == sorted(shares) and shares[0] > 0 and shares[-1] <= 1
    assert plan["best"]["latencies_ms"]["ttft"].keys() >= {"p50", "p95"}
    (refused,) = search(planned, body | {"model": "70b"})
    assert "does not fit" in refused["error"]["message"]


def test_a_search_ends_with_its_client_and_estimates_go_on_meanwhile(planned: RunningServer) -> None:
    body = LONG | {"simulate": True}
    with planned.http() as http, http.stream("POST", "/ui/plan", json=body) as stream:
        lines = stream.iter_lines()  # kept: the connection ends with it
        assert any(line.startswith("data:") for line in lines)
        second = planned.post("/ui/plan", body)
        assert (second.status_code, second.headers["retry-after"]) == (429, "10")
        assert planned.post("/ui/plan", CHOICE).status_code == 200
        assert len(planners(planned)) == 2
    wait_until(lambda: len(planners(planned)) == 1)


def test_a_server_that_ends_stops_a_search(tmp_path: Path) -> None:
    with running_server(tmp_path, ECHO, EchoConfig(), planner=PLANNER, grace_period_s=60.0) as server:
        with server.http() as http, http.stream("POST", "/ui/plan", json=LONG | {"simulate": True}) as stream:
            lines = (line for line in stream.iter_lines() if line.startswith("data:"))
            assert "progress" in next(lines)
            children = planners(server)
            server.process.terminate()
            assert any("shutting down" in line for line in lines)
        server.process.wait(20)
        assert psutil.wait_procs(children, timeout=10)[1] == []


def test_plans_need_the_key(tmp_path: Path) -> None:
    with running_server(tmp_path, ECHO, EchoConfig(), planner=PLANNER, api_keys=("secret",)) as server:
        assert server.post("/ui/plan", CHOICE).status_code == 401


def test_a_planner_that_does_not_answer_fails_its_request_only(tmp_path: Path) -> None:
    with running_server(tmp_path, ECHO, EchoConfig(), planner=("false",)) as server, server.http() as http:
        answer = http.get("/ui/plan")
        assert answer.status_code == 500
        assert "planner" in answer.json()["error"]["message"]
        assert http.get("/health").status_code == 200


def test_without_a_planner_its_path_is_not_there(echo: RunningServer) -> None:
    assert echo.post("/ui/plan", CHOICE).status_code == 404
