"""The leader's connections to the followers. It waits for them at the start, sends commands, and detects their end."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from model.inputs.words import described
from server.engine.hosts import commands
from server.engine.hosts.cluster import LEADER, Cluster, HostsError, Inbox
from server.engine.hosts.sockets import HostConnection, identity

CONNECT_S = 10.0  # the most time between a follower's two connections
FIND_LOST_S = 0.3  # ZeroMQ's threads report a lost connection a moment before they forget whose it was


class Leader(HostConnection):
    """Sends each command to all followers. Thread-safe from `gather` on. The other followers have been told of a
    failure when `on_failure` is called.

    Raises HostsError if the coordinator's address is not this machine's, or is in use.
    """

    def __init__(self, cluster: Cluster, on_failure: Callable[[str], None]) -> None:
        self._names: dict[int, str] = {}  # of the followers that have arrived
        self._numbers = itertools.count()
        self.in_order = threading.Lock()  # of what begins programs on all hosts, which must have one order
        super().__init__(cluster, on_failure, commands.HostReport)

    # --- the start ---

    def gather(self, settings: Mapping[str, str], report: Callable[[str], None]) -> None:
        """Waits for all followers, which compare their settings with `settings`.

        Raises HostsError if one does not arrive within `Cluster.timeout_s`, if two have the same number, or if settings
        differ.
        """
        num_hosts, timeout_s = self.cluster.num_hosts, self.cluster.timeout_s
        until = time.monotonic() + timeout_s
        while missing := [number for number in range(num_hosts) if number not in (LEADER, *self._names)]:
            hosts = f"host{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {num_hosts}"
            report(f"  waiting for {hosts}")
            if (arrival := self._received.next(until)) is None:
                raise HostsError(f"{hosts} did not come within {timeout_s:g} s (--hosts-timeout){self.hint}")
            self._admit(arrival.host_id, arrival.content.name, missing)
        report(f"  all {num_hosts} hosts are there: {', '.join(self._names.values())} and this one")
        self.agree(0, settings)  # both connections of each host are there then
        self.sockets.accept_no_more()

    def agree(self, num_pages: int, facts: Mapping[str, str]) -> int:
        """Tells all hosts the number of pages to use, the smallest that any host has room for, and returns it.

        Raises HostsError if the hosts' facts differ.
        """
        found, faults = self.ask(commands.Agree(dict(facts)), lambda: num_pages)
        if faults:
            raise HostsError(self.listed(faults))
        num_pages = min(found.values())
        self.send(commands.UsePages(num_pages))
        return num_pages

    # --- at any time ---

    def ask(
        self, command: commands.HostQuestion, own: Callable[[], commands.Found]
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """Runs a command on all hosts at once. This host runs `own`.

        Returns the results of the hosts that succeeded and the errors of the others, both by host number. Raises
        RuntimeError if a host is lost.
        """
        found: dict[int, Any] = {}
        faults: dict[int, str] = {}
        answers = Inbox[commands.HostReport]()
        with self._lock:
            command.number = next(self._numbers)
            self._asked[command.number] = answers
            if self._is_over:
                answers.put(HostsError("the hosts of this engine have ended"))
            else:
                self._send(command)
        try:
            try:
                found[LEADER] = own()
            except (ValueError, OSError) as error:
                faults[LEADER] = described(error)
            while len(found) + len(faults) <= len(self._names) and (answer := answers.next()) is not None:
                assert isinstance(answer.content, commands.HostReply)
                if answer.content.error is None:
                    found[answer.host_id] = answer.content.found
                else:
                    faults[answer.host_id] = answer.content.error
        except HostsError as error:
            raise RuntimeError(str(error)) from error
        finally:
            self._asked.pop(command.number, None)
        return found, faults

    def listed(self, faults: Mapping[int, str]) -> str:
        """The faults as one message, with the names of their hosts."""
        names = {LEADER: f"host {LEADER} (the leader)"}
        return "; ".join(f"{names.get(number) or self._called(number)}: {faults[number]}" for number in sorted(faults))

    def send(self, command: commands.Command) -> None:
        """Sends a command to every follower without blocking. After a failure it does nothing."""
        with self._lock:
            if not self._is_over:
                self._send(command)

    def stop(self) -> None:
        """Tells the followers that the server has been shut down, and closes the connections."""
        self._finish(commands.Stop())

    def fail(self, reason: str) -> None:
        """Tells the followers that the engine is dead, and closes the connections."""
        self._finish(commands.Failed(reason))

    def wait_for_loss(self, timeout_s: float) -> bool:
        """Waits for the loss of a follower. Returns whether one was lost in this time; `on_failure` has then been
        called."""
        if not self._ending.wait(timeout_s):
            return False
        self._receiver.join()
        return True

    # --- within ---

    def _send(self, message: commands.Command) -> None:
        data = self._encode(message)
        for host_id in self._names:
            self._send_to(host_id, data)

    def _send_to(self, host_id: int, data: bytes) -> bool:
        """Returns whether the follower is connected. Its loss is handled elsewhere. The caller holds the lock."""
        try:
            self.sockets.commands.send_multipart([identity(host_id), data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _admit(self, host_id: int, name: str, missing: list[int]) -> None:
        if host_id in self._names:
            raise HostsError(f"two hosts have --host-id {host_id}: {self._names[host_id]} and {name}")
        if host_id not in missing:
            raise HostsError(f"{name} has --host-id {host_id} of {self.cluster.num_hosts} hosts")
        self._names[host_id] = name
        until = time.monotonic() + CONNECT_S
        while not self._is_connected(host_id):
            if time.monotonic() >= until:
                raise HostsError(f"{self._called(host_id)} reports, and its connection for commands fails")
            time.sleep(0.01)

    def _is_connected(self, host_id: int) -> bool:
        """Whether a follower is connected. Sends an empty message to find out, which the follower ignores."""
        with self._lock:
            return self._is_over or self._send_to(host_id, b"")

    def _called(self, host_id: int) -> str:
        return f"host {host_id} ({self._names.get(host_id, 'not arrived')})"

    # --- the receiver's thread ---

    def _take(self, message: commands.HostReport) -> None:
        match message.content:
            case commands.Failed(message=reason):
                self._lose(f"{self._called(message.host_id)}: {reason}")
            case commands.Hello():
                self._received.put(message)
            case commands.HostReply(number=number):
                if (asked := self._asked.get(number)) is not None:
                    asked.put(message)

    def _find_lost(self) -> str | None:
        until = time.monotonic() + FIND_LOST_S
        while time.monotonic() < until and not self._ending.wait(0.01):
            for host_id in list(self._names):
                if not self._is_connected(host_id):
                    return self._called(host_id)
        return None
