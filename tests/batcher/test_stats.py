"""The counts, on a workload small enough to count by hand."""

from __future__ import annotations

import dataclasses
import json

from batcher.stats import EngineStats, Histogram, ModelState, total_of
from tests.batcher.harness import Drive, make_capacity, make_request


def test_a_histogram_counts_values_up_to_and_including_each_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    histogram.observe(2.0, times=3)
    assert histogram.counts == [2, 4, 1]
    assert histogram.total == 18.0


def test_a_copy_does_not_change_with_the_original() -> None:
    stats = EngineStats()
    copy = stats.copy()
    stats.e2e_latency.observe(1.0)
    stats.finished["stop"] = 1
    stats.num_steps = 1
    assert copy == EngineStats()


def test_they_are_plain_enough_to_be_sent() -> None:
    stats = Drive().engine.stats()
    assert json.loads(json.dumps(dataclasses.asdict(stats)))["num_pages"] == 64


def test_times_and_tokens_of_two_requests() -> None:
    drive = Drive(make_capacity(num_slots=1), pipeline_depth=1)
    drive.add(make_request("a", [10, 11, 12, 13, 14], max_tokens=3, ignore_eos=True))
    drive.add(make_request("b", [10, 11, 12, 13, 15], max_tokens=1, ignore_eos=True))
    for now in (1.0, 3.0, 6.0):  # a: three tokens, at these moments
        drive.clock.now = now
        drive.step()
        if now == 3.0:
            stats = drive.engine.stats()
            assert (stats.num_requests_running, stats.num_requests_waiting, stats.num_pages_used) == (1, 1, 2)
            assert stats.kv_cache_usage == 2 / 64
    drive.clock.now = 10.0
    drive.finish()
    stats = drive.engine.stats()
    assert (stats.prompt_tokens, stats.prompt_tokens_computed, stats.generation_tokens) == (10, 6, 4)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (10, 4)
    sources = {"local_compute": 6, "local_cache_hit": 4, "external_kv_transfer": 0}
    assert (stats.prompt_tokens_by_source, stats.prompt_tokens_cached) == (sources, 4)
    assert (stats.request_computed_tokens.total, sum(stats.request_computed_tokens.counts)) == (5 + 1, 2)
    assert stats.finished == {"length": 2}
    assert (stats.num_steps, stats.step_tokens, stats.step_rows) == (4, 8, 4)
    assert (stats.step_tokens_padded, stats.step_rows_padded) == (8 + 1 + 1 + 1, 1 + 1 + 1 + 1)
    assert (stats.queue_time.total, sum(stats.queue_time.counts)) == (1.0 + 10.0, 2)
    assert (stats.time_to_first_token.total, sum(stats.time_to_first_token.counts)) == (1.0 + 10.0, 2)
    assert (stats.inter_token_latency.total, sum(stats.inter_token_latency.counts)) == (2.0 + 3.0, 2)
    assert (stats.time_per_output_token.total, sum(stats.time_per_output_token.counts)) == (2.5, 1)
    assert (stats.e2e_latency.total, sum(stats.e2e_latency.counts)) == (6.0 + 10.0, 2)
    assert stats.decode_time.total == 5.0
    assert stats.inference_time.total == 5.0
    assert (stats.request_preemptions.total, sum(stats.request_preemptions.counts)) == (0.0, 2)
    assert stats.request_prompt_tokens.total == 10
    assert stats.request_generation_tokens.total == 4
    assert stats.iteration_tokens.total == 8
    assert stats.num_requests_running == stats.num_requests_waiting == stats.num_pages_used == 0


def test_a_compilation_after_warm_up_is_counted() -> None:
    drive = Drive()
    assert drive.engine.stats().num_compiles_after_warm_up == 0
    drive.runner._warm.add("one that nobody planned")
    assert drive.engine.stats().num_compiles_after_warm_up == 1


def test_the_figures_of_several_engines_are_added():
    first = EngineStats(num_requests_running=1, num_steps=5, finished={"stop": 2}, num_pages=10, num_pages_used=5)
    second = EngineStats(num_requests_running=2, num_steps=7, finished={"stop": 1, "abort": 4}, num_pages=30)
    for stats, seconds in ((first, 0.03), (second, 0.03), (second, 7000)):
        stats.queue_time.observe(seconds)
    first.running_of_adapters, second.running_of_adapters = {7: 1}, {7: 2, 8: 1}
    first.models, second.models = {0: ModelState.RUNNING, 7: ModelState.DISK}, {0: ModelState.HOST, 8: ModelState.DISK}
    total = total_of([first, second])
    assert total.models == {0: ModelState.RUNNING, 7: ModelState.DISK, 8: ModelState.DISK}
    assert total.running_of_adapters == {7: 3, 8: 1}
    assert (total.num_requests_running, total.num_steps, total.kv_cache_usage) == (3, 12, 0.125)
    assert total.finished == {"stop": 3, "abort": 4}
    assert (sum(total.queue_time.counts), total.queue_time.counts[0]) == (3, 2)
    assert round(total.queue_time.total, 6) == 7000.06
    assert (first.num_steps, first.finished, sum(first.queue_time.counts)) == (5, {"stop": 2}, 1)
