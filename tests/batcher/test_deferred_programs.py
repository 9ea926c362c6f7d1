"""Programs that are compiled while the engine serves: the larger ones that stand in for them change no output."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.deferred_programs import DeferredPrograms
from batcher.engine import Engine
from batcher.errors import EngineDeadError
from batcher.request import ErrorCode
from batcher.step import Bucket, Variant
from tests.batcher.fake_runner import FakeRunner
from tests.batcher.harness import CAPACITY, EOS, Drive, make_request
from tests.batcher.test_engine_threads import PATIENCE_S, Listener, check

GREEDY, SAMPLE = Variant.GREEDY, Variant.SAMPLE
LADDER = BucketLadder(BucketConfig(max_num_batched_tokens=32, max_num_seqs=4, min_mixed_tokens=8))
LATER = set(LADDER.buckets()) - set(LADDER.needed_first())


def test_what_steps_ask_for_is_compiled_first_then_the_cheapest() -> None:
    one, two, four = Bucket(1, 1, GREEDY), Bucket(2, 2, GREEDY), Bucket(4, 4, GREEDY)
    later = DeferredPrograms(LADDER, {four, one, two})
    assert later.next() == (one, False)
    assert later.or_fallback(two) == Bucket(2, 2, SAMPLE)
    assert later.or_fallback(Bucket(1, 1, SAMPLE)) == Bucket(1, 1, SAMPLE)
    assert later.next() == (two, True)
    later.arrived(two)
    assert later.or_fallback(two) == two
    assert later.or_fallback(one) == Bucket(1, 1, SAMPLE)
    assert (later.next(), len(later)) == ((one, True), 2)
    later.arrived(one)
    later.arrived(four)
    assert (later.next(), len(later)) == (None, 0)


def test_steps_are_served_while_programs_are_missing_and_nothing_is_a_surprise() -> None:
    drive, ready = Drive(leaves_programs=True), Drive()
    for each in (drive, ready):
        for i in range(5):
            each.add(make_request(f"{i}", range(10, 18 + i), max_tokens=12, ignore_eos=True))
        each.finish()
        each.check_outputs()
    needed = drive.ladder.needed_first()
    assert set(drive.runner.executed) <= set(needed)
    assert len(drive.runner.executed) == len(ready.runner.executed)
    stats = drive.engine.stats()
    own = [bucket for bucket in ready.runner.executed if bucket in needed]
    assert stats.num_stand_in_steps == stats.num_steps - len(own) > 0
    assert stats.num_programs_to_come == len(drive.ladder.buckets()) - len(needed)
    assert stats.num_compiles_after_warm_up == 0
    assert ready.engine.stats().num_stand_in_steps == 0


def start(runner: FakeRunner, **options: object) -> Engine:
    engine = Engine(runner, EngineConfig(eos_token_ids=EOS), LADDER, **options)
    engine.warm_up(print, LATER)
    engine.start()
    return engine


def test_a_thread_brings_them_while_requests_are_served() -> None:
    compiling, proceed, listener = threading.Event(), threading.Event(), Listener()

    def on_compile(_bucket: Bucket) -> None:
        compiling.set()
        assert proceed.wait(PATIENCE_S)

    runner = FakeRunner(CAPACITY, on_compile=on_compile)
    engine = start(runner)
    requests = [make_request(f"{i}", range(10, 15 + i), max_tokens=9, ignore_eos=True) for i in range(3)]
    assert compiling.wait(PATIENCE_S)
    engine.add_request(requests[0], listener)
    listener.end("0")
    stats = engine.stats()
    assert stats.num_stand_in_steps > 0
    assert stats.num_programs_to_come == len(LATER)
    proceed.set()
    (compiler,) = (thread for thread in threading.enumerate() if thread.name == "engine-compiler")
    compiler.join(PATIENCE_S)
    assert set(runner.compiled_later) == LATER
    served = engine.stats().num_stand_in_steps
    for request in requests[1:]:
        engine.add_request(request, listener)
        listener.end(request.request_id)
    check(requests, listener)
    stats = engine.stats()
    engine.shutdown()
    assert (stats.num_programs_to_come, stats.num_compiles_after_warm_up) == (0, 0)
    assert stats.num_stand_in_steps == served
    assert runner.violations == []


def test_an_error_of_the_compiler_ends_the_engine() -> None:
    compiling, proceed, listener = threading.Event(), threading.Event(), Listener()
    deaths: list[BaseException] = []

    def on_compile(_bucket: Bucket) -> None:
        compiling.set()
        assert proceed.wait(PATIENCE_S)
        raise ValueError("this program does not fit")

    gate = threading.Event()
    runner = FakeRunner(CAPACITY, on_compile=on_compile, on_result=lambda _number: gate.wait(PATIENCE_S))
    engine = start(runner, on_death=deaths.append)
    assert compiling.wait(PATIENCE_S)
    engine.add_request(make_request("a", range(10, 15)), listener)
    proceed.set()
    end = listener.end("a")
    assert end.error_code is ErrorCode.ENGINE_DEAD
    assert "this program does not fit" in end.error
    with pytest.raises(EngineDeadError, match="this program does not fit"):
        engine.stats()
    gate.set()
    engine.shutdown()
    assert [str(death) for death in deaths] == ["this program does not fit"]


def test_a_shutdown_does_not_wait_for_the_compiler() -> None:
    compiling, ended = threading.Event(), threading.Event()

    def on_compile(_bucket: Bucket) -> None:
        compiling.set()
        assert ended.wait(PATIENCE_S)

    runner = FakeRunner(CAPACITY, on_compile=on_compile)
    engine = start(runner)
    assert compiling.wait(PATIENCE_S)
    engine.shutdown()
    (compiler,) = (thread for thread in threading.enumerate() if thread.name == "engine-compiler")
    ended.set()
    compiler.join(PATIENCE_S)
    assert len(runner.compiled_later) == 1


INTERRUPTED = """
import time
from tests.batcher.test_deferred_programs import FakeRunner, CAPACITY, start

def on_compile(bucket):
    print("begun", flush=True)
    time.sleep(0.2)
    print("ended", flush=True)

runner = FakeRunner(CAPACITY, on_compile=on_compile)
engine = start(runner)
while not runner.compiled_later:
    time.sleep(0.001)
"""


def test_the_interpreter_waits_for_the_program_that_is_compiled() -> None:
    """It does not wait for the programs after that one, and the engine need not have been shut down."""
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr
    compiled = [line for line in ended.stdout.splitlines() if line in ("begun", "ended")]
    assert compiled.count("begun") == compiled.count("ended") < len(LATER)
