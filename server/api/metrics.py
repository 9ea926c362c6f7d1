"""/metrics: the engine's statistics and the server's own counts, with the names that vLLM's dashboards use.

The engine counts in its own process. This module exports its last statistics, which are at most a second old. It does
not use prometheus-client's global registry, and it counts nothing per token. With several HTTP processes, the counts of
the others are added to this one's.
"""

from __future__ import annotations

import time
import tomllib
from collections import Counter as Tally
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily as Histograms
from prometheus_client.core import Metric

from batcher.stats import Histogram, ModelState
from server.api.http_counts import HTTP_BOUNDS, MOST_NAMES, OTHERS, HttpCounts
from server.engine.protocol import Engine

Kind = type[Counter] | type[Gauge] | type[Histograms]
Row = tuple[Sequence[object], Any]  # the values of a family's labels, and the figure
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
NOT_SUMMED = ("process_start_time_seconds", "process_max_fds")  # not summed over the HTTP processes

# vLLM's labels of cache_config_info -> ours with the same meaning
CACHE_ALIASES = {"block_size": "page_size", "num_gpu_blocks": "num_pages"}

# by part of an engine and kind: name -> place in its statistics, description, label
FIGURES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KINDS: dict[str, Kind] = {"Counter": Counter, "Gauge": Gauge, "Histogram": Histograms}


class ServerMetrics:
    """Counts requests and renders all metrics. An engine's metrics have the label `engine`, its number in `sources`.
    The counts of requests are summed over all engines, and have the number 0."""

    def __init__(
        self,
        sources: Sequence[Engine],
        *,
        prefix: str,
        model_name: str,
        key_names: Sequence[str] = (),
        clients: Sequence[int] = (),
    ) -> None:
        self._names_of_clients = dict(list(zip(clients, key_names, strict=False))[:MOST_NAMES])
        self._key_names = frozenset(key_names[:MOST_NAMES])
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

    def observe_usage(self, key: str | None, model: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """Counts a request of the API key of this name, if there are keys, and its tokens."""
        seen = self._counts.model_requests
        names = {"model": model if model in seen or len(seen) < MOST_NAMES else OTHERS}
        if key is not None:
            names["key"] = key if key in self._key_names else OTHERS
        for kind, name in names.items():
            self._counts.add_usage(kind, name, prompt_tokens=num_prompt_tokens, generation_tokens=num_tokens)

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
        registry: Any = SimpleNamespace(collect=lambda: self._collect(others))  # no more of one is used
        return prometheus_client.generate_latest(registry)

    def _collect(self, others: HttpCounts | None) -> Iterator[Metric]:
        counts = self._counts
        if others is not None:
            counts = HttpCounts()
            counts.add(self._counts)
            counts.add(others)
        yield from self._figures("engine")
        # vLLM's gauge; here all wait for capacity
        name, waiting = "num_requests_waiting_by_reason", attrgetter("stats.num_requests_waiting")
        yield self._each(Gauge, name, "As it says.", lambda s: {"capacity": waiting(s), "deferred": 0}, "reason")
        yield self._each(Gauge, "engine_alive", "1 while the engine serves.", lambda s: s.death is None)
        yield self._cache_config()
        doc = "Attention backends that failed their self-test at the start; 0 in health."
        yield self._each(Gauge, "attention_backend_failures", doc, lambda s: len(s.info.attention.failures))
        doc = "1: in use. 0: cannot be used here, or failed its self-test."
        yield self._each(Gauge, "attention_backend", doc, _backends, "backend")
        if any(source.info.max_loras for source in self._sources):
            yield from self._adapters()
        if any(source.info.max_models for source in self._sources):
            doc, none = "Models, by where their weights are.", dict.fromkeys(ModelState, 0)
            yield self._each(Gauge, "models", doc, lambda s: none | Tally(s.stats.models.values()), "state")
            yield from self._figures("models")
        if any(source.stats.prediction_error for source in self._sources):
            yield from self._targets()
        if any(source.stats.offloading.num_places for source in self._sources):
            yield from self._figures("offloading")
        no_ends = dict.fromkeys(("abort", "error", "length", "stop"), 0)
        ended = attrgetter("stats.finished")
        yield self._each(
            Counter, "request_success", "Finished requests.", lambda s: no_ends | ended(s), "finished_reason"
        )
        yield from self._figures("http", [(self._labels, counts)])
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
        yield from self._figures("adapters")
        doc = "LoRA adapters read from their folders by name."
        yield self._each(Counter, "lora_loads", doc, lambda s: s.num_adapter_loads)
        doc = "Bytes written into adapter slots of each device."
        yield self._each(
            Counter, "lora_slot_written_bytes", doc, lambda s: s.stats.num_adapter_loads * s.info.adapter_bytes
        )

    def _targets(self) -> Iterator[Metric]:
        yield from self._figures("targets")
        rows = []
        for labels, source in self._engines():
            by_key: Tally[tuple[str, str, str]] = Tally()
            for (client, targets, outcome), count in source.stats.by_targets.items():
                by_key[self._names_of_clients.get(client, OTHERS if client else ""), targets, outcome] += count
            rows += [((*labels, *names), count) for names, count in sorted(by_key.items())]
        doc = "Requests with targets (ITL/TTFT in ms), by their API key and by whether they were kept."
        yield self._metric(Counter, "requests_by_targets", doc, rows, "api_key", "targets", "outcome")

    def _figures(self, part: str, sources: Sequence[tuple[tuple[str, str], Any]] = ()) -> Iterator[Metric]:
        """The figures of a part. `sources` have them, with their labels; by default the engines' statistics."""
        sources = sources or [(labels, source.stats) for labels, source in self._engines()]
        for kind, figures in FIGURES[part].items():
            for name, (place, doc, *label) in figures.items():
                read = _figure(place)
                yield self._family(KINDS[kind], name, doc, [(ls, read(source)) for ls, source in sources], *label)

    def _each(
        self, kind: Kind, name: str, doc: str, value_of: Callable[[Engine], Any], label: str | None = None
    ) -> Metric:
        """A figure of each engine."""
        return self._family(kind, name, doc, [(labels, value_of(source)) for labels, source in self._engines()], label)

    def _family(self, kind: Kind, name: str, doc: str, rows: Iterable[Row], label: str | None = None) -> Metric:
        """With a further label, each figure is a list, or a mapping from the label's values."""
        if label is None:
            return self._metric(kind, name, doc, rows)
        split = [((*labels, key), value) for labels, figure in rows for key, value in _items(figure)]
        return self._metric(kind, name, doc, split, label)

    def _metric(self, kind: Kind, name: str, doc: str, rows: Iterable[Row], *more: str) -> Metric:
        """A family with the labels of an engine, and `more`."""
        return _filled(kind(f"{self._prefix}{name}", doc, labels=["model_name", "engine", *more]), rows)


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


def _items(figure: Mapping[Any, Any] | Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    return figure.items() if isinstance(figure, Mapping) else enumerate(figure)


def _figure(place: str | Mapping[str, str]) -> Callable[[Any], Any]:
    """Reads the figure at this place, or those at several places, by the same keys."""
    if isinstance(place, str):
        return attrgetter(place)
    reads = {key: attrgetter(each) for key, each in place.items()}
    return lambda source: {key: read(source) for key, read in reads.items()}
