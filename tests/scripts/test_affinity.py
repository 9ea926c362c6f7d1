"""Where a request goes among replicas."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.deploy.affinity import KEY_CHARS, affinity_key, ranked

LOADS = st.dictionaries(st.text(min_size=1), st.integers(0, 100), min_size=1, max_size=8)


def key(**body: Any) -> str:
    return affinity_key(json.dumps(body).encode())


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ("system", "user", "assistant", "user", "assistant")
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def test_later_turns_have_the_key_of_the_first():
    first = key(messages=chat("Be brief.", "Hello!"))
    assert key(messages=chat("Be brief.", "Hello!", "Hi.", "And now?")) == first
    assert key(messages=chat("Be brief.", "Good morning!")) != first
    assert key(messages=chat("Be long.", "Hello!")) != first
    assert key(system="Be brief.", messages=[{"role": "user", "content": "Hello!"}]) != first


def test_a_key_of_the_client_counts_first():
    assert key(prompt_cache_key="a", prompt="x") == key(prompt_cache_key="a", prompt="y") == "a"
    assert key(user="a", messages=chat("s", "u")) == "a"


def test_prompts_of_text_and_of_ids_have_keys():
    assert key(prompt="x" * 1000) == "x" * KEY_CHARS
    assert key(prompt=[1, 2, 3]) != key(prompt=[1, 2, 4])
    assert key(input=["a"]) == key(input=["a"], model="m")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"{}", b'{"messages": 3}', b'{"messages": [3]}', b"\xff"])
def test_a_body_that_is_none_has_no_key(body):
    assert affinity_key(body) == ""


@given(load=LOADS, text=st.text(), slack=st.integers(0, 100))
def test_every_replica_is_tried_once_and_none_far_busier_than_the_idlest_first(load, text, slack):
    order = ranked(text, load, slack)
    assert sorted(order) == sorted(load)
    assert load[order[0]] <= min(load.values()) + slack
    if not text:
        assert load[order[0]] == min(load.values())


@given(names=st.sets(st.text(min_size=1), min_size=2, max_size=8), text=st.text(min_size=1))
def test_the_end_of_a_replica_moves_its_own_keys_only(names, text):
    first, *others = ranked(text, dict.fromkeys(names, 0), slack=0)
    for gone in others:
        assert ranked(text, dict.fromkeys(names - {gone}, 0), slack=0)[0] == first
