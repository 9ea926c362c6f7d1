"""The leader's connections to the followers. It waits for them at the start, sends commands, and detects their end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import zmq

from model.inputs.words import described
from server.engine.hosts import commands
from server.engine.hosts.cluster import LEADER, SAY_EVERY_S, Cluster, HostsError, Inbox
from server.engine.hosts.sockets import LOST, REFUSED, LeaderSockets

CONNECT_S = 10.0  # the most time between a follower's two connections
FIND_LOST_S = 0.3  # ZeroMQ's threads report a lost connection a moment before they forget whose it was


class Leader:
    """Sends each command to all followers. Thread-safe from `gather` on.

    A thread watches the followers. It calls `on_failure` once, with the reason, if a connection closes, if a follower
    is silent for `sockets.SILENCE_S`, or if one reports a failure. The other followers have been told by then.

    Raises HostsError if the coordinator's address is not this machine's, or is in use.
    """

    def __init__(self, cluster: Cluster, on_failure: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._on_failure = on_failure
        self._names: dict[int, str] = {}  # of the followers that have arrived
        self._arrivals = Inbox[commands.Report]()
        self._asked: dict[int, Inbox[commands.HostReply]] = {}  # by question
        self._encode = msgspec.msgpack.Encoder().encode
        self._lock = threading.Lock()  # of the commands' socket, the number, and what follows
        self.number = 0  # of the next command
        self._is_over = False  # told to stop, or failed
        self._refusals = 0
        self.sockets = LeaderSockets(cluster)
        self._ending = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="hosts-watch", daemon=True)
        self._watcher.start()

    # --- the start ---

    def gather(self, settings: Mapping[str, str], report: Callable[[str], None]) -> None:
        """Waits for all followers and compares their settings with `settings`.

        Raises HostsError if one does not arrive within `Cluster.timeout_s`, if two have the same number, or if settings
        differ.
        """
        until = time.monotonic() + self._cluster.timeout_s
        next_line = time.monotonic() + 1.0
        while missing := self._missing():
            if time.monotonic() >= until:
                raise HostsError(
                    f"{_hosts(missing)} of {self._cluster.num_hosts} did not come within {self._cluster.timeout_s:g} s "
                    f"(--hosts-timeout){self._about_refusals()}"
                )
            if time.monotonic() >= next_line:
                report(f"  waiting for {_hosts(missing)} of {self._cluster.num_hosts}{self._about_refusals()}")
                next_line = time.monotonic() + SAY_EVERY_S
            hello = self._arrivals.next(min(until, next_line))
            if isinstance(hello, commands.Hello):
                self._admit(hello, settings)
        self.sockets.accept_no_more()
        self.send(commands.Welcome())
        report(f"  all {self._cluster.num_hosts} hosts are there: {', '.join(self._names.values())} and this one")

    def agree(self, num_pages: int, facts: Mapping[str, str]) -> int:
        """Tells all hosts the number of pages to use, the smallest that any host has room for, and returns it.

        Raises HostsError if the hosts' facts differ.
        """
        for plan in self._reports_of_all(commands.Plan):
            self._compare(plan.host_id, plan.facts, facts)
            num_pages = min(num_pages, plan.num_pages)
        self.send(commands.UsePages(num_pages))
        return num_pages

    def wait_until_compiled(self) -> None:
        list(self._reports_of_all(commands.Compiled))

    # --- at any time ---

    def ask(
        self, command: commands.Question, own: Callable[[], commands.Found]
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """Runs a command on all hosts at once. This host runs `own`.

        Returns the results of the hosts that succeeded and the errors of the others, both by host number. Raises
        RuntimeError if a host is lost.
        """
        found: dict[int, Any] = {}
        faults: dict[int, str] = {}
        answers = Inbox[commands.HostReply]()
        with self._lock:
            command.question = self.number
            self._asked[command.question] = answers
            self._send(command)
            if self._is_over:
                answers.put(HostsError("the hosts of this engine have ended"))
        try:
            try:
                found[LEADER] = own()
            except (ValueError, OSError) as error:
                faults[LEADER] = described(error)
            while len(found) + len(faults) <= len(self._names) and (answer := answers.next()) is not None:
                if answer.error is None:
                    found[answer.host_id] = answer.found
                else:
                    faults[answer.host_id] = answer.error
        except HostsError as error:
            raise RuntimeError(str(error)) from error
        finally:
            self._asked.pop(command.question, None)
        return found, faults

    def listed(self, faults: Mapping[int, str]) -> str:
        """The faults as one message, with the names of their hosts."""
        names = {LEADER: f"host {LEADER} (the leader)"}
        return "; ".join(f"{names.get(number) or self._called(number)}: {faults[number]}" for number in sorted(faults))

    def send(self, command: commands.Command) -> None:
        """Sends a command to every follower without blocking. After a failure it does nothing."""
        with self._lock:
            self._send(command)

    def stop(self) -> None:
        """Tells the followers that the server has been shut down, and closes the connections."""
        self._finish(commands.Stop())

    def fail(self, reason: str) -> None:
        """Tells the followers that the engine is dead, and closes the connections."""
        self._finish(commands.Fail(reason))

    def wait_for_loss(self, timeout_s: float) -> bool:
        """Waits for the loss of a follower. Returns whether one was lost in this time; the watcher has then called
        `on_failure`."""
        if not self._ending.wait(timeout_s):
            return False
        self._watcher.join()
        return True

    # --- within ---

    def _send(self, command: commands.Command) -> None:
        if self._is_over:
            return
        data = self._encode(commands.Numbered(self.number, command))
        self.number += 1
        for host_id in self._names:
            try:
                self.sockets.commands.send_multipart([_identity(host_id), data], zmq.NOBLOCK)
            except zmq.ZMQError as error:  # not connected; the watcher reports it
                if error.errno != zmq.EHOSTUNREACH:
                    raise

    def _finish(self, last: commands.Command) -> bool:
        """Sends the last command and closes the connections. Returns False if another thread has begun to."""
        with self._lock:
            if self._is_over:
                return False
            self._send(last)
            self._is_over = True
        self._ending.set()
        if threading.current_thread() is not self._watcher:
            self._watcher.join()
        self.sockets.close()
        return True

    def _missing(self) -> list[int]:
        return [number for number in range(self._cluster.num_hosts) if number not in (LEADER, *self._names)]

    def _admit(self, hello: commands.Hello, settings: Mapping[str, str]) -> None:
        if hello.host_id in self._names:
            raise HostsError(f"two hosts have --host-id {hello.host_id}: {self._names[hello.host_id]} and {hello.name}")
        if hello.host_id not in self._missing():
            raise HostsError(f"{hello.name} has --host-id {hello.host_id} of {self._cluster.num_hosts} hosts")
        self._names[hello.host_id] = hello.name
        until = time.monotonic() + CONNECT_S
        while not self._is_connected(hello.host_id):
            if time.monotonic() >= until:
                raise HostsError(f"{self._called(hello.host_id)} reports, and its connection for commands fails")
            time.sleep(0.01)
        self._compare(hello.host_id, hello.settings, settings)

    def _is_connected(self, host_id: int) -> bool:
        """Whether a follower is connected. Sends an empty message to find out, which the follower ignores."""
        with self._lock:
            if self._is_over:
                return True
            try:
                self.sockets.commands.send_multipart([_identity(host_id), b""], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                return False
            return True

    def _compare(self, host_id: int, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
        differing = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
        if differing:
            listed = ", ".join(f"{name} ({theirs.get(name)}, not {ours.get(name)})" for name in sorted(differing))
            raise HostsError(f"{self._called(host_id)} differs from the leader in {listed}: all hosts need the same")

    def _reports_of_all[R: (commands.Plan, commands.Compiled)](self, kind: type[R]) -> Iterator[R]:
        """Yields one report of this kind from every follower. Raises HostsError if a host has failed meanwhile."""
        missing = set(self._names)
        while missing:
            report = self._arrivals.next()
            if isinstance(report, kind):
                missing.discard(report.host_id)
                yield report

    def _about_refusals(self) -> str:
        if not self._refusals:
            return ""
        return f"; {self._refusals} connections were refused: do all hosts have the same secret?"

    def _called(self, host_id: int) -> str:
        return f"host {host_id} ({self._names.get(host_id, 'not arrived')})"

    # --- the watcher's thread ---

    def _watch(self) -> None:
        poller = zmq.Poller()
        poller.register(self.sockets.reports, zmq.POLLIN)
        poller.register(self.sockets.monitor, zmq.POLLIN)
        decode = msgspec.msgpack.Decoder(commands.Report).decode
        while not self._ending.is_set():
            ready = dict(poller.poll(100))
            if self.sockets.reports in ready:  # before the monitor: a follower's last report has the reason of its end
                try:
                    report = decode(self.sockets.reports.recv())
                except msgspec.DecodeError as error:
                    self._lose(f"a host's message cannot be read ({error}): do all hosts run the same version?")
                    return
                if isinstance(report, commands.Failed):
                    self._lose(f"{self._called(report.host_id)}: {report.reason}")
                elif isinstance(report, commands.HostReply):
                    if (asked := self._asked.get(report.question)) is not None:
                        asked.put(report)
                else:
                    self._arrivals.put(report)
            elif self.sockets.monitor in ready:
                event = self.sockets.read_event()
                self._refusals += bool(event & REFUSED)
                if event == LOST and not self.sockets.reports.poll(100) and (lost := self._find_lost()) is not None:
                    self._lose(f"{self._called(lost)} has gone: its connection has closed")

    def _find_lost(self) -> int | None:
        """The number of the follower that is no longer connected. None: the lost connection was not that of a follower
        that has arrived."""
        until = time.monotonic() + FIND_LOST_S
        while time.monotonic() < until and not self._ending.wait(0.01):
            for host_id in list(self._names):
                if not self._is_connected(host_id):
                    return host_id
        return None

    def _lose(self, reason: str) -> None:
        if self._finish(commands.Fail(reason)):
            self._arrivals.put(HostsError(reason))
            for answers in self._asked.copy().values():
                answers.put(HostsError(reason))
            self._on_failure(reason)


def _identity(host_id: int) -> bytes:
    return f"host {host_id}".encode()


def _hosts(numbers: list[int]) -> str:
    return f"host{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
