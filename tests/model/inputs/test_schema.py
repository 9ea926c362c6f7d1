from __future__ import annotations

import math
from typing import Annotated

import msgspec
import pytest

from model.inputs.schema import TEXT, TRUTH, check, decode, described_as, integer, number, number_above


class Fields(msgspec.Struct, kw_only=True):
    size: Annotated[int, integer(1, 10)]
    share: Annotated[float, number(0, 1)] | None = None
    factor: Annotated[float, number_above(0, 2)] | None = None
    is_tied: TRUTH | None = None
    name: TEXT | None = None
    ids: Annotated[int | list[int], described_as("an integer or a list of integers")] | None = None


def test_fields_are_converted_and_unknown_ones_ignored():
    fields = decode({"size": 3, "share": 1, "name": "x", "ids": [1, 2], "other": math.nan}, Fields)
    assert fields == Fields(size=3, share=1.0, name="x", ids=[1, 2])
    assert isinstance(fields.share, float)


def test_null_is_the_same_as_absent():
    assert decode({"size": 1, "share": None}, Fields).share is None
    with pytest.raises(ValueError, match=r"^size is missing$"):
        decode({"size": None}, Fields)


def test_every_problem_is_named_at_once():
    raw = {"share": "x", "factor": 0, "is_tied": 1, "name": 5, "ids": ["a"]}
    assert check(raw, Fields) == (
        None,
        [
            "size is missing",
            "share='x' is not a number from 0 to 1",
            "factor=0 is not a number above 0 and at most 2",
            "is_tied=1 is not true or false",
            "name=5 is not a text",
            "ids=['a'] is not an integer or a list of integers",
        ],
    )


@pytest.mark.parametrize("size", [0, 11, 1.0, True, "1", [], math.nan, 10**400])
def test_what_is_no_integer_of_the_range_is_refused(size):
    with pytest.raises(ValueError, match=r"^size=.* is not an integer from 1 to 10$"):
        decode({"size": size}, Fields)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan, math.inf, -math.inf, True, "0.5", 10**400])
def test_what_is_no_number_of_the_range_is_refused(share):
    with pytest.raises(ValueError, match=r"^share=.* is not a number from 0 to 1$"):
        decode({"size": 1, "share": share}, Fields)


def test_half_of_a_surrogate_pair_is_no_text():
    with pytest.raises(ValueError, match=r"name='.ud800' holds half of a surrogate pair"):
        decode({"size": 1, "name": "\ud800"}, Fields)


def test_a_refusal_shows_a_long_or_deep_value_in_part():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    for value in (deep, ["x" * 1000] * 1000, {str(i): i for i in range(1000)}, "y" * 10**6):
        with pytest.raises(ValueError, match=r"^size=") as error:
            decode({"size": value}, Fields)
        assert len(str(error.value)) < 2000
