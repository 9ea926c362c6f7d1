"""Changes the weights of all hosts. All hosts change, or none does."""

from __future__ import annotations

from collections.abc import Mapping, Set

from server.engine.hosts import commands
from server.engine.hosts.cluster import LEADER
from server.engine.hosts.leader import Leader
from server.engine.weight_changes import Weights
from server.engine.wire import ChangeWeights, InSharedMemory, WeightsChange


class AllWeights:
    """The leader's `server.engine.weight_changes.Weights` of all hosts. The followers make the same calls, in order
    with the steps. All hosts have checked before any host prepares, and all are prepared before any host commits. They
    check with no step in flight, because a follower runs none meanwhile.

    The methods raise RuntimeError, which ends the engine, if a host is lost or fails after others have committed.

    Args:
        own: the weights of the leader's chips.
    """

    def __init__(self, own: Weights, leader: Leader) -> None:
        self._own = own
        self._leader = leader
        self._change = ChangeWeights(WeightsChange.WAKE_UP)  # the change to be prepared

    @property
    def missing(self) -> Set[str]:
        return self._own.missing

    def begin(self) -> None:
        self._own.begin()

    def receive(self, source: InSharedMemory) -> None:
        raise ValueError("several hosts take weights from a folder only: give the path of one that every host has")

    def forget(self) -> None:
        """Does nothing: no arrays are received."""

    def check(self, change: ChangeWeights) -> Mapping[str, str]:
        """Returns no facts: `prepare` compares them."""
        if change.change is WeightsChange.UPDATE:
            raise ValueError("no folder has been received")
        self._change = change
        return {}

    def prepare(self) -> None:
        change = self._change
        found, faults = self._leader.ask(commands.Check(change), lambda: dict(self._own.check(change)))
        facts: dict[str, str] | None = found.get(LEADER)
        for number, theirs in found.items():
            if facts is not None and theirs != facts:
                faults[number] = f"it finds {theirs} where the leader finds {facts}"
        if faults:
            raise ValueError(self._leader.listed(faults))
        _, faults = self._leader.ask(commands.Prepare(), self._own.prepare)
        if faults:
            self._leader.send(commands.Abandon())
            if LEADER not in faults:
                self._own.abandon()
            raise ValueError(self._leader.listed(faults))

    def commit(self) -> None:
        _, faults = self._leader.ask(commands.Commit(), self._own.commit)
        if faults:
            raise RuntimeError(f"the hosts have different weights: {self._leader.listed(faults)}")

    def abandon(self) -> None:
        self._leader.send(commands.Abandon())
        self._own.abandon()
