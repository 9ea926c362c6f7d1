"""What the engine says, sorted by API server: each HTTP process gets all of its own and nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batcher.delivery import Tokens
from batcher.request import FinishReason, RequestOutput
from batcher.stats import EngineStats
from server.engine import outbox, wire
from server.engine.outbox import FIRST, Addressed, ApiServer, Sorter
from server.engine.protocol import Receivers

NUM_API_SERVERS = 3


class Heard:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def on_output(self, output: wire.Output) -> None:
        assert not self.ended
        self.tokens += output.token_ids
        self.ended = output.finish_reason is not None

    def on_tokens(self, token_ids) -> None:
        assert not self.ended
        self.tokens += token_ids


def output(number: int, *token_ids: int, end: bool = False) -> RequestOutput:
    reason = FinishReason.LENGTH if end else None
    return RequestOutput(request_id=f"r{number}", number=number, token_ids=token_ids, finish_reason=reason)


@given(st.data())
def test_each_api_server_hears_its_own_requests(data: st.DataObject) -> None:
    """Steps of random requests, in random gatherings; the oracle keeps each request's tokens by itself."""
    api_servers = data.draw(
        st.lists(st.integers(1, NUM_API_SERVERS), min_size=1, max_size=8)
    )  # by the request's number
    receivers = {api_server: Receivers() for api_server in range(1, NUM_API_SERVERS + 1)}
    heard = [Heard() for _ in api_servers]
    expected: list[list[int]] = [[] for _ in api_servers]
    for number, api_server in enumerate(api_servers):
        receivers[api_server][f"r{number}"] = heard[number]
    sorter = Sorter()
    sorter.api_servers = {FIRST, *receivers}
    items: list = []
    live: set[int] = set()
    waiting = list(range(len(api_servers)))
    next_token = 0

    def flush() -> None:
        for api_server, own in sorter.sort(items).items():
            for message in outbox.messages(own):
                if api_server == FIRST:
                    raise AssertionError("the first API server has sent no request")
                receivers[api_server].take(message)
        items.clear()

    for _ in range(data.draw(st.integers(1, 8))):
        if waiting and data.draw(st.booleans()):
            number = waiting.pop(0)
            items.append(Addressed(api_servers[number], output(number, next_token)))
            expected[number].append(next_token)
            live.add(number)
            next_token += 1
        rows = sorted(data.draw(st.sets(st.sampled_from(sorted(live))))) if live else []
        if rows:
            several = data.draw(st.booleans())
            counts = [data.draw(st.integers(1, 3)) if several else 1 for _ in rows]
            ids = list(range(next_token, next_token + sum(counts)))
            next_token += len(ids)
            start = 0
            for number, count in zip(rows, counts, strict=True):
                expected[number] += ids[start : start + count]
                start += count
            columns = Tokens(np.array(rows), np.array(ids, np.int32), np.array(counts, np.int32) if several else None)
            items.append(columns)
        if live and data.draw(st.booleans()):
            number = data.draw(st.sampled_from(sorted(live)))
            items.append(Addressed(api_servers[number], output(number, end=True)))
            live.remove(number)
        if data.draw(st.booleans()):
            flush()
    flush()
    assert [one.tokens for one in heard] == expected
    assert [one.ended for one in heard] == [n not in live and n not in waiting for n in range(len(api_servers))]
    assert set(sorter.api_server_of) == live  # nothing is kept of those that have ended


def test_a_removed_api_server_hears_nothing_and_the_others_go_on() -> None:
    sorter = Sorter()
    sorter.api_servers = {FIRST, 1, 2}
    sorter.sort([Addressed(1, output(0, 5)), Addressed(2, output(1, 6))])
    sorter.api_servers = {FIRST, 2}
    tokens = Tokens(np.array([0, 1]), np.array([7, 8], np.int32))
    found = sorter.sort([tokens, Addressed(1, output(0, end=True))])
    assert set(found) == {FIRST, 2}
    assert found[FIRST] == []
    ((own,),) = [found[2]]
    assert (own.numbers.tolist(), own.token_ids.tolist()) == ([1], [8])


def test_all_hear_how_the_engine_is_and_the_first_what_it_asked() -> None:
    sorter = Sorter()
    sorter.api_servers = {FIRST, 1}
    stats, failed, reply = wire.Stats(EngineStats()), wire.Failed("gone"), wire.Reply()
    version = wire.WeightVersion("new")
    found = sorter.sort([stats, version, reply, failed])
    assert found == {FIRST: [stats, version, reply, failed], 1: [stats, version, failed]}


def test_a_api_server_forgets_what_has_ended() -> None:
    said: list[Addressed] = []
    api_server = ApiServer(4, said.append)
    api_server.open |= {"r0", "r1", "r2"}
    api_server.put(output(0, 1))
    api_server.put(output(1, 1, end=True))
    api_server.put(wire.failure("r2", "the queue is full", status=429))
    assert api_server.open == {"r0"}
    assert [item.api_server for item in said] == [4, 4, 4]
