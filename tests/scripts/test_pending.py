"""Prompts that are enqueued, over the real application and engine with the fake runner beneath."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from scripts.llm import RefusedError, SamplingParams
from server.text.stream import Detokenizer

LONG = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture
def held(make_llm):
    """An LLM that stops after some tokens, and the event that lets it go on."""
    go_on, reached = threading.Event(), threading.Event()

    def hold(number: int) -> None:
        if number == 9:
            reached.set()
            go_on.wait(60)

    with make_llm(on_result=hold) as llm:
        llm.reached = reached
        try:
            yield llm, go_on
        finally:
            go_on.set()


def test_what_is_enqueued_is_shown_while_it_grows(held, make_llm):
    llm, go_on = held
    pending = llm.enqueue(["abc", "defg"], LONG | {"n": 2})
    llm.reached.wait(60)
    while not all(output.token_ids for result in pending.outputs() for output in result.outputs):
        pass  # tokens of the steps before are on their way
    first = pending.outputs()
    go_on.set()
    last = pending.wait()
    assert pending.is_done and pending.outputs() == last
    with make_llm() as other:
        whole = other.generate(["abc", "defg"], LONG | {"n": 2})
    for early, late, expected in zip(first, last, whole, strict=True):
        assert not early.finished and late.finished
        assert (early.prompt, early.prompt_token_ids) == (late.prompt, late.prompt_token_ids)
        assert early.request_id == late.request_id and late.prompt == expected.prompt
        for begun, ended, same in zip(early.outputs, late.outputs, expected.outputs, strict=True):
            assert 0 < len(begun.token_ids) < 40 and begun.finish_reason is None
            assert ended.token_ids[: len(begun.token_ids)] == begun.token_ids
            assert ended.text.startswith(begun.text.removesuffix("\ufffd"))
            assert (ended.text, ended.token_ids, ended.finish_reason) == (same.text, same.token_ids, "length")


def test_what_is_aborted_keeps_what_it_has(held):
    llm, go_on = held
    pending = llm.enqueue([f"{i}" for i in range(30)], LONG)
    llm.reached.wait(60)
    results = pending.abort()
    go_on.set()
    assert {result.outputs[0].finish_reason for result in results} == {"abort"}
    assert all(result.finished for result in results)
    counts = [len(result.outputs[0].token_ids) for result in results]
    assert max(counts[:4]) > 0 and max(counts[8:]) == 0 and max(counts) < 40
    assert pending.abort() == pending.wait() == pending.outputs() == results
    assert len(llm.generate(["a"], LONG)[0].outputs[0].token_ids) == 40
    assert llm.stats().num_pages_used == 0


def test_a_pause_that_aborts_ends_also_what_the_engine_was_not_given(held):
    llm, go_on = held
    asked = [f"{i}" for i in range(30)]
    pending = llm.enqueue(asked, LONG)
    llm.reached.wait(60)
    opener = threading.Thread(target=lambda: until(lambda: llm.engine._changes._is_paused) or go_on.set())
    opener.start()
    llm.pause("abort")
    opener.join()
    results = pending.wait()
    assert {(result.finished, result.outputs[0].finish_reason) for result in results} == {(True, "abort")}
    counts = [len(result.outputs[0].token_ids) for result in results]
    assert 0 < max(counts[:4]) < 40 and max(counts[8:]) == 0
    assert [result.prompt for result in results] == asked
    llm.resume()
    assert len(llm.generate(["a"], LONG)[0].outputs[0].token_ids) == 40
    assert llm.stats().num_pages_used == 0


@pytest.fixture
def slow_answers(make_llm):
    """An LLM whose loop takes many turns between an answer's parts."""
    with make_llm() as llm:
        app = llm._app

        async def slow(scope, receive, send) -> None:
            async def send_late(message) -> None:
                for _ in range(2000):
                    await asyncio.sleep(0)
                await send(message)

            await app(scope, receive, send_late)

        llm._app = slow
        yield llm


