"""A change of the weights of all hosts, over real sockets on the loopback interface."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from server.engine.hosts import commands
from server.engine.hosts.all_hosts import AllWeights
from server.engine.hosts.served import BroadcastRunner, FollowingEngine
from server.engine.wire import ChangeWeights, InSharedMemory, WeightsChange
from tests.server.engine.hosts.loopback import Exits, Hosts, RecordingRunner, step

RELOAD = ChangeWeights(WeightsChange.RELOAD, "folder")


class RecordingWeights:
    """Remembers what it was told to do, next to the steps of the runner. The parts in `faults` raise their errors."""

    def __init__(self, calls: SimpleQueue[object], facts: str = "equal") -> None:
        self.faults: dict[str, Exception] = {}
        self._calls = calls
        self._facts = facts

    def check(self, command: ChangeWeights) -> dict[str, str]:
        self._do("check")
        assert command == RELOAD
        return {"facts": self._facts}

    def prepare(self) -> None:
        self._do("prepare")

    def commit(self) -> None:
        self._do("commit")

    def abandon(self) -> None:
        self._do("abandon")

    def _do(self, what: str) -> None:
        self._calls.put(what)
        if what in self.faults:
            raise self.faults[what]


class Two:
    """A leader and a follower that replays."""

    def __init__(self, hosts: Hosts, runner: type[RecordingRunner] = RecordingRunner, **theirs: str) -> None:
        self.leader, self.follower = hosts.together()
        runners = RecordingRunner(), runner()
        self.calls = [runner.calls for runner in runners]
        self.own, self.theirs = RecordingWeights(self.calls[0]), RecordingWeights(self.calls[1], **theirs)
        self.runner = BroadcastRunner(runners[0], self.leader)
        self.all = AllWeights(self.own, self.leader)
        self.exits = Exits()
        FollowingEngine(
            runners[1], self.follower, self.exits, self.theirs, {}, most_in_flight=2, leave=lambda: None
        ).start()

    def change(self) -> None:
        self.all.check(RELOAD)
        self.all.prepare()
        self.all.commit()

    def done(self) -> list[list[object]]:
        """What each host has done, once the follower has ended."""
        self.leader.stop()
        assert self.exits.ends.get(timeout=30) == "ended"
        return [[calls.get() for _ in range(calls.qsize())] for calls in self.calls]


class Returning:
    """A result that is read."""

    def __init__(self, calls: SimpleQueue[object]) -> None:
        self._calls = calls

    def result(self) -> None:
        self._calls.put("returned")


class ReturningRunner(RecordingRunner):
    def execute(self, step) -> Returning:
        return Returning(self.calls)


@pytest.fixture
def two(hosts) -> Two:
    return Two(hosts)


CHANGED = ["check", "prepare", "commit"]


def test_all_hosts_change_in_order_with_the_steps(two):
    two.runner.execute(step(0))
    two.change()
    two.runner.execute(step(1))
    assert two.done() == [[0, *CHANGED, 1], [0, *CHANGED, 1]]


@pytest.mark.parametrize("part", ["check", "prepare"])
@pytest.mark.parametrize("refusing", [(0,), (1,), (0, 1)])
def test_what_one_host_refuses_none_does(part, refusing, two):
    for number in refusing:
        (two.own, two.theirs)[number].faults[part] = ValueError(f"no, says {number}")
    with pytest.raises(ValueError, match="no, says") as refusal:
        two.change()
    for number, name in enumerate((r"host 0 \(the leader\): no, says 0", r"host 1 \(.*\): no, says 1")):
        assert bool(refusal.match(name)) if number in refusing else f"says {number}" not in str(refusal.value)
    two.own.faults.clear()
    two.theirs.faults.clear()
    two.runner.execute(step(0))
    two.change()
    begun = ["check"] if part == "check" else ["check", "prepare"]
    undone = ["abandon"] if part == "prepare" else []
    assert two.done() == [[*begun, *([] if number in refusing else undone), 0, *CHANGED] for number in range(2)]


def test_hosts_that_find_different_weights_do_not_change(hosts):
    two = Two(hosts, facts="other")
    with pytest.raises(ValueError, match=r"host 1 .*: it finds \{'facts': 'other'\} where the leader finds"):
        two.change()
    assert two.done() == [["check"], ["check"]]


@pytest.mark.parametrize(
    ("part", "error"), [("commit", ValueError("no")), ("prepare", RuntimeError("no")), ("abandon", ValueError("no"))]
)
def test_a_follower_that_can_neither_go_on_nor_back_ends_all(part, error, hosts, two):
    two.theirs.faults[part] = error
    if part == "abandon":
        two.own.faults["prepare"] = ValueError("so all go back")
    with pytest.raises(ValueError if part == "abandon" else RuntimeError):
        two.change()
    assert "no" in two.exits.ends.get(timeout=30)
    assert "host 1 (" in (reason := hosts.failures[0].get(timeout=30)) and "no" in reason
    hosts.open.remove(two.follower.close)


def test_a_leader_that_cannot_end_a_change_is_an_error_that_names_it(two):
    two.own.faults["commit"] = OSError("no")
    with pytest.raises(RuntimeError, match=r"the hosts have different weights: host 0 \(the leader\): no"):
        two.change()


def test_several_hosts_take_a_folder_only(two):
    with pytest.raises(ValueError, match="several hosts take weights from a folder only"):
        two.all.receive(InSharedMemory("block", ()))
    with pytest.raises(ValueError, match="no folder has been received"):
        two.all.check(ChangeWeights(WeightsChange.UPDATE))
    assert two.done() == [[], []]


def test_what_all_hosts_have_prepared_is_abandoned_by_all(two):
    two.all.check(RELOAD)
    two.all.prepare()
    two.all.abandon()
    two.runner.execute(step(0))
    assert two.done() == [["check", "prepare", "abandon", 0]] * 2


def test_steps_in_flight_have_returned_on_a_follower_before_its_weights_change(hosts):
    two = Two(hosts, ReturningRunner)
    two.runner.execute(step(0))
    two.runner.execute(step(1))
    two.change()
    assert two.done()[1] == ["returned", "returned", *CHANGED]


def test_a_change_that_is_not_asked_for_is_not_undone(two):
    """An order to abandon reaches hosts that have refused, too."""
    two.leader.send(commands.Abandon())
    assert two.done() == [[], []]
