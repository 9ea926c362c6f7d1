"""By what a replica is chosen for a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripts.deploy.affinity import UNIT, prompt_of
from server.engine.routing import BLOCK_TOKENS, Router
from server.shared_counts import Load

IDLE = {3: Load(0, 0), 5: Load(0, 0)}
SYSTEM = "Be brief, and name your sources. " * 40


def prompt(**body: Any) -> bytes:
    return prompt_of(json.dumps(body).encode())


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ("system", "user", "assistant", "user", "assistant")
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


@pytest.mark.parametrize(
    ("first", "later", "other"),
    [
        ({"messages": chat(SYSTEM, "Hi!")}, {"messages": chat(SYSTEM, "Hi!", "Ho!", "So?")}, {"messages": chat("No.")}),
        ({"prompt": SYSTEM}, {"prompt": SYSTEM + "More."}, {"prompt": "x" + SYSTEM}),
        ({"prompt": [*range(400)]}, {"prompt": [*range(420)]}, {"prompt": [7, *range(400)]}),
        ({"prompt": SYSTEM, "prompt_cache_key": "a"},) * 2 + ({"prompt": SYSTEM, "prompt_cache_key": "b"},),
        ({"system": SYSTEM, "messages": chat("a")}, {"system": SYSTEM, "messages": chat("b")}, {"messages": chat("a")}),
    ],
)
def test_a_prompt_that_begins_alike_is_known_to_its_replica_alone(first, later, other):
    router = Router()
    chosen = router.choose(prompt(**first), 0, IDLE).engine
    assert chosen in IDLE
    again = router.choose(prompt(**later), 0, IDLE)
    assert (again.engine, again.num_known >= BLOCK_TOKENS) == (chosen, True)
    assert router.choose(prompt(**other), 0, IDLE).num_known == 0


def test_four_bytes_are_a_token():
    assert len(prompt(prompt="x" * 4003, prompt_cache_key="k")) // UNIT == 1001


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"{}", b'{"messages": 3}', b"\xff", b"[" * 10**6])
def test_a_body_that_is_none_has_no_prompt(body):
    assert prompt_of(body) == b""
    assert Router().choose(prompt_of(body), 0, IDLE).engine in IDLE


def test_characters_that_no_encoding_has_do_no_harm():
    assert prompt(prompt="\ud800" * 40)
