"""/metrics: the names that dashboards know, and that the numbers are the engine's."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from batcher.scheduling.page_moves import OffloadingCounts
from batcher.stats import EngineStats
from server.api.metrics import ServerMetrics
from server.engine.wire import Adapter, EngineInfo
from tests.server.support.requests import wait_until


@dataclass
class Source:
    stats: EngineStats
    info: EngineInfo
    death: str | None = None
    adapters: dict[str, Adapter] = field(default_factory=dict)
    num_adapter_loads: int = 0
    missing: frozenset[str] = frozenset()


def samples(metrics: ServerMetrics) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """name -> labels -> value, read back with prometheus-client's own parser."""
    found: dict[str, dict] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def metrics_of(
    stats: EngineStats, prefix: str = "pallas_serve:", max_loras: int = 0, max_models: int = 0, **options
) -> ServerMetrics:
    cache = {"page_size": "16", "num_pages": "99"}
    info = EngineInfo(max_model_len=10, vocab_size=10, cache_config=cache, max_loras=max_loras, max_models=max_models)
    return ServerMetrics([Source(stats, info)], prefix=prefix, model_name="m", **options)


LABELS = (("engine", "0"), ("model_name", "m"))


def test_gauges_and_counters_are_the_engines():
    stats = EngineStats(num_requests_running=3, num_pages=8, num_pages_used=2, generation_tokens=70, num_preemptions=1)
    stats.finished = {"stop": 4, "abort": 1}
    found = samples(metrics_of(stats))
    assert found["pallas_serve:num_requests_running"] == {LABELS: 3}
    assert found["pallas_serve:kv_cache_usage_perc"] == {LABELS: 0.25}
    assert found["pallas_serve:generation_tokens_total"] == {LABELS: 70}
    assert found["pallas_serve:num_preemptions_total"] == {LABELS: 1}
    assert found["pallas_serve:engine_alive"] == {LABELS: 1}
    reasons = {dict(labels)["finished_reason"]: v for labels, v in found["pallas_serve:request_success_total"].items()}
    assert reasons == {"stop": 4, "length": 0, "abort": 1, "error": 0}
    (labels,) = found["pallas_serve:cache_config_info"]
    assert dict(labels) == dict(LABELS) | {
        "page_size": "16",
        "num_pages": "99",
        "block_size": "16",
        "num_gpu_blocks": "99",
    }


def test_accepted_drafts_are_counted_by_their_place():
    stats = EngineStats()
    for proposed, accepted in ((3, 3), (3, 1), (2, 0), (0, 0)):
        stats.speculation.observe(proposed, accepted)
    found = samples(metrics_of(stats, prefix="vllm:"))
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert {dict(labels)["position"]: value for labels, value in found[name].items()} == {"0": 2, "1": 1, "2": 1}
    assert found["vllm:spec_decode_num_drafts_total"] == {LABELS: 3}
    assert found["vllm:spec_decode_num_draft_tokens_total"] == {LABELS: 8}
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == {LABELS: 4}


def test_histograms_are_cumulated():
    stats = EngineStats()
    for seconds in (0.0005, 0.03, 0.03, 5000):
        stats.time_to_first_token.observe(seconds)
    found = samples(metrics_of(stats))
    name = "pallas_serve:time_to_first_token_seconds"
    buckets = {dict(labels)["le"]: value for labels, value in found[f"{name}_bucket"].items()}
    assert (buckets["0.001"], buckets["0.02"], buckets["0.04"], buckets["2560.0"], buckets["+Inf"]) == (1, 1, 3, 3, 4)
    assert found[f"{name}_count"] == {LABELS: 4}
    assert found[f"{name}_sum"] == {LABELS: 5000.0605}


