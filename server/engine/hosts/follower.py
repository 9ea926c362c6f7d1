"""A follower's connection to the leader. It receives numbered commands, sends reports, and detects the leader's end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping

import msgspec
import zmq

from model.inputs.words import described
from server.engine.hosts import commands
from server.engine.hosts.cluster import SAY_EVERY_S, Cluster, HostsError, Inbox
from server.engine.hosts.sockets import CONNECTED, LOST, REFUSED, FollowerSockets


class Follower:
    """Receives the leader's commands on a separate thread, in the order of their numbers.

    `on_failure` is called once, with the reason, if the connection closes, if the leader is silent for
    `sockets.SILENCE_S`, if it reports its failure, or if a command is missing.
    """

    def __init__(self, cluster: Cluster, on_failure: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._on_failure = on_failure
        self._next_number = 0
        self._is_connected = self._is_closed = False
        self._refusals = 0
        self._received = Inbox[commands.Command]()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(commands.Numbered).decode
        self.sockets = FollowerSockets(cluster)
        self._sending = threading.Lock()  # of the reports' socket
        self._ending = threading.Event()
        self._receiver = threading.Thread(target=self._receive, name="hosts-receive", daemon=True)
        self._receiver.start()

    # One thread at a time calls these, and two may call `answer`.

    def arrive(self, settings: Mapping[str, str], report: Callable[[str], None]) -> None:
        """Reports to the leader and waits until all hosts have arrived.

        Raises HostsError if that takes more than `Cluster.timeout_s`, or if the leader refuses this host.
        """
        cluster = self._cluster
        self._send(commands.Hello(cluster.host_id, socket.gethostname(), dict(settings)))
        until = time.monotonic() + cluster.timeout_s
        where = f"the leader at {cluster.coordinator}:{cluster.port}"
        next_line = time.monotonic() + 1.0
        while not isinstance(self._received.next(min(until, next_line)), commands.Welcome):
            if time.monotonic() >= until:
                raise HostsError(f"{where} did not answer within {cluster.timeout_s:g} s{self._about_refusals()}")
            report(f"  waiting for {where} and the other hosts{self._about_refusals()}")
            next_line = time.monotonic() + SAY_EVERY_S

    def agree(self, num_pages: int, facts: Mapping[str, str]) -> int:
        """Reports this host's pages and facts to the leader. Returns the number of pages to use."""
        self._send(commands.Plan(self._cluster.host_id, num_pages, dict(facts)))
        command = self.next_command()
        if not isinstance(command, commands.UsePages):
            raise HostsError(f"the leader sent {type(command).__name__} where the number of pages was due")
        return command.num_pages

    def compiled(self) -> None:
        self._send(commands.Compiled(self._cluster.host_id))

    def answer(self, asked: commands.HostQuestion, work: Callable[[], commands.Found]) -> bool:
        """Does the work of a command, and reports its result or its ValueError or OSError to the leader. Returns
        whether the work has succeeded. Other errors are raised."""
        answer = commands.HostReply(self._cluster.host_id, asked.question)
        try:
            answer.found = work()
        except (ValueError, OSError) as error:
            answer.error = described(error)
        self._send(answer)
        return answer.error is None

    def next_command(self, timeout_s: float | None = None) -> commands.Command:
        """Waits for the next command. Raises HostsError if the leader has failed, or after `timeout_s`."""
        command = self._received.next(None if timeout_s is None else time.monotonic() + timeout_s)
        if command is None:
            raise HostsError(f"the leader sent no command within {timeout_s:g} s")
        return command

    def fail(self, reason: str) -> None:
        """Reports to the leader that this host cannot go on, and closes the connection."""
        if not self._is_closed:
            self._send(commands.Failed(self._cluster.host_id, reason))
            self.close()

    def close(self) -> None:
        """Closes the connection. Reports that were sent still arrive. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ending.set()
        if threading.current_thread() is not self._receiver:
            self._receiver.join()
        with self._sending:
            self.sockets.close()

    # --- within ---

    def _send(self, report: commands.Report) -> None:
        with self._sending:
            if not self._is_closed:
                self.sockets.reports.send(self._encode(report), zmq.NOBLOCK)

    def _about_refusals(self) -> str:
        if not self._refusals:
            return ""
        return f"; {self._refusals} connections ended in the handshake: do all hosts have the same secret?"

    # --- the receiver's thread ---

    def _receive(self) -> None:
        poller = zmq.Poller()
        poller.register(self.sockets.commands, zmq.POLLIN)
        poller.register(self.sockets.monitor, zmq.POLLIN)
        while not self._ending.is_set():
            ready = dict(poller.poll(100))
            if (
                self.sockets.commands in ready
            ):  # before the monitor: the leader's last command has the reason of its end
                self._take(self.sockets.commands.recv())
            elif self.sockets.monitor in ready:
                event = self.sockets.read_event()
                self._is_connected |= event == CONNECTED
                self._refusals += bool(event & REFUSED)
                if event == LOST and self._is_connected and not self.sockets.commands.poll(0):
                    self._lose("the leader has gone: its connection has closed")

    def _take(self, data: bytes) -> None:
        if not data:  # the leader asks ZeroMQ whether this host is still connected
            return
        try:
            numbered = self._decode(data)
        except msgspec.DecodeError as error:
            self._lose(f"the leader's message cannot be read ({error}): do all hosts run the same version?")
            return
        if numbered.number != self._next_number:
            self._lose(f"the leader's command {numbered.number} came where {self._next_number} was due")
            return
        self._next_number += 1
        if isinstance(numbered.command, commands.Fail):
            self._lose(f"the leader has ended: {numbered.command.reason}")
            return
        if isinstance(numbered.command, commands.Stop):
            self._ending.set()  # the connection closes next
        self._received.put(numbered.command)

    def _lose(self, reason: str) -> None:
        self._ending.set()
        self._received.put(HostsError(reason))
        self._on_failure(reason)
