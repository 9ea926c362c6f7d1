"""Flags with which an instrument would not measure what it says: each is named, and nothing starts."""

from __future__ import annotations

from types import ModuleType

import pytest

from scripts.lab import adapters, agreement, grpo, kv_offloading, plan, routing, serving, startup, weight_updates

LOOP = ["--model", "m", "--max-concurrency", "1"]
CHAT = ["--model", "1b", "--workload", "chat"]
ACCOUNT = ["--target", "v9:1x1", "--model", "1b"]


@pytest.mark.parametrize(
    ("instrument", "flags", "words"),
    [
        (adapters, ["--streams", "4"], "--streams is at least 8"),
        (agreement, ["--samples", "0"], "--samples 0"),
        (grpo, ["--output", "out", "--group-size", "1"], "--group-size 1"),
        (kv_offloading, ["--conversations", "100"], "--conversations is at least 4 times --pool 40"),
        (kv_offloading, ["--lengths", "9000"], "--context 8192 is shorter"),
        (routing, ["--prefix-len", "0"], "at least 1"),
        (serving, ["--model", "m"], "serving: "),  # neither loop
        (serving, [*LOOP, "--goodput", "speed:3"], "--goodput"),
        (serving, [*LOOP, "--num-prompts", "0"], "--num-prompts"),
        (serving, [*LOOP, "--find-goodput", "ttft=0"], "--find-goodput"),
        (startup, ACCOUNT, "--target v9:1x1"),
        (weight_updates, ["--updates", "1"], "--updates 1"),
        (plan, ["--model", "1b", "--target", "v9:1x1"], "--target v9:1x1"),
        (plan, ["--model", "1b", "--target", "0xh100"], "--target 0xh100"),
        (plan, ["--model", "1b", "--workload", "poetry"], "--workload poetry"),
        (plan, ["--model", "1b", "--workload", "nothing.csv"], "--workload nothing.csv: there is no such file"),
        (plan, ["--model", "1b", "--workload", "200000/1"], "--workload 200000/1: a request has 200001 tokens"),
        (plan, [*CHAT, "--slo", "speed_ms=3"], "--slo speed_ms=3"),
        (plan, ["--model", "1b", "--slo", "ttft_ms=300"], "--slo needs --workload"),
        (plan, [*CHAT, "--price-per-hour", "-3"], "--price-per-hour must be positive"),
        (plan, [*CHAT, "--price-per-hour", "3", "--api-price", "Me=free"], "--api-price Me=free"),
        (plan, [*CHAT, "--request-rate", "3", "--max-concurrency", "3"], "exclude each other"),
        (plan, ["--model", "1b", "--target", "8xh100", "--tensor-parallel-size", "3"], "--tensor-parallel-size 3"),
        (plan, [*CHAT, "--speculative-config", "{}"], "--speculative-config is not simulated"),
        (plan, ["--model", "1b", "--max-num-seqs", "0"], "--max-num-seqs"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named(
    instrument: ModuleType, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert instrument.main(flags) == 2
    assert words in capsys.readouterr().err
