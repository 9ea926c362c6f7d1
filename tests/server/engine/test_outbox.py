"""What the engine says arrives by columns and messages at each receiver as its own listener would hear it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.delivery import Tokens
from batcher.request import RequestOutput, TokenLogprobs
from server.engine import outbox, wire
from server.engine.protocol import Receivers
from tests.batcher.harness import Drive
from tests.batcher.scheduling.test_speculation import PROPOSALS
from tests.batcher.test_properties import Scenario, play, scenarios
from tests.examples import examples


class Recorder:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.outputs: list[wire.Output] = []
        self.events: list[str] = []

    def on_output(self, output: wire.Output) -> None:
        self.tokens += output.token_ids
        self.outputs.append(output)
        self.events.append(output.finish_reason or "goes on")

    def on_tokens(self, token_ids: Sequence[int]) -> None:
        assert token_ids
        self.tokens += token_ids
        self.events.append("tokens")


class Carrier:
    """Between an engine and the receivers: it gathers what `num_steps` steps say, as a slow sender does."""

    def __init__(self, drive: Drive, num_steps: int, unread: set[str]) -> None:
        self.receivers = Receivers()
        self.recorders: dict[str, Recorder] = {}
        self.num_messages = 0
        self._items: list[outbox.Item] = []
        self._drive, self._num_steps, self._unread = drive, num_steps, unread
        drive.engine.listen(self._items.append)
        drive.on_output = self._items.append
        self._add, self._step, self._abort = drive.add, drive.step, drive.engine.abort
        drive.add, drive.step, drive.engine.abort = self.add, self.step, self.abort

    def add(self, request):
        recorder = self.recorders[request.request_id] = Recorder()
        if request.request_id not in self._unread:
            self.receivers[request.request_id] = recorder
        return self._add(request)

    def abort(self, request_id: str) -> None:
        """As by a client that has gone: its receiver gets nothing more."""
        self.receivers.pop(request_id, None)
        if request_id in self.recorders:
            self.recorders[request_id].events.append("gone")
        self._abort(request_id)

    def step(self) -> bool:
        more = self._step()
        if self._drive.num_steps % self._num_steps == 0:
            self.carry()
        return more

    def carry(self) -> None:
        for message in outbox.messages(self._items):
            self.num_messages += 1
            self.receivers.take(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=wire.Event))
        self._items.clear()


@st.composite
def any_scenario(draw: st.DrawFn) -> Scenario:
    scenario = draw(scenarios())
    if draw(st.booleans()) or scenario.capacity.num_slots < 2:
        return scenario
    num_drafts = min(2, scenario.capacity.max_num_batched_tokens // scenario.capacity.num_slots - 1)
    if num_drafts < 1:
        return scenario
    drafts = {"num_drafts": num_drafts, "max_draft_rows": scenario.capacity.num_slots}
    capacity = replace(scenario.capacity, keeps_text=True)
    return replace(scenario, capacity=capacity, propose=draw(st.sampled_from(PROPOSALS)), **drafts)


@settings(max_examples=examples(40))
@given(any_scenario(), st.integers(1, 4), st.sets(st.sampled_from([str(i) for i in range(12)]), max_size=4))
def test_every_sink_gets_what_a_listener_hears(scenario: Scenario, num_steps: int, unread: set[str]) -> None:
    direct = play(scenario)
    drive = scenario.drive()
    carrier = Carrier(drive, num_steps, unread)
    drive.finish = lambda max_steps: _run_dry(drive, max_steps)
    play(scenario, drive)
    carrier.carry()
    assert not len(carrier.receivers)
    assert not carrier.receivers.id_of
    for request_id, recorder in carrier.recorders.items():
        heard = direct.heard[request_id]
        if request_id in unread:
            assert not recorder.outputs
        elif "gone" in recorder.events:
            assert recorder.tokens == heard.tokens[: len(recorder.tokens)]
            assert recorder.events[-1] == "gone"  # nothing comes after it
        else:
            assert recorder.tokens == heard.tokens
            assert recorder.outputs[-1].finish_reason == heard.finish_reason
            assert recorder.outputs[-1].stop_reason == heard.last.stop_reason
            scores = [entry.logprob for output in recorder.outputs for entry in output.logprobs or ()]
            assert scores == [entry.logprob for output in heard.outputs for entry in output.logprobs]
            assert recorder.events[-1] in ("stop", "length")


def _run_dry(drive: Drive, max_steps: int) -> None:
    for _ in range(max_steps):
        if not drive.step():
            break
    assert drive.engine.num_live == 0


@given(st.data())
def test_columns_arrive_whole(data: st.DataObject) -> None:
    rows = data.draw(
        st.lists(
            st.tuples(st.integers(0, 2**62), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)), min_size=1
        )
    )
    counts = [len(ids) for _, ids in rows]
    tokens = Tokens(
        np.array([number for number, _ in rows]),
        np.array([token for _, ids in rows for token in ids], np.int32),
        None if set(counts) == {1} else np.array(counts, np.int32),
    )
    sent = wire.Outputs([], wire.tokens_to_wire(tokens))
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=wire.Event)
    assert [(number, list(ids)) for number, ids in received.tokens.rows()] == rows


def test_a_step_is_one_message_unless_it_has_the_scores_of_a_prompt() -> None:
    def output(number: int, **fields: object) -> RequestOutput:
        return RequestOutput(request_id=str(number), number=number, **fields)

    tokens = Tokens(np.array([7, 8]), np.array([1, 2], np.int32))
    scores = (TokenLogprobs(logprob=-1.0),)
    items = [output(0), output(1), tokens, output(2), output(3, prompt_logprobs=scores), output(4), tokens, output(5)]
    found = [
        ([o.request_id for o in message.outputs], message.tokens is not None) for message in outbox.messages(items)
    ]
    assert found == [(["0", "1"], True), (["2", "3"], False), (["4"], True), (["5"], False)]
