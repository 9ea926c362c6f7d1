"""The engines of the leader and of the followers. The leader's runner sends each step to the followers, which replay
it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NoReturn, Protocol

from batcher.delivery import Tokens
from batcher.errors import EngineClosedError
from batcher.request import FinishReason, Request, RequestOutput
from batcher.stats import EngineStats
from batcher.step import Bucket, Capacity, Runner, StagedPages, StepHandle, StepInput, WeightsKind
from model.inputs.words import described
from server.engine.adapters import AdapterStore
from server.engine.hosts import commands
from server.engine.hosts.cluster import HostsError
from server.engine.hosts.follower import Follower
from server.engine.hosts.leader import Leader
from server.engine.process import Reporter, ServedEngine
from server.engine.weight_changes import Weights

if TYPE_CHECKING:
    import numpy as np

LOSS_S = 2.0  # a step that a lost host has failed may fail before the loss is noticed
RECOVERY_S = 10.0  # within which the leader notices a step that has failed on all hosts
_NO_MOVES = "the pages of several hosts do not leave the devices: each host could read its own part only"


def end_hosts(engine: ServedEngine, leader: Leader, leave: Callable[[], None]) -> None:
    """Ends the followers when the leader's engine has ended. `leave` leaves `jax.distributed`, on all hosts at once."""
    if engine.death is None:
        leader.stop()
        leave()
    elif not leader.wait_for_loss(LOSS_S):
        leader.fail(f"{type(engine.death).__name__}: {engine.death}")


