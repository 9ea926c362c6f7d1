"""A follower's connection to the leader. It receives commands, sends reports, and detects the leader's end."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping

import zmq

from model.inputs.words import described
from server.engine.hosts import commands
from server.engine.hosts.cluster import Cluster, HostsError
from server.engine.hosts.sockets import HostConnection


class Follower(HostConnection):
    """Receives the leader's commands on a separate thread. One thread at a time calls the methods, and two may call
    `answer`."""

    def __init__(self, cluster: Cluster, on_failure: Callable[[str], None]) -> None:
        super().__init__(cluster, on_failure, commands.Command)

    def arrive(self, settings: Mapping[str, str], report: Callable[[str], None]) -> None:
        """Reports to the leader and waits until all hosts have arrived.

        Raises HostsError if that takes more than `Cluster.timeout_s`, or if the hosts' settings differ.
        """
        report(f"  waiting for the leader at {self.cluster.endpoint()} and the other hosts")
        self._report(commands.Hello(socket.gethostname()))
        self.agree(0, settings, self.cluster.timeout_s)

    def agree(self, num_pages: int, facts: Mapping[str, str], timeout_s: float | None = None) -> int:
        """Compares the leader's facts with this host's. Returns the number of pages to use.

        Raises HostsError if the facts of any host differ.
        """

        def compare() -> int:
            if differing := [name for name in theirs.keys() | facts.keys() if theirs.get(name) != facts.get(name)]:
                listed = ", ".join(f"{name} ({facts.get(name)}, not {theirs.get(name)})" for name in sorted(differing))
                raise ValueError(f"it differs from the leader in {listed}: all hosts need the same")
            return num_pages

        asked = self.expect(commands.Agree, timeout_s)
        theirs = asked.facts
        self.answer(asked, compare)
        return self.expect(commands.UsePages).num_pages

    def answer(self, asked: commands.Question, work: Callable[[], commands.Found]) -> bool:
        """Does the work of a command, and reports its result or its ValueError or OSError to the leader. Returns
        whether the work has succeeded. Other errors are raised."""
        reply = commands.HostReply(number=asked.number)
        try:
            reply.found = work()
        except (ValueError, OSError) as error:
            reply.error = described(error)
        self._report(reply)
        return reply.error is None

    def next_command(self, timeout_s: float | None = None) -> commands.Command:
        """Waits for the next command. Raises HostsError if the leader has failed, or after `timeout_s`."""
        command: commands.Command | None = self._received.next(
            None if timeout_s is None else time.monotonic() + timeout_s
        )
        if command is None:
            where = self.cluster.endpoint()
            raise HostsError(f"the leader at {where} did not answer within {timeout_s:g} s{self.hint}")
        return command

    def expect[C: commands.Command](self, kind: type[C], timeout_s: float | None = None) -> C:
        """Waits for the next command, which must be of this kind."""
        command = self.next_command(timeout_s)
        if not isinstance(command, kind):
            raise HostsError(f"the leader sent {type(command).__name__} where {kind.__name__} was due")
        return command

    def fail(self, reason: str) -> None:
        """Reports to the leader that this host cannot go on, and closes the connection."""
        self._finish(commands.Failed(reason))

    def close(self) -> None:
        """Closes the connection. Reports that were sent still arrive. May be called again."""
        self._finish()

    def _report(self, content: commands.Hello | commands.HostReply) -> None:
        with self._lock:
            if not self._is_over:
                self._send(content)

    def _send(self, message: commands.Hello | commands.HostReply | commands.Failed) -> None:
        self.sockets.reports.send(self._encode(commands.HostReport(self.cluster.host_id, message)), zmq.NOBLOCK)

    def _take(self, message: commands.Command) -> None:
        if isinstance(message, commands.Failed):
            self._lose(f"the leader has ended: {message.message}")
            return
        if isinstance(message, commands.Stop):
            self._ending.set()  # the connection closes next
        self._received.put(message)

    def _find_lost(self) -> str | None:
        return "the leader" if self._was_connected else None
