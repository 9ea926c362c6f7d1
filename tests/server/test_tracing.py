"""Traces of requests, at a collector that the test is."""

from __future__ import annotations

import gzip
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from server.settings import Settings
from tests.server.support.real_engine import RealConfig
from tests.server.support.requests import CHAT, HELLO, LONG, wait_until
from tests.server.support.running import RunningServer, running_server

TARGET = "tests.server.support.real_engine:build"
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
LATENCIES = ("e2e", "time_to_first_token", "time_in_queue", "time_in_model_prefill", "time_in_model_decode")


class Collector:
    """Receives spans over HTTP, in protobuf."""

    def __init__(self) -> None:
        self.spans: list[dict] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
                collector.receive(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def receive(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = {attribute.key: _value(attribute.value) for attribute in resource.resource.attributes}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                own = {attribute.key: _value(attribute.value) for attribute in span.attributes}
                self.spans.append(
                    own
                    | {
                        "name": span.name,
                        "service": service["service.name"],
                        "trace": span.trace_id.hex(),
                        "parent": span.parent_span_id.hex(),
                        "seconds": (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                        "is_error": span.status.code == span.status.STATUS_CODE_ERROR,
                    }
                )

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _value(value) -> object:
    return getattr(value, value.WhichOneof("value"))


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
    collector = Collector()
    yield collector
    collector.close()


def spans_of(server: RunningServer, collector: Collector) -> list[dict]:
    """Those that the server has sent when it has ended."""
    server.process.terminate()
    assert server.process.wait(30) == 0
    assert "Traceback" not in server.log
    return collector.spans


def test_the_span_of_a_response_in_the_background_ends_with_it(tmp_path, collector):
    body = {"input": "hello", "background": True, "max_output_tokens": 5, "ignore_eos": True}
    with running_server(tmp_path, TARGET, RealConfig(), otlp_traces_endpoint=collector.url) as server:
        with server.http() as http:
            path = f"/v1/responses/{http.post('/v1/responses', json=body).json()['id']}"
            wait_until(lambda: http.get(path).json()["status"] == "incomplete")
        (span,) = spans_of(server, collector)
    assert (span["gen_ai.usage.completion_tokens"], span["http.response.status_code"]) == (5, 200)
    assert span["seconds"] >= span["gen_ai.latency.time_in_model_inference"] > 0


def test_each_request_has_a_span(tmp_path, collector):
    body = HELLO | {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "ignore_eos": True, "request_id": "mine"}
    with running_server(tmp_path, TARGET, RealConfig(), otlp_traces_endpoint=collector.url) as server:
        with server.http() as http:
            headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
            prompt_tokens = http.post(CHAT, json=body, headers=headers).json()["usage"]["prompt_tokens"]
            three = {"prompt": "a", "max_tokens": 2, "n": 3, "stream": True, "ignore_eos": True}
            answer = http.post("/v1/completions", json=three)
            assert answer.status_code == 200, answer.text
            assert http.post(CHAT, json=HELLO | {"max_tokens": -1}).status_code == 400
            assert http.get("/v1/models").status_code == 200  # it generates nothing
        spans = {(span.get("gen_ai.request.n"), span["http.response.status_code"]): span
                 for span in spans_of(server, collector)}  # fmt: skip
    assert spans.keys() == {(1, 200), (3, 200), (None, 400)}
    chat, completion, refused = spans[1, 200], spans[3, 200], spans[None, 400]
    assert {span["name"] for span in (chat, completion, refused)} == {"llm_request"}
    assert (chat["trace"], chat["parent"], chat["service"]) == (TRACE_ID, PARENT_ID, "pallas-serve")
    assert (completion["parent"], completion["trace"] != TRACE_ID) == ("", True)
    expected = {
        "gen_ai.request.id": "chatcmpl-mine",
        "gen_ai.response.model": "test-model",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.prompt_tokens": prompt_tokens,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.usage.num_sequences": 1,
        "http.response.status_code": 200,
    }
    found = {name: chat[name] for name in expected}
    assert found | {"gen_ai.request.id": found["gen_ai.request.id"][:13]} == expected
    assert (completion["gen_ai.usage.completion_tokens"], completion["gen_ai.usage.num_sequences"]) == (6, 3)
    for span in (chat, completion):
        e2e, ttft, queue, prefill, decode = (span[f"gen_ai.latency.{name}"] for name in LATENCIES)
        assert all(value >= 0 for value in (queue, prefill, decode))
        assert queue + prefill <= ttft <= e2e
        assert ttft + decode == pytest.approx(e2e, abs=1e-3)
        assert span["seconds"] >= e2e - 1e-3
    assert (refused["http.response.status_code"], refused["is_error"]) == (400, False)
    assert "gen_ai.request.id" not in refused


def test_a_client_that_leaves_has_a_span_too(tmp_path, collector):
    endpoint = f"{collector.url}/v1/traces"
    with running_server(tmp_path, TARGET, RealConfig(), otlp_traces_endpoint=endpoint) as server:
        with server.http() as http:
            with http.stream("POST", CHAT, json=LONG | {"max_tokens": 200}) as response:
                assert next(response.iter_raw())
            wait_until(lambda: http.get("/load").json()["server_load"] == 0)
        (span,) = spans_of(server, collector)
    assert span["gen_ai.usage.completion_tokens"] >= 1


def test_a_collector_that_is_not_there_delays_nothing(tmp_path):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with running_server(tmp_path, TARGET, RealConfig(), otlp_traces_endpoint=endpoint) as server:
            assert server.post(CHAT, HELLO | {"max_tokens": 2}).status_code == 200
            server.process.terminate()
            assert server.process.wait(30) == 0
            assert "Traceback" not in server.log
            assert "Connection refused" in server.log


def test_traces_without_their_packages_are_an_error_at_start():
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None; from pathlib import Path; "
        "from server.settings import Settings; from server.api.tracing import make_tracer; "
        "make_tracer(Settings(tokenizer_folder=Path(), model_names=('m',), otlp_traces_endpoint='http://a'))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    *_, last = found.stderr.splitlines()
    assert last.startswith("ValueError: --otlp-traces-endpoint needs further packages")
    assert "pip install -c scripts/constraints.txt -e '.[otel]'" in last


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://a:4317", "http://", "http://[a"])
def test_an_endpoint_must_be_an_address(tmp_path, endpoint):
    with pytest.raises(ValueError, match="--otlp-traces-endpoint"):
        Settings(tokenizer_folder=tmp_path, model_names=("m",), otlp_traces_endpoint=endpoint)


def test_nothing_of_it_is_imported_without_the_flag():
    code = "import server.main, sys; print(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
