"""LoRA adapters of several hosts, over real sockets on the loopback interface."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from batcher.step import AdapterWrite, WeightsKind
from server.engine.hosts.all_hosts import AllAdapters
from server.engine.hosts.served import BroadcastRunner, FollowingEngine
from tests.batcher.test_engine_threads import Gate
from tests.server.engine.hosts.loopback import Exits, Hosts, RecordingRunner, step
from tests.server.support.adapters import FakeStore, num_reads, write_adapter
from tests.server.support.requests import wait_until


class Pair:
    """A leader and a follower that replays, each with a runner and a store."""

    def __init__(self, hosts: Hosts, theirs: FakeStore, runner: RecordingRunner | None = None) -> None:
        self.leader, follower = hosts.together()
        self.ours, self.theirs = FakeStore(), theirs
        self.our_runner, self.their_runner = RecordingRunner(), runner or RecordingRunner()
        self.all = AllAdapters(self.ours, self.leader)
        self.runner = BroadcastRunner(self.our_runner, self.leader)
        self.exits = Exits()
        weights, stores = None, dict.fromkeys(WeightsKind, theirs)  # weights are not changed
        FollowingEngine(
            self.their_runner, follower, self.exits, weights, stores, most_in_flight=1, leave=lambda: None
        ).start()


def test_all_hosts_load_and_forget_an_adapter(hosts, tmp_path):
    pair = Pair(hosts, FakeStore())
    identity = pair.all.load(str(write_adapter(tmp_path / "a", "text")))
    assert pair.ours.texts == pair.theirs.texts == {identity: "text"}
    assert pair.all.load(str(write_adapter(tmp_path / "b", "text"))) == identity
    pair.all.forget(identity)
    wait_until(lambda: pair.ours.forgotten == pair.theirs.forgotten == ["text"])


def test_if_a_host_refuses_no_host_has_the_adapter(hosts, tmp_path):
    pair = Pair(hosts, FakeStore(refused="a"))
    with pytest.raises(ValueError, match=r"^host 1 \(.*\): .* holds no adapter_config.json$"):
        pair.all.load(str(write_adapter(tmp_path / "a", "text")))
    assert pair.ours.texts == {}
    kept = pair.all.load(str(write_adapter(tmp_path / "b", "text")))
    with pytest.raises(ValueError, match="host 1"):
        pair.all.load(str(tmp_path / "a"))
    assert pair.ours.texts == {kept: "text"}  # another name has it
    with pytest.raises(ValueError, match=r"host 0 .*; host 1"):
        pair.all.load(str(write_adapter(tmp_path / "c", None)))
    assert num_reads(tmp_path / "c") == 2


def test_hosts_that_find_other_weights_refuse(hosts, tmp_path):
    pair = Pair(hosts, FakeStore(changes="!"))
    with pytest.raises(ValueError, match=r"host 1 .*other weights there than the leader"):
        pair.all.load(str(write_adapter(tmp_path / "a", "text")))
    wait_until(lambda: pair.ours.forgotten == ["text"] and pair.theirs.forgotten == ["text!"])


def test_all_hosts_stage_before_a_step_writes(hosts):
    pair = Pair(hosts, FakeStore())
    pair.runner.stage(WeightsKind.ADAPTER, 7)
    assert pair.our_runner.staged == pair.their_runner.staged == {7}
    written = step(3)
    pair.runner.execute(replace(written, adapters=(AdapterWrite(slot=1, adapter=7),)))
    assert pair.their_runner.seen(1) == [3]
    pair.runner.drop(WeightsKind.ADAPTER, 7)
    wait_until(lambda: pair.our_runner.staged == pair.their_runner.staged == set())


def test_a_model_is_staged_between_two_steps(hosts):
    """Both hosts begin with the same programs: those of the steps before, those of the load, and those of the steps."""
    pair, gate = Pair(hosts, FakeStore()), Gate(first=0)
    stage = pair.their_runner.stage
    pair.their_runner.stage = lambda kind, identity: gate(0) or stage(kind, identity)
    pair.runner.execute(step(1))
    staging = threading.Thread(target=pair.runner.stage, args=(WeightsKind.MODEL, 7))
    staging.start()
    assert gate.reached.wait(30) and pair.their_runner.seen(1) == [1]
    later = threading.Thread(target=pair.runner.execute, args=(replace(step(2), model=7),))
    later.start()
    later.join(0.2)
    assert later.is_alive() and pair.our_runner.seen(1) == [1]
    gate.open.set()
    for thread in (staging, later):
        thread.join(30)
    assert pair.our_runner.staged == pair.their_runner.staged == {7}
    assert pair.our_runner.seen(1) == pair.their_runner.seen(1) == [2]
    pair.runner.drop(WeightsKind.MODEL, 7)
    wait_until(lambda: pair.our_runner.staged == pair.their_runner.staged == set())


def test_if_a_host_cannot_stage_none_has_staged(hosts):
    pair = Pair(hosts, FakeStore(), RecordingRunner(stageable=()))
    with pytest.raises(ValueError, match=r"host 1 .*the folder of adapter 7 has changed"):
        pair.runner.stage(WeightsKind.ADAPTER, 7)
    assert pair.our_runner.staged == set()
    pair.runner.execute(step(1))  # the hosts go on
    assert pair.their_runner.seen(1) == [1]
    assert pair.exits.ends.empty()


def test_a_host_that_reads_goes_on_with_steps(hosts, tmp_path, monkeypatch):
    theirs, gate = FakeStore(), Gate(first=0)
    load, pair = theirs.load, Pair(hosts, theirs)
    monkeypatch.setattr(theirs, "load", lambda path: gate(0) or load(path))
    loading = threading.Thread(target=pair.all.load, args=(str(write_adapter(tmp_path / "a", "text")),))
    loading.start()
    assert gate.reached.wait(30)
    for number in range(5):
        pair.runner.execute(step(number))
    assert pair.their_runner.seen(5) == list(range(5))
    assert loading.is_alive()
    gate.open.set()
    loading.join(30)
    assert pair.ours.texts == pair.theirs.texts
