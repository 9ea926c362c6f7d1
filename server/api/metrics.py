"""/metrics: the engine's statistics and the server's own counts, with the names that vLLM's dashboards use.

The engine counts in its own process. This module exports its last statistics, which are at most a second old. It does
not use prometheus-client's global registry, and it counts nothing per token. With several HTTP processes, the counts of
the others are added to this one's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily as Histograms
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from batcher.stats import Histogram
from server.api.http_counts import HTTP_BOUNDS, HttpCounts, Prefill
from server.engine.protocol import Engine

Kind = type[Counter] | type[Gauge] | type[Histograms]
Row = tuple[Sequence[object], Any]  # the values of a family's labels, and the figure
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
NOT_SUMMED = ("process_start_time_seconds", "process_max_fds")  # not summed over the HTTP processes

# vLLM's labels of cache_config_info -> ours with the same meaning
CACHE_ALIASES = {"block_size": "page_size", "num_gpu_blocks": "num_pages"}

GAUGES = {
    "num_requests_running": "Requests that own a slot.",
    "num_requests_waiting": "Requests that wait for a slot or pages.",
    "num_programs_to_come": "Programs that are compiled while serving, and are not there yet.",
}
COUNTERS = {
    "num_preemptions": "Requests put back to make room for others.",
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "kv_events_published": "Events of the prefix cache for routers, published.",
    "kv_events_dropped": "Events of the prefix cache for routers, lost because too many waited; 0 in health.",
    "corrupted_requests": "Requests ended because the model gave NaN or infinity.",
    "failed_steps": "Steps that raised.",
    "num_steps": "Steps executed.",
    "step_tokens": "Real tokens in the steps.",
    "step_tokens_padded": "Tokens that the steps' shapes held.",
    "step_rows": "Real rows in the steps.",
    "step_rows_padded": "Rows that the steps' shapes held.",
    "integrity_failures": "Idle periods in which the engine's books were inconsistent; always 0 in health.",
    "num_compiles_after_warm_up": "Programs compiled while serving that were not to come; always 0 in health.",
    "num_stand_in_steps": "Steps in a larger program, because their own was still to come.",
}
SPECULATION = {
    "spec_decode_num_drafts": "Rows of steps that drafts were proposed for.",
    "spec_decode_num_draft_tokens": "Draft tokens proposed.",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted.",
    "spec_decode_num_undrafted_rows": "Rows of steps with drafts whose requests cannot have any, as under a grammar.",
}
OFFLOADING = {
    "external_prefix_cache_queries": ("num_query_tokens", "Prompt tokens looked up behind the device's prefix cache."),
    "external_prefix_cache_hits": ("num_hit_tokens", "Prompt tokens whose K/V came back to the device."),
    "kv_offload_saved_pages": ("num_saved", "Pages of K/V copied to the host's memory."),
    "kv_offload_lost_pages": ("num_lost", "Pages of K/V evicted without a copy."),
    "kv_offload_broken_pages": ("num_broken", "Pages whose bytes had changed in the host's memory or in their files."),
    "kv_offload_failed_transfers": (
        "num_failed",
        "Reads and writes of files of pages that failed, or were left out then.",
    ),
    "kv_offload_unwritten_pages": ("num_unwritten", "Pages that have not been written to files: they were too slow."),
    "kv_fetched_pages": ("num_fetched", "Pages of K/V that other servers have computed for requests of this one."),
    "kv_fetched_bytes": ("fetched_bytes", "The bytes of these pages."),
    "kv_lost_prompts": ("num_prompts_lost", "Prompts of which a page did not come from another server."),
    "kv_offload_given_up_pages": ("num_not_loaded", "Pages that were to come back, and were computed in the end."),
}
OFFLOADING_GAUGES = {
    "kv_offload_disk_bytes": ("bytes_in_store", "Bytes of files of pages."),
    "kv_kept_pages": ("num_kept", "Pages of K/V in the host's memory that are kept for other servers."),
    "kv_offload_places": ("num_places", "Pages of K/V that the host's memory has room for."),
}
TIERS: dict[str, tuple[Kind, str, dict[str, str]]] = {  # by tier: the host's memory, and files
    "kv_offload_loaded_pages": (
        Counter,
        "Pages of K/V that came back to the device, from the host's memory or from files.",
        {"host": "num_loaded", "disk": "num_loaded_from_store"},
    ),
    "kv_offload_pages": (Gauge, "Pages of K/V away from the device.", {"host": "num_held", "disk": "num_in_store"}),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("time_to_first_token", "From arrival in the engine to the first token."),
    "inter_token_latency_seconds": ("inter_token_latency", "Between two tokens of one request."),
    "request_time_per_output_token_seconds": ("time_per_output_token", "A request's mean after its first token."),
    "e2e_request_latency_seconds": ("e2e_latency", "From arrival in the engine to the last token."),
    "request_queue_time_seconds": ("queue_time", "From arrival to admission."),
    "request_prefill_time_seconds": ("prefill_time", "From admission to the first token."),
    "request_decode_time_seconds": ("decode_time", "From the first token to the last."),
    "request_inference_time_seconds": ("inference_time", "From admission to the last token."),
    "request_num_preemptions": ("request_preemptions", "How often a request was put back."),
    # the older name of inter_token_latency_seconds; dashboards still use it
    "time_per_output_token_seconds": ("inter_token_latency", "Between two tokens of one request."),
    "request_prompt_tokens": ("request_prompt_tokens", "Prompt tokens of a request."),
    "request_generation_tokens": ("request_generation_tokens", "Generated tokens of a request."),
    "iteration_tokens_total": ("iteration_tokens", "Real tokens of a step."),
}


class ServerMetrics:
    """Counts requests and renders all metrics. An engine's metrics have the label `engine`, its number in `sources`.
    The counts of requests are summed over all engines, and have the number 0."""

    def __init__(self, sources: Sequence[Engine], *, prefix: str, model_name: str) -> None:
        self._sources = sources
        self._prefix = prefix
        self._model_name = model_name
        self._labels = (model_name, "0")
        self._counts = HttpCounts()
        self._process = prometheus_client.ProcessCollector(registry=None)  # process_*: memory, CPU time, open files

    def observe_request(self, *, n: int, max_tokens: int) -> None:
        """Counts an accepted request: its choices and its limit of tokens."""
        self._counts.params_n.observe(n)
        self._counts.params_max_tokens.observe(max_tokens)

    def observe_end(self, num_tokens: int) -> None:
        """Counts a request whose choices have all ended. `num_tokens` is the length of the longest."""
        self._counts.max_generation_tokens.observe(num_tokens)

    def observe_limit(self, limit: str) -> None:
        """Counts a request that one of LIMITS has ended or refused."""
        self._counts.limited[limit] += 1

    def observe_prefill(self, outcome: Prefill) -> None:
        """Counts a prompt that another server was to compute."""
        self._counts.prefills[outcome] += 1

    def observe_response(self, *, handler: str, method: str, status: int, seconds: float) -> None:
        """Counts an answer of `handler`, a route's path, and its seconds."""
        key = (handler, method, str(status))
        self._counts.responses[key] = self._counts.responses.get(key, 0) + 1
        self._counts.durations.setdefault((handler, method), Histogram(HTTP_BOUNDS)).observe(seconds)

    def counts(self) -> HttpCounts:
        """This process's own counts."""
        figures = {family.name: family.samples[0].value for family in self._process.collect()}
        self._counts.process = {name: value for name, value in figures.items() if name not in NOT_SUMMED}
        return self._counts

    def render(self, others: HttpCounts | None = None) -> bytes:
        """The text of all metrics. `others` are the counts of the other HTTP processes."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(lambda: self._collect(others)))
        return prometheus_client.generate_latest(registry)

    def _collect(self, others: HttpCounts | None) -> Iterator[Metric]:
        counts = self._counts
        if others is not None:
            counts = HttpCounts()
            counts.add(self._counts)
            counts.add(others)
        for name, doc in GAUGES.items():
            yield self._each(Gauge, name, doc, _figure(name))
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):  # the second is the older name
            yield self._each(Gauge, name, "Share of the KV pages in use, 0 to 1.", _figure("kv_cache_usage"))
        # vLLM's gauge; here all wait for capacity
        name, waiting = "num_requests_waiting_by_reason", _figure("num_requests_waiting")
        yield self._each(Gauge, name, "As it says.", lambda s: {"capacity": waiting(s), "deferred": 0}, "reason")
        yield self._each(Gauge, "engine_alive", "1 while the engine serves.", lambda s: s.death is None)
        yield self._cache_config()
        doc = "Attention backends that failed their self-test at the start; 0 in health."
        yield self._each(Gauge, "attention_backend_failures", doc, lambda s: len(s.info.attention.failures))
        doc = "1: in use. 0: cannot be used here, or failed its self-test."
        yield self._each(Gauge, "attention_backend", doc, _backends, "backend")
        for name, doc in COUNTERS.items():
            yield self._each(Counter, name, doc, _figure(name))
        for name, doc in SPECULATION.items():
            yield self._each(Counter, name, doc, _figure(f"speculation.{name.removeprefix('spec_decode_')}"))
        name, doc = "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by their place in the row."
        accepted = _figure("speculation.num_accepted_tokens_per_pos")
        yield self._each(Counter, name, doc, lambda s: dict(enumerate(accepted(s))), "position")
        if any(source.info.max_loras for source in self._sources):
            yield from self._adapters()
        if any(source.stats.offloading.num_places for source in self._sources):
            yield from self._offloading()
        none = dict.fromkeys(("abort", "error", "length", "stop"), 0)
        ended = _figure("finished")
        yield self._each(Counter, "request_success", "Finished requests.", lambda s: none | ended(s), "finished_reason")
        for name, (field, doc) in HISTOGRAMS.items():
            yield self._metric(Histograms, name, doc, [(labels, _figure(field)(s)) for labels, s in self._engines()])
        for name, doc, count in (
            ("request_max_num_generation_tokens", "Of a request's longest choice.", counts.max_generation_tokens),
            ("request_params_n", "Choices asked for.", counts.params_n),
            ("request_params_max_tokens", "Output limits of requests.", counts.params_max_tokens),
        ):
            yield self._metric(Histograms, name, doc, [(self._labels, count)])
        for name, doc, label, found in (
            ("requests_limited", "Requests cut short or refused.", "limit", counts.limited),
            ("remote_prefills", "Long prompts that other servers were to compute.", "outcome", counts.prefills),
        ):
            yield self._metric(Counter, name, doc, [((*self._labels, key), n) for key, n in found.items()], label)
        requests = Counter("http_requests", "Responses.", labels=["handler", "method", "status"])
        yield _filled(requests, sorted(counts.responses.items()))
        doc = "Until the last byte of the response."
        durations = Histograms("http_request_duration_seconds", doc, labels=["handler", "method"])
        yield _filled(durations, [(labels, counts.durations[labels]) for labels in sorted(counts.durations)])
        yield from self._of_processes({} if others is None else others.process)

    def _of_processes(self, others: Mapping[str, float]) -> Iterator[Metric]:
        """The figures of this process, or their sums if there are others."""
        for family in self._process.collect():
            first = family.samples[0]
            family.samples[0] = first._replace(value=first.value + others.get(family.name, 0.0))
            yield family

    def _engines(self) -> Iterator[tuple[tuple[str, str], Engine]]:
        for number, source in enumerate(self._sources):
            yield (self._model_name, str(number)), source

    def _cache_config(self) -> Metric:
        """The labels of the first engine's cache, because a family has one set of label names."""
        cache = self._sources[0].info.cache_config
        named = {alias: name for alias, name in CACHE_ALIASES.items() if name in cache}
        names = [*cache, *named]
        rows = [
            ((*labels, *(source.info.cache_config.get(named.get(name, name), "") for name in names)), 1)
            for labels, source in self._engines()
        ]
        return self._metric(Gauge, "cache_config_info", "The KV cache's shape.", rows, *names)

    def _adapters(self) -> Iterator[Metric]:
        names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        rows = []
        for labels, source in self._engines():
            listed = (
                _names(source, each) for each in (source.stats.running_of_adapters, source.stats.waiting_of_adapters)
            )
            rows.append(((*labels, source.info.max_loras, *listed), time.time()))
        yield self._metric(Gauge, "lora_requests_info", "The time; the labels name adapters.", rows, *names)
        yield self._each(Gauge, "lora_adapters", "LoRA adapters with a name.", lambda s: len(s.adapters))
        doc = "LoRA adapters in adapter slots of the device."
        yield self._each(Gauge, "lora_adapters_resident", doc, _figure("num_adapters_resident"))
        doc = "LoRA adapters read from their folders by name."
        yield self._each(Counter, "lora_loads", doc, lambda s: s.num_adapter_loads)
        doc, writes = "LoRA adapters written into adapter slots.", _figure("num_adapter_loads")
        yield self._each(Counter, "lora_slot_writes", doc, writes)
        doc = "Bytes written into adapter slots of each device."
        yield self._each(Counter, "lora_slot_written_bytes", doc, lambda s: writes(s) * s.info.adapter_bytes)

    def _offloading(self) -> Iterator[Metric]:
        for kind, figures in ((Counter, OFFLOADING), (Gauge, OFFLOADING_GAUGES)):
            for name, (field, doc) in figures.items():
                yield self._each(kind, name, doc, _figure(f"offloading.{field}"))
        for name, (tiered, doc, fields) in TIERS.items():
            yield self._each(tiered, name, doc, partial(_tiers, fields), "tier")

    def _each(
        self, kind: Kind, name: str, doc: str, value_of: Callable[[Engine], Any], label: str | None = None
    ) -> Metric:
        """A figure of each engine. With a further label, `value_of` returns a mapping from the label's values."""
        if label is None:
            return self._metric(kind, name, doc, [(labels, value_of(source)) for labels, source in self._engines()])
        rows = [((*ls, key), value) for ls, source in self._engines() for key, value in value_of(source).items()]
        return self._metric(kind, name, doc, rows, label)

    def _metric(self, kind: Kind, name: str, doc: str, rows: Iterable[Row], *more: str) -> Metric:
        """A family with the labels of an engine, and `more`."""
        return _filled(kind(f"{self._prefix}{name}", doc, labels=["model_name", "engine", *more]), rows)


