"""Requests with grammars among others: masks come in time, cost nobody else anything, and end what is complete."""

from __future__ import annotations

import threading

import pytest

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.engine import Engine
from batcher.errors import InvalidRequestError
from batcher.request import ErrorCode, FinishReason
from tests.batcher.fake_runner import FakeRunner, expected_tokens
from tests.batcher.harness import CAPACITY, EOS, Drive, make_request
from tests.batcher.test_engine_threads import PATIENCE_S, Listener
from tests.batcher.toy_grammar import ToyGrammars


def test_the_output_is_what_the_grammar_says() -> None:
    drive = Drive()
    heard = drive.add(make_request("a", [10, 11], grammar="3 2 6", max_tokens=20, temperature=0.7))
    drive.finish()
    drive.check_outputs()
    assert heard.finish_reason is FinishReason.STOP
    body = [token for token in heard.tokens if token not in EOS]
    assert [token % 3 for token in body] == [i % 3 for i in range(len(body))]
    assert 2 <= len(body) <= 6


def test_a_complete_text_ends_without_a_token_of_its_own() -> None:
    drive = Drive()
    heard = drive.add(make_request("a", [10], grammar="1 4 4", max_tokens=20, min_tokens=9, ignore_eos=True))
    empty = drive.add(make_request("b", [10], grammar="1 0 0", max_tokens=20))
    drive.finish()
    assert len(heard.tokens) == 4  # min_tokens cannot be had; nothing but an end may follow
    assert heard.finish_reason is FinishReason.STOP
    assert (empty.tokens, empty.finish_reason) == ([], FinishReason.STOP)


def test_it_sits_out_the_steps_in_which_its_mask_is_unknown() -> None:
    """A row without a grammar is in every step; one with a grammar is in every other."""
    drive = Drive()
    drive.add(make_request("free", [10], ignore_eos=True, max_tokens=21))
    drive.add(make_request("bound", [11], grammar="1 99 99", max_tokens=10))
    drive.finish()
    drive.check_outputs()
    drawn = [len(step.masks) for step in drive.runner.steps]
    assert drawn[:19] == [1, 0] * 9 + [1]
    assert len(drive.runner.steps) == 21


def test_a_depth_of_one_draws_in_every_step() -> None:
    drive = Drive(pipeline_depth=1)
    drive.add(make_request("bound", [11], grammar="1 99 99", max_tokens=10))
    drive.finish()
    assert len(drive.runner.steps) == 10


def test_allowed_tokens_are_a_mask_that_is_brought_once() -> None:
    drive = Drive()
    heard = drive.add(make_request("a", range(10, 50), allowed_token_ids=(30, 31, 32), temperature=0.7, max_tokens=12))
    both = drive.add(make_request("b", [10], allowed_token_ids=(30, 31, 32, 1), grammar="1 2 9", max_tokens=12))
    neither = drive.add(make_request("c", [10], allowed_token_ids=(30,), grammar="7 2 9", max_tokens=12))
    drive.finish()
    assert set(heard.tokens) == {30, 31, 32}
    assert heard.tokens == drive.expected("a")
    assert both.tokens == drive.expected("b")
    assert set(both.tokens) <= {30, 31, 32, 1}
    assert neither.last.error_code is ErrorCode.GRAMMAR
    assert "allowed_token_ids" in neither.last.error


def test_allowed_tokens_cost_no_step_of_their_own() -> None:
    drive = Drive()
    drive.add(make_request("a", [10], allowed_token_ids=(30, 31, 32), max_tokens=12))
    drive.finish()
    assert [len(step.masks) for step in drive.runner.steps] == [1] + [0] * 11


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone() -> None:
    drive = Drive()
    bad = drive.add(make_request("bad", [10], grammar="nonsense"))
    dear = drive.add(make_request("dear", [10], grammar="1 9 666", max_tokens=9))
    drive.add(make_request("good", [10], grammar="1 9 9", max_tokens=9))
    assert drive.engine.stats().num_requests_waiting == 3
    drive.finish()
    assert (bad.last.error_code, bad.last.error) == (ErrorCode.GRAMMAR, "no grammar: nonsense")
    assert (dear.last.error_code, len(dear.tokens)) == (ErrorCode.GRAMMAR, 3)
    assert drive.heard["good"].tokens == drive.expected("good")