def test_the_names_of_dashboards_are_there():
    found = samples(metrics_of(EngineStats(), prefix="vllm:"))
    expected = [
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
        *("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
        *("request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
        *("e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket", "iteration_tokens_total_bucket"),
        *("request_prefill_time_seconds_bucket", "request_decode_time_seconds_bucket", "request_params_n_bucket"),
        *("request_prompt_tokens_bucket", "request_generation_tokens_bucket", "request_params_max_tokens_bucket"),
        *("request_time_per_output_token_seconds_bucket", "cache_config_info", "request_inference_time_seconds_bucket"),
        *("time_per_output_token_seconds_bucket", "gpu_cache_usage_perc", "request_max_num_generation_tokens_bucket"),
        *("request_num_preemptions_bucket", "num_requests_waiting_by_reason", "prompt_tokens_cached_total"),
        *("request_prefill_kv_computed_tokens_bucket", "engine_sleep_state", "prompt_tokens_by_source_total"),
        *("external_prefix_cache_queries_total", "external_prefix_cache_hits_total"),
    ]
    assert [name for name in expected if f"vllm:{name}" not in found] == []


def test_old_names_have_the_numbers_of_the_new_ones():
    stats = EngineStats(num_pages=8, num_pages_used=2, num_requests_waiting=4)
    stats.inter_token_latency.observe(0.02)
    found = samples(metrics_of(stats, prefix="vllm:"))
    assert found["vllm:gpu_cache_usage_perc"] == found["vllm:kv_cache_usage_perc"]
    for part in ("bucket", "sum", "count"):
        new, old = "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"
        assert found[f"{old}_{part}"] == found[f"{new}_{part}"]
    reasons = {dict(labels)["reason"]: v for labels, v in found["vllm:num_requests_waiting_by_reason"].items()}
    assert reasons == {"capacity": 4, "deferred": 0}


def test_the_process_is_measured():
    found = samples(metrics_of(EngineStats()))
    assert found["process_resident_memory_bytes"][()] > 1e6
    assert found["process_open_fds"][()] > 0


def test_what_the_server_counts_itself():
    metrics = metrics_of(EngineStats())
    metrics.observe_request(n=3, max_tokens=100)
    metrics.observe_end(70)
    metrics.observe_limit("key_share")
    metrics.observe_response(handler="/health", method="GET", status=200, seconds=0.02)
    metrics.observe_response(handler="/health", method="GET", status=503, seconds=0.02)
    found = samples(metrics)
    assert found["pallas_serve:request_params_n_sum"] == {LABELS: 3}
    assert found["pallas_serve:request_params_max_tokens_sum"] == {LABELS: 100}
    assert found["pallas_serve:request_max_num_generation_tokens_sum"] == {LABELS: 70}
    limited = {dict(labels)["limit"]: v for labels, v in found["pallas_serve:requests_limited_total"].items()}
    assert limited == {"deadline_waiting": 0, "deadline_running": 0, "key_share": 1}
    base = (("handler", "/health"), ("method", "GET"))
    assert found["http_requests_total"] == {(*base, ("status", "200")): 1, (*base, ("status", "503")): 1}
    assert found["http_request_duration_seconds_count"] == {base: 2}


def test_a_dead_engine_is_seen_and_one_that_sleeps():
    stats = EngineStats()
    metrics = metrics_of(stats)
    awake, dropped = ((*LABELS, ("sleep_state", state)) for state in ("awake", "discard_all"))
    assert samples(metrics)["pallas_serve:engine_sleep_state"] == {awake: 1}
    metrics._sources[0].death, stats.sleep_states = "killed", {"awake": 0, "discard_all": 1}
    found = samples(metrics)
    assert found["pallas_serve:engine_alive"] == {LABELS: 0}
    assert found["pallas_serve:engine_sleep_state"] == {awake: 0, dropped: 1}


def test_the_usage_of_few_keys_has_their_names():
    names = [f"key-{number}" for number in range(101)]
    metrics = metrics_of(EngineStats(), prefix="", key_names=names)
    for name in names:
        metrics.observe_usage(name, "m", 2, 3)
    metrics.observe_usage("key-100", "m", 2, 3)
    found = {dict(labels)["key"]: count for labels, count in samples(metrics)["key_prompt_tokens_total"].items()}
    assert (len(found), found["key-99"], found["others"]) == (101, 2, 4)


def test_a_running_server_exports_its_engines_numbers(scripted):
    with scripted.http() as http:
        http.post("/v1/completions", json={"prompt": "a"})
        counted = 'handler="/v1/completions",method="POST",status="200"'
        wait_until(lambda: counted in http.get("/metrics").text)  # a response is counted after its last byte
        text = http.get("/metrics").text
        assert http.get("/metrics").headers["content-type"].startswith("text/plain")
    names = {family.name for family in text_string_to_metric_families(text)}
    assert "pallas_serve:generation_tokens" in names
    lines = [line for line in text.splitlines() if "request_max_num_generation_tokens_sum" in line]
    assert float(lines[0].split()[-1]) >= 16
    lines = [line for line in text.splitlines() if line.startswith("http_requests_total{")]
    assert any(counted in line for line in lines)


DASHBOARD = Path(__file__).parents[3] / "scripts/deploy/grafana-dashboard.json"


@pytest.mark.parametrize("prefix", ["pallas_serve:", "vllm:"])
def test_every_query_of_the_dashboard_is_about_metrics_and_labels_that_are_exported(prefix):
    """The overlays of Kubernetes have vLLM's prefix. The dashboard finds the one that there is."""
    stats = EngineStats(finished={"stop": 1}, offloading=OffloadingCounts(num_places=1))
    metrics = metrics_of(stats, prefix=prefix, max_loras=1, max_models=2)
    metrics.observe_usage(None, "pirate", 3, 4)
    metrics.observe_response(handler="/v1/chat/completions", method="POST", status=200, seconds=0.1)
    exported = {name: {label for labels in found for label, _ in labels} for name, found in samples(metrics).items()}
    dashboard = json.loads(DASHBOARD.read_text())
    variables = {entry["name"]: entry for entry in dashboard["templating"]["list"]}
    by_name, found_in = variables["prefix"]["query"], variables["prefix"]["regex"].strip("/")
    names = [name for name in exported if re.fullmatch(by_name.removeprefix("metrics(").removesuffix(")"), name)]
    assert {re.fullmatch(found_in, name)[1] for name in names} == {prefix}
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions.append(variables["model_name"]["query"])
    expressions = [expression.replace("${prefix}", prefix) for expression in expressions]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) > 20
    for expression in expressions:
        names = re.findall(rf"\b(?:{prefix}|http_|process_)\w+", expression)
        assert names and all(name in exported for name in names), expression
        labels = {*re.findall(r"(\w+)=~", expression), *re.findall(r"by \((\w+)\)", expression)}
        assert labels <= set().union(*(exported[name] for name in names)), expression
