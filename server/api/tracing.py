"""OpenTelemetry traces: one span for each request that generates, with the attributes that vLLM gives its spans.

The packages of the extra `otel` are imported only if there is an endpoint. A thread of the SDK exports the spans in
batches. While the collector cannot be reached, up to 2,048 spans wait, and further ones are dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from server.api.record import RequestRecord
from server.engine.generation import Generation
from server.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SPAN_NAME = "llm_request"
DEFAULT_PATH = "/v1/traces"  # added to an endpoint without a path
EXPORT_S = 5.0  # the time limit of a batch of spans, also of the last one at the end
INSTALL = ".venv/bin/python -m pip install -c scripts/constraints.txt -e '.[otel]'"

_CONTEXT = (b"traceparent", b"tracestate")


class Tracer:
    """Makes spans and passes them to the exporter's thread. Call `close` at the end."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("pallas-serve")
        self._propagator = TraceContextTextMapPropagator()

    def end(self, trace: RequestRecord, headers: Iterable[tuple[bytes, bytes]], status: int) -> None:
        """Records the span of a request that has ended. A `traceparent` among its headers is the span's parent.

        Args:
            status: the status of the answer; 0: there was none.
        """
        from opentelemetry.trace import SpanKind, StatusCode

        carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in _CONTEXT}
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=trace.started_ns,
            attributes=_attributes(trace, time.monotonic()) | {"http.response.status_code": status},
        )
        if status >= 500 or not status:
            span.set_status(StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        """Exports the last spans, within EXPORT_S."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(EXPORT_S)


def make_tracer(settings: Settings) -> Tracer | None:
    """The tracer of the settings; None: there is no endpoint. Raises ValueError if the packages are not installed."""
    if settings.otlp_traces_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError(f"--otlp-traces-endpoint needs further packages ({error.name}): {INSTALL}") from error
    url = urlsplit(settings.otlp_traces_endpoint)
    endpoint = url._replace(path=DEFAULT_PATH if url.path in ("", "/") else url.path).geturl()
    resource = Resource.create({"service.name": "pallas-serve", "service.version": settings.version})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)))
    return Tracer(provider)


def _attributes(trace: RequestRecord, now: float) -> dict[str, Any]:
    """The span's attributes, with vLLM's names. Times are in seconds. Stages that the request has not reached are left
    out."""
    generation, sampling = trace.work, trace.sampling
    found: dict[str, Any] = {"gen_ai.latency.e2e": now - trace.started_s, "http.request.header.x-request-id": trace.id}
    if not isinstance(generation, Generation) or sampling is None:
        return found
    choices = generation.choices
    found |= {
        "gen_ai.response.model": trace.model,
        "gen_ai.request.id": generation.request_id,
        "gen_ai.request.n": len(choices),
        **{f"gen_ai.request.{name}": getattr(sampling, name) for name in ("max_tokens", "temperature", "top_p")},
        "gen_ai.usage.num_sequences": len(choices),
        "gen_ai.usage.prompt_tokens": choices[0].num_prompt_tokens,
        "gen_ai.usage.completion_tokens": sum(choice.num_tokens for choice in choices),
    }
    begun = [(choice.first_token_s, choice) for choice in choices if choice.first_token_s is not None]
    if begun:
        first_token_s, first = min(begun, key=lambda pair: pair[0])
        decode_s = now - first_token_s
        found["gen_ai.latency.time_to_first_token"] = first_token_s - trace.started_s
        found["gen_ai.latency.time_in_model_decode"] = decode_s
        if first.times is not None:
            queue_s, prefill_s = first.times
            found["gen_ai.latency.time_in_queue"] = queue_s
            found["gen_ai.latency.time_in_model_prefill"] = prefill_s
            found["gen_ai.latency.time_in_model_inference"] = prefill_s + decode_s
    return found
