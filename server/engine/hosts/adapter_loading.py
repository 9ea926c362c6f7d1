"""Loads LoRA adapters on all hosts. Each host reads them from its own folder of that name and copies them to its chips.

Loading and staging take time, so they run in separate threads on every host while steps go on. All hosts have staged an
adapter before the leader sends the step that writes it into a slot.
"""

from __future__ import annotations

import threading

from batcher.step import Runner
from server.engine.adapters import AdapterStore
from server.engine.hosts import commands
from server.engine.hosts.cluster import LEADER
from server.engine.hosts.leader import Leader


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
        """Calls `Runner.stage_adapter` on all hosts. Raises ValueError if it fails on one, and undoes it on the others.

        `runner` is this host's runner.
        """
        with self._lock:
            _, faults = self._leader.ask(commands.StageAdapter(identity), lambda: runner.stage_adapter(identity))
            if faults:
                self.unstage(identity, runner)
                raise ValueError(self._leader.listed(faults))

    def unstage(self, identity: int, runner: Runner) -> None:
        """Calls `Runner.unstage_adapter` on all hosts."""
        self._leader.send(commands.UnstageAdapter(identity))
        runner.unstage_adapter(identity)

    def _forget(self, identity: int, *, has_own: bool) -> None:
        self._leader.send(commands.ForgetAdapter(identity))
        if has_own:
            self._own.forget(identity)
