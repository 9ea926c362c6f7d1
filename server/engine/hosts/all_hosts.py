"""The weights, the LoRA adapters and the models of all hosts. All hosts make a change, or none does.

Each host reads adapters and models from its own folder of that name and copies them to its chips. Loading and staging
take time, so they run in separate threads on every host while steps go on, but for the staging of a model: steps wait
for it. All hosts have staged before the leader sends the first step that needs the weights.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Set

from batcher.step import WeightsKind
from server.engine.adapters import AdapterStore, ModelStore
from server.engine.hosts import commands
from server.engine.hosts.cluster import LEADER
from server.engine.hosts.leader import Leader
from server.engine.weight_changes import Weights
from server.engine.wire import ChangeWeights, InSharedMemory, LoadedModel, WeightsChange


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
        with self._leader.in_order:
            _, faults = self._leader.ask(commands.Prepare(), self._own.prepare)
            if faults:
                self._leader.send(commands.Abandon())
                if LEADER not in faults:
                    self._own.abandon()
                raise ValueError(self._leader.listed(faults))

    def commit(self) -> None:
        with self._leader.in_order:
            _, faults = self._leader.ask(commands.Commit(), self._own.commit)
        if faults:
            raise RuntimeError(f"the hosts have different weights: {self._leader.listed(faults)}")

    def abandon(self) -> None:
        with self._leader.in_order:
            self._leader.send(commands.Abandon())
            self._own.abandon()


class AllAdapters[S: AdapterStore]:
    """The leader's `server.engine.adapters.AdapterStore` of all hosts. All hosts load an adapter, or none does.

    The methods raise RuntimeError if a host is lost.

    Args:
        own: the store of this host.
        kind: of the weights in it.
    """

    def __init__(self, own: S, leader: Leader, kind: WeightsKind = WeightsKind.ADAPTER) -> None:
        self._own = own
        self._leader = leader
        self._kind = kind
        self._lock = threading.Lock()  # of one question at a time to the hosts, and of what follows
        self._held: set[int] = set()  # that all hosts have

    def load(self, path: str) -> int:
        with self._lock:
            identities, faults = self._leader.ask(commands.Load(self._kind, path), lambda: self._own.load(path))
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

    def _forget(self, identity: int, *, has_own: bool) -> None:
        self._leader.send(commands.Forget(self._kind, identity))
        if has_own:
            self._own.forget(identity)


class AllModels(AllAdapters[ModelStore]):
    """The leader's `server.engine.adapters.ModelStore` of all hosts."""

    def __init__(self, own: ModelStore, leader: Leader) -> None:
        super().__init__(own, leader, WeightsKind.MODEL)

    def loaded(self, name: str, identity: int, path: str) -> LoadedModel:
        return self._own.loaded(name, identity, path)
