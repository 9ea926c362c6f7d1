"""The table of sampling parameters: complete, and the one place where a parameter is described."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from batcher.request import SamplingParams
from batcher.sampling_table import PARAMETERS, Range, is_asked
from batcher.slots import SlotLayout, sampling_columns
from batcher.step import Variant
from server.api.request.schemas import ChatRequest, CompletionRequest

ROOT = Path(__file__).parents[2]


def test_every_field_has_one_entry() -> None:
    assert PARAMETERS.keys() == {field.name for field in dataclasses.fields(SamplingParams)}
    for body in (ChatRequest, CompletionRequest):
        assert PARAMETERS.keys() - {"grammar"} <= set(body.__struct_fields__), "the server reads no such field"


def test_columns_lie_one_after_the_other() -> None:
    assert SlotLayout.KV_LEN == SlotLayout.LAST_TOKEN + 1  # one scatter writes both
    assert SlotLayout.ADAPTER == SlotLayout.KV_LEN + 1
    end = SlotLayout.ADAPTER + 1
    for column in sampling_columns():
        assert SlotLayout.at(column.name) == end
        end += column.width
    assert end == SlotLayout.PAGE_TABLE
    assert SlotLayout.width(5) == end + 5


def test_defaults_are_in_range() -> None:
    for field in dataclasses.fields(SamplingParams):
        interval = PARAMETERS[field.name].range
        if interval is not None and isinstance(field.default, int | float):
            assert field.default in interval, field.name


@pytest.mark.parametrize(
    ("interval", "inside", "outside", "words"),
    [
        (Range(0, 2), [0, 1.5, 2], [-0.1, 2.1, float("nan"), float("inf")], "in [0, 2]"),
        (Range(0, 1, low_open=True), [1e-9, 1], [0, 1.1, float("nan")], "in (0, 1]"),
        (Range(-1), [-1, 10**30], [-2, float("nan")], "at least -1"),
        (Range(1e-3, 1e3), [0.001, 1000], [0, 1e-50, 1e50], "in [0.001, 1000]"),
    ],
)
def test_ranges(interval: Range, inside: list[float], outside: list[float], words: str) -> None:
    assert all(number in interval for number in inside)
    assert not any(number in interval for number in outside)
    assert str(interval) == words


def test_numbers_in_range_are_finite_in_float32() -> None:
    floats = {column.name for column in sampling_columns() if column.dtype == "float32" and column.width == 1}
    for name in floats:
        interval = PARAMETERS[name].range
        assert interval is not None
        assert np.isfinite(np.float32([interval.low, interval.high])).all()


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"temperature": 0.0}, set()),
        ({"temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3}, {"temperature"}),
        ({"temperature": 0.0, "min_tokens": 1}, {"min_tokens"}),
        ({"temperature": 0.0, "logit_bias": ((3, 0.0),)}, {"logit_bias"}),
        ({"temperature": 0.0, "logprobs": 0}, {"logprobs"}),
        ({"temperature": 0.0, "sampled_logprobs": True}, {"sampled_logprobs"}),
        ({"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.0}, {"repetition_penalty"}),
    ],
)
def test_what_needs_more_than_the_greedy_program(changes: dict[str, object], asked: set[str]) -> None:
    sampling = SamplingParams(max_tokens=1, **changes)
    needing = {
        name for name, entry in PARAMETERS.items() if entry.variant is Variant.SAMPLE and is_asked(sampling, name)
    }
    assert needing == asked