class FollowingEngine:
    """A follower's `ServedEngine`. It takes no requests. A thread replays the leader's commands, and ends this process
    after the last one.

    Args:
        runner: the runner of this host, with compiled programs.
        weights: the weights of the runner.
        stores: the adapters and the models of the runner, where there are some.
        most_in_flight: the number of steps that may be in flight.
        leave: leaves `jax.distributed`, on all hosts at once.
    """

    death: BaseException | None = None  # a failure ends the process at once

    def __init__(
        self,
        runner: HostRunner,
        follower: Follower,
        reporter: Reporter,
        weights: Weights,
        stores: Mapping[WeightsKind, AdapterStore],
        *,
        most_in_flight: int,
        leave: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._follower = follower
        self._reporter = reporter
        self._weights = weights
        self._is_prepared = False  # a change of the weights
        self._stores = stores
        self._held: set[tuple[WeightsKind, int]] = set()  # what this host has loaded
        self._named_work = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._most_in_flight = most_in_flight
        self._leave = leave
        self._in_flight: deque[StepHandle] = deque()
        self._stats = EngineStats()

    def start(self) -> None:
        threading.Thread(target=self._replay_all, name="replay", daemon=True).start()

    def listen(self, on_tokens: Callable[[Tokens], None]) -> None:
        """Does nothing: this engine has no requests."""

    def add_request(self, request: Request, on_output: Callable[[RequestOutput], None]) -> None:
        raise EngineClosedError("this host takes no requests: the leader does")

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Does nothing: this engine has no requests."""

    def reset_prefix_cache(self, *, reset_external: bool) -> None:
        """Does nothing: the leader's scheduler has the prefix cache."""

    def stats(self) -> EngineStats:
        return self._stats

    def shutdown(self) -> None:
        """Ends this host only. The leader then fails."""
        self._follower.fail("it was told to stop")

    def _replay_all(self) -> None:
        try:
            while self._replay(self._follower.next_command()):
                pass
            self._follower.close()
            self._leave()
        except HostsError:
            return  # the follower's `on_failure` ends this process
        except BaseException as error:
            self._fail(error)
        self._reporter.end()

    def _fail(self, error: BaseException) -> None:
        reason = described(error)
        self._follower.fail(reason)
        self._reporter.fail(reason)

    def _replay(self, command: commands.Command) -> bool:
        """Carries out a command. Returns False after the last one."""
        match command:
            case commands.Step():
                try:
                    self._execute(command)
                except Exception as error:
                    self._await_recovery(error)
            case commands.Recover():
                self._recover()
            case commands.Check() | commands.Prepare() | commands.Commit() | commands.Abandon():
                while self._in_flight:  # the leader has read them all
                    self._in_flight.popleft().result()
                self._change_weights(command)
            case commands.Stage(kind=WeightsKind.MODEL) | commands.Unstage(kind=WeightsKind.MODEL):
                self._change_named(command)
            case _ if self._follows_named(command):
                pass
            case commands.Stop():
                return False
            case _:
                raise RuntimeError(f"the leader sent {type(command).__name__} to a host that replays")
        return True

    def _change_weights(self, command: commands.WeightsCommand) -> None:
        """Carries out a command about the weights. Errors other than ValueError and OSError are raised, and end all
        hosts."""
        match command:
            case commands.Check(change=change):
                self._follower.answer(command, lambda: dict(self._weights.check(change)))
            case commands.Prepare():
                self._is_prepared = self._follower.answer(command, self._weights.prepare)
            case commands.Commit():
                self._is_prepared = False
                self._weights.commit()
                self._follower.answer(command, lambda: None)
            case commands.Abandon() if self._is_prepared:
                self._is_prepared = False
                self._weights.abandon()

    def _follows_named(self, command: commands.Command) -> bool:
        """Schedules a command about adapters, or the names of models, on their thread. Returns False if the command is
        about something else."""
        if not isinstance(command, commands.NamedCommand):
            return False
        self._named_work.submit(self._change_named, command)
        return True

    def _change_named(self, command: commands.NamedCommand) -> None:
        def load(kind: WeightsKind, path: str) -> int:
            identity = self._stores[kind].load(path)
            self._held.add((kind, identity))
            return identity

        try:
            match command:
                case commands.Load(kind=kind, path=path):
                    self._follower.answer(command, lambda: load(kind, path))
                case commands.Forget(kind=kind, identity=identity):
                    if (kind, identity) in self._held:  # else the leader forgets what another host has found
                        self._held.discard((kind, identity))
                        self._stores[kind].forget(identity)
                case commands.Stage(kind=kind, identity=identity):
                    self._follower.answer(command, lambda: self._runner.stage(kind, identity))
                case commands.Unstage(kind=kind, identity=identity):
                    self._runner.drop(kind, identity)
        except BaseException as error:
            self._fail(error)

    def _execute(self, step: commands.Step) -> None:
        self._in_flight.append(self._runner.execute(commands.step_from_wire(step)))
        self._stats.num_steps += 1
        if len(self._in_flight) > self._most_in_flight:
            self._in_flight.popleft().result()

    def _recover(self) -> None:
        while self._in_flight:
            with contextlib.suppress(Exception):  # the leader has read its own, and says that they have failed
                self._in_flight.popleft().result()
        self._runner.recover()

    def _await_recovery(self, error: Exception) -> None:
        """Waits for the leader's Recover after a failed step. Steps that the leader sent before it are not run.

        Raises `error` if no Recover comes, because the step has failed on this host only.
        """
        while True:
            try:
                command = self._follower.next_command(RECOVERY_S)
            except HostsError:
                raise error from None
            if isinstance(command, commands.Recover):
                self._recover()
                return
            if not self._follows_named(command) and not isinstance(command, commands.Step):
                raise error


class HostRunner(Runner, Protocol):
    """A runner whose warm-up has two halves. Each host compiles the programs, and the leader's commands run them."""

    def compile(self, buckets: Iterable[Bucket], report: Callable[[str], None]) -> None:
        """Compiles the program of every bucket, and runs none."""

    def run_each(self, execute: Callable[[StepInput], StepHandle], report: Callable[[str], None]) -> None:
        """Runs each program once with `execute`. On a CPU it stops after a time, so the number of programs differs
        between hosts."""


class BroadcastRunner:
    """A `batcher.step.Runner` over all hosts of a cluster. The engine does not know that there are several hosts.

    A step is sent to the followers before it is dispatched here, so all hosts dispatch it at about the same time.
    """

    def __init__(self, runner: HostRunner, leader: Leader) -> None:
        self._runner = runner
        self._leader = leader

    def capacity(self) -> Capacity:
        return self._runner.capacity()

    def warm_up(
        self, buckets: Iterable[Bucket], report: Callable[[str], None], may_wait: Collection[Bucket] = ()
    ) -> list[Bucket]:
        """Compiles the programs on all hosts, which then run the same programs once.

        Returns an empty list: no program is left for later, because the leader could use it only after every host had
        reported it.
        """
        command = commands.Compile(list(buckets))
        _, faults = self._leader.ask(command, lambda: self._runner.compile(command.buckets, report))
        if faults:
            raise HostsError(self._leader.listed(faults))
        self._runner.run_each(self.execute, report)
        return []

    def compile_later(self, bucket: Bucket) -> None:
        raise RuntimeError("several hosts compile all programs before they serve")

    def execute(self, step: StepInput) -> StepHandle:
        with self._leader.in_order:
            self._leader.send(commands.step_to_wire(step))
            return self._runner.execute(step)

    def stage(self, kind: WeightsKind, identity: int) -> None:
        """Calls `Runner.stage` on all hosts. Raises ValueError if it fails on one, and undoes it on the others."""
        with self._leader.in_order if kind is WeightsKind.MODEL else contextlib.nullcontext():
            _, faults = self._leader.ask(commands.Stage(kind, identity), lambda: self._runner.stage(kind, identity))
            if faults:
                self.drop(kind, identity)
                raise ValueError(self._leader.listed(faults))

    def drop(self, kind: WeightsKind, identity: int) -> None:
        """Calls `Runner.drop` on all hosts."""
        self._leader.send(commands.Unstage(kind, identity))
        self._runner.drop(kind, identity)

    def read_pages(self, pages: Sequence[int]) -> NoReturn:
        raise RuntimeError(_NO_MOVES)

    def stage_pages(self, pages: Sequence[np.ndarray]) -> NoReturn:
        raise RuntimeError(_NO_MOVES)

    def write_pages(self, staged: StagedPages, pages: Sequence[int]) -> NoReturn:
        raise RuntimeError(_NO_MOVES)

    def recover(self) -> None:
        with self._leader.in_order:
            self._leader.send(commands.Recover())
            self._runner.recover()

    @property
    def num_compiles(self) -> int:
        return self._runner.num_compiles