def test_an_answer_that_is_being_written_loses_no_token(slow_answers):
    pending = slow_answers.enqueue(["abc"], LONG | {"logprobs": 1})
    counts = [0]
    while not pending.is_done:
        counts.append(len(pending.outputs()[0].outputs[0].token_ids))
    assert counts == sorted(counts) and counts[-1] == 40


@pytest.mark.parametrize("ended_by", ["abort", "pause"])
def test_what_the_engine_has_ended_is_not_aborted(slow_answers, ended_by):
    pending = slow_answers.enqueue(["abc"], LONG | {"logprobs": 1})
    until(lambda: any(running.finished for running in list(slow_answers._state.generations.values())))
    pending.abort() if ended_by == "abort" else slow_answers.pause("abort")
    (output,) = pending.wait()[0].outputs
    assert (output.finish_reason, len(output.token_ids)) == ("length", 40)
    assert len(output.logprobs) == 40


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        pass


def test_what_is_pending_at_the_end_is_aborted(held):
    llm, go_on = held
    pending = llm.enqueue(["a"], LONG)
    llm.reached.wait(60)
    go_on.set()
    llm.close()
    (result,) = pending.wait()
    assert result.outputs[0].finish_reason in ("abort", "length")


def test_a_refusal_comes_with_the_results(make_llm):
    with make_llm() as llm:
        pending = llm.enqueue(["a", "b"], [LONG, LONG | {"max_tokens": 0}])
        for ask in (pending.wait, pending.outputs, pending.abort):
            with pytest.raises(RefusedError, match="request 1: max_tokens"):
                ask()


def test_a_pause_holds_what_comes(make_llm):
    with make_llm() as llm:
        llm.pause("wait")
        assert llm.is_paused
        pending = llm.enqueue(["abc"], LONG)
        (result,) = pending.outputs()
        assert (result.finished, result.outputs[0].text, result.outputs[0].token_ids) == (False, "", [])
        llm.resume()
        assert not llm.is_paused
        assert pending.wait()[0].outputs[0].token_ids == llm.generate(["abc"], LONG)[0].outputs[0].token_ids
        with pytest.raises(ValueError, match="mode: abort, wait, keep, not 'stop'"):
            llm.pause("stop")


def test_token_ids_are_not_decoded(make_llm, monkeypatch):
    sampled = SamplingParams(seed=3, max_tokens=9, logprobs=1, n=2, detokenize=False)
    prompts = ["abc", {"prompt_token_ids": [5, 6, 7], "cache_salt": "s"}]
    with make_llm() as llm:
        expected = llm.generate(prompts, SamplingParams(seed=3, max_tokens=9, logprobs=1, n=2))

        def push(self: Detokenizer, token_id: int) -> str:
            raise AssertionError("nobody asked for text")

        monkeypatch.setattr(Detokenizer, "push", push)
        found = llm.generate(prompts, sampled)
        assert [result.outputs[0].token_ids for result in llm.enqueue(prompts, sampled).wait()] == [
            r.outputs[0].token_ids for r in found
        ]
        (open_ended,) = llm.generate([[5] * 250], SamplingParams(max_tokens=None, ignore_eos=True, detokenize=False))
        assert len(open_ended.outputs[0].token_ids) == 6
        with pytest.raises(ValueError, match="detokenize=False: a chat is answered with texts"):
            llm.chat([{"role": "user", "content": "hi"}], sampled)
    for result, same in zip(found, expected, strict=True):
        assert (result.prompt, result.prompt_token_ids) == (same.prompt, same.prompt_token_ids)
        for output, other in zip(result.outputs, same.outputs, strict=True):
            assert (output.text, output.token_ids, output.finish_reason) == ("", other.token_ids, other.finish_reason)
            assert output.logprobs == other.logprobs


def test_the_samples_of_a_prompt_share_its_pages(make_llm):
    """64 prompts of 41 tokens, whose two full pages are computed once each for 16 samples."""
    with make_llm() as llm:
        params = SamplingParams(n=16, max_tokens=2, ignore_eos=True, detokenize=False)
        results = llm.generate([f"{i:040}" for i in range(64)], params)
        stats = llm.stats()
    assert {len(result.outputs) for result in results} == {16}
    assert stats.prefix_cache_hits >= 0.95 * 64 * 15 * 32
