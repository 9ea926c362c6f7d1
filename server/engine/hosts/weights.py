"""A change of the weights of all hosts: all of them change, or none does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from model.inputs.words import described
from server.engine.hosts import commands
from server.engine.hosts.cluster import LEADER, HostsError
from server.engine.hosts.follower import Follower
from server.engine.hosts.leader import Leader
from server.engine.process import Weights
from server.engine.wire import ChangeWeights


class AllWeights:
    """`server.engine.process.Weights` of all hosts, on the leader. The followers do what it does, in order with the
    steps. It waits for their answers: every host has checked before one prepares, and is prepared before one commits.

    RuntimeError, of which the engine dies: a host is lost, or has failed after others have committed.

    Args:
        own: those of the leader's chips.
    """

    def __init__(self, own: Weights, leader: Leader) -> None:
        self._own = own
        self._leader = leader

    def check(self, command: ChangeWeights) -> Mapping[str, str]:
        facts: dict[str, str] = {}
        self._refuse(self._ask(commands.Check(command), lambda: facts.update(self._own.check(command)), facts))
        return facts

    def prepare(self) -> None:
        faults = self._ask(commands.Prepare(), self._own.prepare)
        if faults:
            self._leader.send(commands.Abandon())
            if LEADER not in faults:
                self._own.abandon()
        self._refuse(faults)

    def commit(self) -> None:
        faults = self._ask(commands.Commit(), self._own.commit)
        if faults:
            raise RuntimeError(f"the hosts have different weights: {self._listed(faults)}")

    def abandon(self) -> None:
        self._leader.send(commands.Abandon())
        self._own.abandon()

    def _ask(
        self, command: commands.Command, work: Callable[[], None], facts: Mapping[str, str] | None = None
    ) -> dict[int, str]:
        """Why hosts have changed nothing, by their numbers. All of them work at once.

        Args:
            facts: what the answers must say, if this host's own work succeeds; None: nothing.
        """
        faults: dict[int, str] = {}
        self._leader.send(command)
        try:
            work()
        except (ValueError, OSError) as error:
            faults[LEADER] = described(error)
        try:
            answers = self._leader.gather_answers()
        except HostsError as error:
            raise RuntimeError(str(error)) from error
        for answer in answers:
            if answer.error is not None:
                faults[answer.host_id] = answer.error
            elif facts is not None and LEADER not in faults and answer.facts != facts:
                faults[answer.host_id] = f"it finds {answer.facts} where the leader finds {facts}"
        return faults

    def _refuse(self, faults: Mapping[int, str]) -> None:
        if faults:
            raise ValueError(self._listed(faults))

    def _listed(self, faults: Mapping[int, str]) -> str:
        return "; ".join(f"{self._leader.name_of(number)}: {fault}" for number, fault in sorted(faults.items()))


class FollowersWeights:
    """Changes a follower's weights as the leader says, and answers it."""

    def __init__(self, weights: Weights, follower: Follower) -> None:
        self._weights = weights
        self._follower = follower
        self._is_prepared = False

    def follow(self, command: commands.Check | commands.Prepare | commands.Commit | commands.Abandon) -> None:
        """Does what the command says, with no step in flight. Errors other than a refusal are raised: this host then
        ends, and all others with it."""
        match command:
            case commands.Check(change=change):
                self._answer(lambda: self._weights.check(change))
            case commands.Prepare():
                self._is_prepared = self._answer(self._weights.prepare)
            case commands.Commit():
                self._is_prepared = False
                self._weights.commit()
                self._follower.answer(None)
            case commands.Abandon():
                if self._is_prepared:
                    self._is_prepared = False
                    self._weights.abandon()

    def _answer(self, work: Callable[[], Mapping[str, str] | None]) -> bool:
        """Whether the work has succeeded."""
        try:
            facts = work()
        except (ValueError, OSError) as error:
            self._follower.answer(described(error))
            return False
        self._follower.answer(None, facts or {})
        return True
