"""What belongs to one API key is no other key's: responses, and on request the cached prefixes."""

from __future__ import annotations

import asyncio

import httpx
import msgspec
import pytest

from server.engine import wire
from server.http.auth import KeyRing
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.owners import check_owner
from tests.server.support.running import server_of
from tests.server.support.stub_app import DONE, StubClient, client_of, state_of

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
PROMPTS = {
    "/v1/chat/completions": HELLO,
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": HELLO,
    "/invocations": HELLO,
    "/v1/embeddings": {"input": "a"},
}


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


server = server_of(EchoConfig(reply=(97,), step_s=0.02, max_model_len=20_000), api_keys=("one", "two"))


@pytest.mark.parametrize(("owner", "other"), [("one", "two"), ("two", "one")])
def test_a_response_belongs_to_the_key_that_made_it(server, owner, other):
    with server.http(headers=headers(owner)) as own, server.http(headers={"X-Api-Key": other}) as others:
        check_owner(own, others)


def submitted(per_key: bool, path: str, asked: list[tuple[str, str | None]]) -> list[wire.WireRequest]:
    """What the engine gets for each (key, `cache_salt`)."""

    async def ask() -> list[wire.WireRequest]:
        client = StubClient(DONE)
        client.info = msgspec.structs.replace(client.info, embedding_size=4)
        state = state_of(client, api_keys=("one", "two"), prefix_caching_per_key=per_key)
        async with client_of(state) as http:
            for key, salt in asked:
                body = PROMPTS[path] | ({} if salt is None else {"cache_salt": salt})
                await http.post(path, json=body, headers=headers(key))
        return client.submitted

    return asyncio.run(ask())


@pytest.mark.parametrize("path", PROMPTS)
def test_cached_prefixes_are_shared_unless_they_are_kept_by_key(path):
    asked = [("one", None), ("two", None), ("one", "a"), ("two", "a")]
    first, second, third, fourth = (request.cache_salt for request in submitted(False, path, asked))
    assert first == second == 0
    assert third == fourth != 0
    by_key = [request.cache_salt for request in submitted(True, path, asked)]
    assert len({0, *by_key}) == 5
    assert by_key == [request.cache_salt for request in submitted(True, path, asked)]


@pytest.mark.parametrize("path", PROMPTS)
def test_the_engine_knows_which_requests_are_of_one_key(path):
    one, two, one_again = (request.client for request in submitted(False, path, [("one", None), ("two", None)] * 2)[:3])
    assert one == one_again
    assert len({0, one, two}) == 3


def test_a_key_ring_holds_no_key():
    ring = KeyRing(["secret-key"])
    given = [(b"authorization", b"Bearer secret-key")]
    assert ring.check(given) is None
    assert ring.number(given) == 0
    assert ring.number([(b"authorization", b"Bearer other")]) is None
    assert "secret-key" not in repr(vars(ring))


def test_a_client_cannot_name_the_key_of_another(server):
    """The field by which processes tell each other the key."""
    with server.http(headers=headers("one")) as own:
        made = own.post("/v1/responses", json=PROMPTS["/v1/responses"]).json()
    digest = KeyRing(["one"]).digests[0].hex()
    with httpx.Client(base_url=server.url, headers=headers("two") | {"x-pallas-serve-key": digest}) as other:
        assert other.get(f"/v1/responses/{made['id']}").status_code == 404
