"""The engines that the hosts' engine processes run: the leader's serves, a follower's replays."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from batcher.delivery import Tokens
from batcher.errors import EngineClosedError
from batcher.request import FinishReason, Request, RequestOutput
from batcher.stats import EngineStats
from batcher.step import StepHandle
from model.inputs.words import described
from server.engine.around import EngineAround
from server.engine.hosts import messages
from server.engine.hosts.broadcast import HostRunner
from server.engine.hosts.cluster import HostsError
from server.engine.hosts.follower import Follower
from server.engine.hosts.leader import Leader
from server.engine.hosts.weights import FollowersWeights
from server.engine.process import ChangeableEngine, Reporter, ServedEngine

LOSS_S = 2.0  # a step that a lost host has failed may fail before the loss is noticed
RECOVERY_S = 10.0  # within which the leader notices a step that has failed on all hosts


class ServedChangeableEngine(ServedEngine, ChangeableEngine, Protocol):
    """Both."""


class LeadingEngine(EngineAround):
    """The leader's: it ends the followers when it ends. `leave` leaves `jax.distributed`, on all hosts at once."""

    def __init__(self, engine: ServedChangeableEngine, leader: Leader, leave: Callable[[], None]) -> None:
        super().__init__(engine)
        self.change_weights = engine.change_weights
        self._leader = leader
        self._leave = leave

    def shutdown(self) -> None:
        super().shutdown()
        if self.death is None:
            self._leader.stop()
            self._leave()
        elif not self._leader.wait_for_loss(LOSS_S):
            self._leader.fail(f"{type(self.death).__name__}: {self.death}")


class FollowingEngine:
    """`ServedEngine` without requests: a thread replays the leader's commands and ends this process after the last.

    Args:
        runner: its programs are compiled.
        weights: those of the runner.
        most_in_flight: steps that are dispatched before the oldest one must have returned.
        leave: as of `LeadingEngine`.
    """

    death: BaseException | None = None  # a failure ends the process at once

    def __init__(
        self,
        runner: HostRunner,
        follower: Follower,
        reporter: Reporter,
        weights: FollowersWeights,
        *,
        most_in_flight: int,
        leave: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._follower = follower
        self._reporter = reporter
        self._weights = weights
        self._most_in_flight = most_in_flight
        self._leave = leave
        self._in_flight: deque[StepHandle] = deque()
        self._stats = EngineStats()

    def start(self) -> None:
        threading.Thread(target=self._run, name="replay", daemon=True).start()

    def listen(self, on_tokens: Callable[[Tokens], None]) -> None:
        """It has no requests."""

    def add_request(self, request: Request, on_output: Callable[[RequestOutput], None]) -> None:
        raise EngineClosedError("this host takes no requests: the leader does")

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """It has no requests."""

    def reset_prefix_cache(self) -> None:
        """The leader's scheduler keeps the prefixes."""

    def stats(self) -> EngineStats:
        return self._stats

    def shutdown(self) -> None:
        """Ends this host alone; the leader fails."""
        self._follower.fail("it was told to stop")

    def _run(self) -> None:
        try:
            while self._replay(self._follower.next_command()):
                pass
            self._follower.close()
            self._leave()
        except HostsError:
            return  # the follower's `on_failure` ends this process
        except BaseException as error:
            reason = described(error)
            self._follower.fail(reason)
            self._reporter.fail(reason)
        self._reporter.end()

    def _replay(self, command: messages.Command) -> bool:
        """Does what the command says. False: it was the last."""
        match command:
            case messages.Step():
                try:
                    self._execute(command)
                except Exception as error:
                    self._await_recovery(error)
            case messages.Recover():
                self._recover()
            case messages.Check() | messages.Prepare() | messages.Commit() | messages.Abandon():
                while self._in_flight:  # the leader has read them all
                    self._in_flight.popleft().result()
                self._weights.follow(command)
            case messages.Stop():
                return False
            case _:
                raise RuntimeError(f"the leader sent {type(command).__name__} to a host that replays")
        return True

    def _execute(self, step: messages.Step) -> None:
        self._in_flight.append(self._runner.execute(messages.step_from_wire(step)))
        self._stats.num_steps += 1
        if len(self._in_flight) > self._most_in_flight:
            self._in_flight.popleft().result()

    def _recover(self) -> None:
        while self._in_flight:
            with contextlib.suppress(Exception):  # the leader has read its own, and says that they have failed
                self._in_flight.popleft().result()
        self._runner.recover()

    def _await_recovery(self, error: Exception) -> None:
        """A step that has failed on all hosts is the leader's to handle. Steps that it sent before are not run.

        Raises `error` if the leader does not say so: the step has failed here only.
        """
        while True:
            try:
                command = self._follower.next_command(RECOVERY_S)
            except HostsError:
                raise error from None
            if isinstance(command, messages.Recover):
                self._recover()
                return
            if not isinstance(command, messages.Step):
                raise error
