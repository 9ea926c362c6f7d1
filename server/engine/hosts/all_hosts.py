"""The weights and the LoRA adapters of all hosts. All hosts make a change, or none does.

Each host reads adapters from its own folder of that name and copies them to its chips. Loading and staging take time,
so they run in separate threads on every host while steps go on. All hosts have staged an adapter before the leader
sends the step that writes it into a slot.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Set

from batcher.step import Runner, WeightsKind
from server.engine.adapters import AdapterStore
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


class AllAdapters:
    """The leader's `server.engine.adapters.AdapterStore` of all hosts. All hosts load an adapter, or none does.

    The methods raise RuntimeError if a host is lost.

    Args:
        own: the store of this host.
    """

    def __init__(self, own: AdapterStore, leader: Leader) -> None:
        self._own = own
        self._leader = leader
        self._lock = threading.Lock()  # of one question at a time to the hosts, and of what follows
        self._held: set[int] = set()  # that all hosts have

    def load(self, path: str) -> int:
        with self._lock:
            identities, faults = self._leader.ask(commands.LoadAdapter(path), lambda: self._own.load(path))
            own: int | None = identities.get(LEADER)
            for number, identity in identities.items():
                if own is not None and identity != own:
                    faults[number] = "it finds other weights there than the leader"
            if own is None or faults:
                for identity in set(identities.values()) - self._held:
                    self._forget(identity, has_own=identity == own)
                raise ValueError(self._leader.listed(faults))
            self._held.add(own)
            return own

    def forget(self, identity: int) -> None:
        with self._lock:
            self._held.discard(identity)
            self._forget(identity, has_own=True)

    def stage(self, identity: int, runner: Runner) -> None:
        """Calls `Runner.stage` on all hosts. Raises ValueError if it fails on one, and undoes it on the others.

        `runner` is this host's runner.
        """
        with self._lock:
            _, faults = self._leader.ask(
                commands.StageAdapter(identity), lambda: runner.stage(WeightsKind.ADAPTER, identity)
            )
            if faults:
                self.unstage(identity, runner)
                raise ValueError(self._leader.listed(faults))

    def unstage(self, identity: int, runner: Runner) -> None:
        """Calls `Runner.drop` on all hosts."""
        self._leader.send(commands.UnstageAdapter(identity))
        runner.drop(WeightsKind.ADAPTER, identity)

    def _forget(self, identity: int, *, has_own: bool) -> None:
        self._leader.send(commands.ForgetAdapter(identity))
        if has_own:
            self._own.forget(identity)