class _Collector(Collector):
    def __init__(self, source: Callable[[], Iterator[Metric]]) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        return self._source()


def _filled(family: Any, rows: Iterable[Row]) -> Metric:
    """The family with these labels' values and figures."""
    for labels, value in rows:
        figures = _cumulated(value) if isinstance(value, Histogram) else (value,)
        family.add_metric([*map(str, labels)], *figures)
    filled: Metric = family
    return filled


def _cumulated(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """prometheus-client's form: (upper bound, count up to it) for every bucket, and the sum."""
    buckets, total = [], 0
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets, histogram.total


def _names(source: Engine, identities: Container[int]) -> str:
    """The names of these adapters. Adapters that have been unloaded are left out."""
    return ",".join(adapter.name for adapter in source.adapters.values() if adapter.identity in identities)


def _backends(source: Engine) -> dict[str, int]:
    info = source.info.attention
    return dict.fromkeys(info.failures, 0) | ({info.backend: 1} if info.backend else {})


def _tiers(fields: Mapping[str, str], source: Engine) -> dict[str, int]:
    return {tier: getattr(source.stats.offloading, field) for tier, field in fields.items()}


def _figure(path: str) -> Callable[[Engine], Any]:
    read = attrgetter(path)
    return lambda source: read(source.stats)