def test_a_matcher_that_fails_costs_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    def fail(grammar: str, count: int) -> None:
        if grammar == "2 9 9" and count == 2:
            raise ZeroDivisionError("a fault of ours")

    drive = Drive(grammars=ToyGrammars(on_advance=fail))
    victim = drive.add(make_request("victim", [10], grammar="2 9 9"))
    drive.add(make_request("other", [10], grammar="1 9 9"))
    drive.finish()
    assert victim.finish_reason is FinishReason.ERROR
    assert "a fault of ours" in victim.last.error
    assert drive.heard["other"].tokens == drive.expected("other")
    assert "could not be computed" in caplog.text


def test_an_engine_without_grammars_refuses_them() -> None:
    engine = Engine(FakeRunner(CAPACITY), EngineConfig(eos_token_ids=EOS), _ladder())
    with pytest.raises(InvalidRequestError, match="no grammars") as caught:
        engine.add_request(make_request("a", [10], grammar="1 1 1"), print)
    assert caught.value.param == "grammar"


def _ladder() -> BucketLadder:
    return BucketLadder(BucketConfig(max_num_batched_tokens=32, max_num_seqs=4, min_mixed_tokens=8))


class Running:
    """An engine on its threads, whose matchers block for the grammars in `gates`."""

    def __init__(self, **gates: int) -> None:
        self.gates = {name.replace("_", " ")[1:]: count for name, count in gates.items()}  # "_9_9_9" is "9 9 9"
        self.reached, self.open = threading.Semaphore(0), threading.Event()
        self.listener = Listener()
        config = EngineConfig(eos_token_ids=EOS)
        self.runner = FakeRunner(CAPACITY)
        self.engine = Engine(self.runner, config, _ladder(), grammars=ToyGrammars(on_advance=self._gate))
        self.engine.warm_up(lambda _line: None)
        self.engine.start()

    def _gate(self, grammar: str, count: int) -> None:
        if self.gates.get(grammar) == count:
            self.reached.release()
            self.open.wait(PATIENCE_S)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exception: object) -> None:
        self.open.set()
        self.engine.shutdown()
        assert self.runner.violations == []
        assert self.engine.core.scheduler.pool.num_used == 0

    def add(self, name: str, grammar: str | None) -> None:
        request = make_request(name, [10, 11], grammar=grammar, max_tokens=9, ignore_eos=True)
        self.engine.add_request(request, self.listener)

    def check(self, name: str, grammar: str | None) -> None:
        request = make_request(name, [10, 11], grammar=grammar, max_tokens=9, ignore_eos=True)
        self.listener.end(name)
        assert self.listener.tokens(name) == expected_tokens(request, CAPACITY, EOS)


def test_slow_compilations_hold_up_nobody_else() -> None:
    with Running(_8_9_9=0) as running:
        for i in range(4):
            running.add(f"slow {i}", "8 9 9")
        for _ in range(2):
            assert running.reached.acquire(timeout=PATIENCE_S)
        running.add("free", None)
        running.check("free", None)
        running.open.set()
        running.check("slow 3", "8 9 9")


def test_a_slow_mask_holds_up_nobody_else() -> None:
    with Running(_8_9_9=2) as running:
        running.add("slow", "8 9 9")
        assert running.reached.acquire(timeout=PATIENCE_S)
        for i in range(6):
            running.add(f"free {i}", None)
        for i in range(6):
            running.check(f"free {i}", None)
        running.open.set()
        running.check("slow", "8 9 9")


def test_an_abort_while_it_compiles() -> None:
    with Running(_8_9_9=0) as running:
        running.add("slow", "8 9 9")
        assert running.reached.acquire(timeout=PATIENCE_S)
        running.engine.abort("slow")
        assert running.listener.end("slow").finish_reason is FinishReason.ABORT
        running.open.set()
        running.add("next", "3 9 9")
        running.check("next", "3 9 9")


def test_an_engine_that_stops_ends_what_compiles() -> None:
    with Running(_8_9_9=0) as running:
        running.add("slow", "8 9 9")
        assert running.reached.acquire(timeout=PATIENCE_S)
        stopping = threading.Thread(target=running.engine.shutdown)
        stopping.start()
        assert running.listener.end("slow").finish_reason is FinishReason.ABORT
        running.open.set()
        stopping.join(PATIENCE_S)
        assert not stopping.is_alive()


def test_many_with_and_without_grammars_on_threads() -> None:
    with Running() as running:
        grammars = {f"{i}": None if i % 3 == 0 else f"{i % 5 + 1} 2 {i % 7 + 3}" for i in range(60)}
        for name, grammar in grammars.items():
            running.add(name, grammar)
        for name, grammar in grammars.items():
            running.check(name, grammar)
