"""/metrics: the engine's statistics and the server's own counts, with the names that vLLM's dashboards use.

The engine counts in its own process. This module exports its last statistics, which are at most a second old. It does
not use prometheus-client's global registry, and it counts nothing per token. With several HTTP processes, the counts of
the others are added to this one's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Protocol

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from batcher.stats import EngineStats, Histogram
from server.api.http_counts import HTTP_BOUNDS, HttpCounts, Prefill
from server.engine.wire import Adapter, EngineInfo

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
NOT_SUMMED = ("process_start_time_seconds", "process_max_fds")  # the process's own, also if there are others

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


class StatsSource(Protocol):
    """The source of one engine's statistics: an `EngineClient`."""

    info: EngineInfo

    @property
    def stats(self) -> EngineStats: ...

    @property
    def adapters(self) -> Mapping[str, Adapter]: ...

    @property
    def num_adapter_loads(self) -> int: ...

    @property
    def death(self) -> str | None: ...


class ServerMetrics:
    """Counts on the HTTP side, and renders all metrics. Those of an engine have the label `engine`, its number in
    `sources`. The HTTP side's counts of requests are of all engines, and have number 0."""

    def __init__(self, sources: Sequence[StatsSource], *, prefix: str, model_name: str) -> None:
        self._sources = sources
        self._prefix = prefix
        self._model_name = model_name
        self._labels = self._labels_of(0)
        self._counts = HttpCounts()
        self._process = prometheus_client.ProcessCollector(registry=None)  # process_*: memory, CPU time, open files

    def observe_request(self, *, n: int, max_tokens: int) -> None:
        """Counts an accepted request: its choices and its limit of tokens."""
        self._counts.params_n.observe(n)
        self._counts.params_max_tokens.observe(max_tokens)

    def observe_end(self, num_tokens: int) -> None:
        """Call it when all choices of a request have ended. `num_tokens` is the length of the longest."""
        self._counts.max_generation_tokens.observe(num_tokens)

    def observe_limit(self, limit: str) -> None:
        """Counts a request that was ended or refused because of one of LIMITS."""
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
            yield self._gauge(name, doc, _figure(name))
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):  # the second is the older name
            yield self._gauge(name, "Share of the KV pages in use, 0 to 1.", lambda source: source.stats.kv_cache_usage)
        yield self._waiting()
        yield self._gauge("engine_alive", "1 while the engine serves.", lambda source: float(source.death is None))
        yield from self._cache_config()
        yield from self._attention()
        for name, doc in COUNTERS.items():
            family = self._family(CounterMetricFamily, name, doc)
            for labels, source in self._engines():
                family.add_metric(labels, getattr(source.stats, name))
            yield family
        yield from self._speculation()
        if any(source.info.max_loras for source in self._sources):
            yield from self._adapters()
        if any(source.stats.offloading.num_places for source in self._sources):
            yield from self._offloading()
        finished = self._family(CounterMetricFamily, "request_success", "Finished requests.", ["finished_reason"])
        for labels, source in self._engines():
            for reason in sorted({"stop", "length", "abort", "error", *source.stats.finished}):
                finished.add_metric([*labels, reason], source.stats.finished.get(reason, 0))
        yield finished
        for name, (field, doc) in HISTOGRAMS.items():
            histograms = self._family(HistogramMetricFamily, name, doc)
            for labels, source in self._engines():
                histograms.add_metric(labels, *_cumulated(getattr(source.stats, field)))
            yield histograms
        max_tokens = counts.max_generation_tokens
        yield self._histogram("request_max_num_generation_tokens", "Of a request's longest choice.", max_tokens)
        yield self._histogram("request_params_n", "Choices asked for.", counts.params_n)
        yield self._histogram("request_params_max_tokens", "Output limits of requests.", counts.params_max_tokens)
        limited = self._family(CounterMetricFamily, "requests_limited", "Requests cut short or refused.", ["limit"])
        for limit, count in counts.limited.items():
            limited.add_metric([*self._labels.values(), limit], count)
        yield limited
        doc = "Long prompts that other servers were to compute."
        prefills = self._family(CounterMetricFamily, "remote_prefills", doc, ["outcome"])
        for outcome, count in counts.prefills.items():
            prefills.add_metric([*self._labels.values(), outcome], count)
        yield prefills
        yield from _http(counts)
        yield from self._of_processes({} if others is None else others.process)

    def _of_processes(self, others: Mapping[str, float]) -> Iterator[Metric]:
        """Figures of this process; with others, their sums."""
        for family in self._process.collect():
            first = family.samples[0]
            family.samples[0] = first._replace(value=first.value + others.get(family.name, 0.0))
            yield family

    def _engines(self) -> Iterator[tuple[list[str], StatsSource]]:
        """The values of each engine's labels, and the engine."""
        for number, source in enumerate(self._sources):
            yield list(self._labels_of(number).values()), source

    def _labels_of(self, number: int) -> dict[str, str]:
        return {"model_name": self._model_name, "engine": str(number)}

    def _cache_config(self) -> Iterator[Metric]:
        """The labels are those of the first engine: a family has one set of names."""
        cache = self._sources[0].info.cache_config
        named = {alias: name for alias, name in CACHE_ALIASES.items() if name in cache}
        names = [*cache, *named]
        family = self._family(GaugeMetricFamily, "cache_config_info", "The KV cache's shape.", names)
        for labels, source in self._engines():
            config = source.info.cache_config
            family.add_metric([*labels, *(config.get(named.get(name, name), "") for name in names)], 1)
        yield family

    def _speculation(self) -> Iterator[Metric]:
        for name, doc in SPECULATION.items():
            family = self._family(CounterMetricFamily, name, doc)
            for labels, source in self._engines():
                family.add_metric(labels, getattr(source.stats.speculation, name.removeprefix("spec_decode_")))
            yield family
        name, doc = "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by their place in the row."
        family = self._family(CounterMetricFamily, name, doc, ["position"])
        for labels, source in self._engines():
            for position, count in enumerate(source.stats.speculation.num_accepted_tokens_per_pos):
                family.add_metric([*labels, str(position)], count)
        yield family

    def _adapters(self) -> Iterator[Metric]:
        names = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        info = self._family(GaugeMetricFamily, "lora_requests_info", "The time; the labels name adapters.", names)
        for labels, source in self._engines():
            stats = source.stats
            listed = [
                _names(source, identities) for identities in (stats.running_of_adapters, stats.waiting_of_adapters)
            ]
            info.add_metric([*labels, str(source.info.max_loras), *listed], time.time())
        yield info
        yield self._gauge("lora_adapters", "LoRA adapters with a name.", lambda source: len(source.adapters))
        doc = "LoRA adapters in adapter slots of the device."
        yield self._gauge("lora_adapters_resident", doc, _figure("num_adapters_resident"))
        loads = self._family(CounterMetricFamily, "lora_loads", "LoRA adapters read from their folders by name.")
        swaps = self._family(CounterMetricFamily, "lora_slot_writes", "LoRA adapters written into adapter slots.")
        doc = "Bytes written into adapter slots of each device."
        written = self._family(CounterMetricFamily, "lora_slot_written_bytes", doc)
        for labels, source in self._engines():
            loads.add_metric(labels, source.num_adapter_loads)
            swaps.add_metric(labels, source.stats.num_adapter_loads)
            written.add_metric(labels, source.stats.num_adapter_loads * source.info.adapter_bytes)
        yield from (loads, swaps, written)

    def _offloading(self) -> Iterator[Metric]:
        for name, (field, doc) in OFFLOADING.items():
            family = self._family(CounterMetricFamily, name, doc)
            for labels, source in self._engines():
                family.add_metric(labels, getattr(source.stats.offloading, field))
            yield family
        doc = "Pages of K/V that came back to the device, from the host's memory or from files."
        loaded = self._family(CounterMetricFamily, "kv_offload_loaded_pages", doc, ["tier"])
        held = self._family(GaugeMetricFamily, "kv_offload_pages", "Pages of K/V away from the device.", ["tier"])
        for labels, source in self._engines():
            counts = source.stats.offloading
            loaded.add_metric([*labels, "host"], counts.num_loaded)
            loaded.add_metric([*labels, "disk"], counts.num_loaded_from_store)
            held.add_metric([*labels, "host"], counts.num_held)
            held.add_metric([*labels, "disk"], counts.num_in_store)
        yield from (loaded, held)
        doc = "Bytes of files of pages."
        yield self._gauge("kv_offload_disk_bytes", doc, lambda s: s.stats.offloading.bytes_in_store)
        doc = "Pages of K/V in the host's memory that are kept for other servers."
        yield self._gauge("kv_kept_pages", doc, lambda s: s.stats.offloading.num_kept)
        doc = "Pages of K/V that the host's memory has room for."
        yield self._gauge("kv_offload_places", doc, lambda s: s.stats.offloading.num_places)

    def _attention(self) -> Iterator[Metric]:
        doc = "Attention backends that failed their self-test at the start; 0 in health."
        yield self._gauge("attention_backend_failures", doc, lambda source: len(source.info.attention.failures))
        doc = "1: in use. 0: cannot be used here, or failed its self-test."
        family = self._family(GaugeMetricFamily, "attention_backend", doc, ["backend"])
        for labels, source in self._engines():
            info = source.info.attention
            states = {**dict.fromkeys(info.failures, 0), **({info.backend: 1} if info.backend else {})}
            for backend, value in states.items():
                family.add_metric([*labels, backend], value)
        yield family

    def _waiting(self) -> Metric:
        """vLLM's gauge of waiting requests by reason. Here all wait for capacity, so `deferred` is always 0."""
        family = self._family(GaugeMetricFamily, "num_requests_waiting_by_reason", "As it says.", ["reason"])
        for labels, source in self._engines():
            for reason, count in (("capacity", source.stats.num_requests_waiting), ("deferred", 0)):
                family.add_metric([*labels, reason], count)
        return family

    def _family[F: (GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily)](
        self, kind: type[F], name: str, doc: str, more: list[str] | None = None
    ) -> F:
        return kind(f"{self._prefix}{name}", doc, labels=[*self._labels, *(more or [])])

    def _gauge(self, name: str, doc: str, value_of: Callable[[StatsSource], float]) -> Metric:
        family = self._family(GaugeMetricFamily, name, doc)
        for labels, source in self._engines():
            family.add_metric(labels, value_of(source))
        return family

    def _histogram(self, name: str, doc: str, histogram: Histogram) -> Metric:
        family = self._family(HistogramMetricFamily, name, doc)
        family.add_metric(list(self._labels.values()), *_cumulated(histogram))
        return family


class _Collector(Collector):
    def __init__(self, source: Callable[[], Iterator[Metric]]) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        return self._source()


def _http(counts: HttpCounts) -> Iterator[Metric]:
    requests = CounterMetricFamily("http_requests", "Responses.", labels=["handler", "method", "status"])
    for key, count in sorted(counts.responses.items()):
        requests.add_metric(list(key), count)
    yield requests
    durations = HistogramMetricFamily(
        "http_request_duration_seconds", "Until the last byte of the response.", labels=["handler", "method"]
    )
    for labels, histogram in sorted(counts.durations.items(), key=lambda item: item[0]):
        durations.add_metric(list(labels), *_cumulated(histogram))
    yield durations


def _cumulated(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """prometheus-client's form: (upper bound, count up to it) for every bucket, and the sum."""
    buckets, total = [], 0
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets, histogram.total


def _names(source: StatsSource, identities: Container[int]) -> str:
    """The names of these adapters. One that has been unloaded has none."""
    return ",".join(adapter.name for adapter in source.adapters.values() if adapter.identity in identities)


def _figure(name: str) -> Callable[[StatsSource], float]:
    return lambda source: float(getattr(source.stats, name))
