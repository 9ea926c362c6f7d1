"""The encrypted connections between hosts. They have heartbeats and drop no messages.

JAX's coordination service notices the loss of a host only after its heartbeat time, and then aborts the process without
naming the host. ZeroMQ reports a closed connection at once.
"""

from __future__ import annotations

import ctypes
import logging
import socket as tcp
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from server.engine.curve import Keys, Socket, as_client, as_server, limit
from server.engine.hosts.cluster import COMMANDS_OFFSET, REPORTS_OFFSET, Cluster, HostsError, Inbox
from server.engine.wire import Failed

# ZeroMQ's own threads send and answer heartbeats, also while Python is busy. A stopped process does not answer.
HEARTBEAT_S = 2.0
SILENCE_S = 10.0
LAST_MESSAGE_S = 0.1  # in which the last message of a follower that is lost arrives
LINGER_S = 2.0  # the time at the end for messages that are not sent yet
MOST_REPORT_BYTES = 1 << 20  # the size limit of a follower's message
MOST_COMMAND_BYTES = 1 << 30  # the size limit of the leader's message
_SO_ATTACH_FILTER = 26  # Linux: a program of the kernel decides which packets a socket gets
_NO_PACKET = struct.pack("HBBI", 0x06, 0, 0, 0)  # such a program: "return 0", so many bytes of each packet

LOST = zmq.EVENT_DISCONNECTED  # also after a refusal
CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
DO_SECRETS_DIFFER = "a connection was refused: do all hosts have the same secret?"

logger = logging.getLogger("pallas_serve")


class HostSockets:
    """A host's sockets: one for the leader's commands, one for the followers' reports, and a monitor of the first one,
    which receives CONNECTED, LOST and REFUSED.

    The leader listens, and the followers connect in the background. All keys follow from the hosts' secret, so only a
    host that has it knows the leader's public key, without which no handshake succeeds. After `accept_no_more` an
    unknown connection takes no resources, not even a descriptor.

    Raises HostsError if this is the leader and the coordinator's address is not this machine's, or is in use.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self.commands = make_socket(self._context, zmq.ROUTER if cluster.is_leader else zmq.DEALER)
        self.reports = make_socket(self._context, zmq.PULL if cluster.is_leader else zmq.PUSH)
        self.monitor: Socket = self.commands.get_monitor_socket(CONNECTED | LOST | REFUSED)
        self._listeners: list[tcp.socket] = []
        keys = leader_keys(cluster.secret)
        sockets = ((self.commands, COMMANDS_OFFSET), (self.reports, REPORTS_OFFSET))
        if not cluster.is_leader:
            self.commands.setsockopt(zmq.ROUTING_ID, identity(cluster.host_id))
            for socket, offset in sockets:
                limit(socket, MOST_COMMAND_BYTES)
                as_client(socket, Keys.drawn(), keys.public)
                socket.connect(f"tcp://{cluster.endpoint(offset)}")
            return
        self.commands.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a host that is not connected is an error
        where = cluster.coordinator
        try:
            for socket, offset in sockets:
                limit(socket, MOST_REPORT_BYTES)
                as_server(socket, keys)
                where = cluster.own_endpoint(offset)
                host, _, port = where.rpartition(":")
                family = tcp.AF_INET6 if host.startswith("[") else tcp.AF_INET
                listener = tcp.create_server((host.strip("[]"), int(port)), family=family)
                self._listeners.append(listener.dup())
                listener.setblocking(False)
                socket.setsockopt(zmq.USE_FD, listener.detach())  # ZeroMQ closes it
                socket.bind(f"tcp://{where}")
        except HostsError:
            self.close()
            raise
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise HostsError(
                f"the leader cannot listen on {where}: {error.strerror}; --coordinator is an address of the host with "
                "--host-id 0, and the two ports after its own must be free"
            ) from error

    def accept_no_more(self) -> None:
        """Leaves all further connections unanswered. Existing connections stay open."""
        program = ctypes.create_string_buffer(_NO_PACKET, len(_NO_PACKET))
        for listener in self._listeners:
            try:
                listener.setsockopt(tcp.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
            except OSError as error:  # such as in a sandbox
                logger.warning("the hosts' ports still accept connections: %s", error)

    def close(self) -> None:
        """Closes the sockets. Waits at most LINGER_S until all messages have been sent."""
        self.commands.disable_monitor()
        for socket in (self.monitor, self.commands, self.reports):
            socket.close()
        for listener in self._listeners:
            listener.close()
        self._context.term()


class HostConnection:
    """One end of the connection between the leader and the followers. A separate thread receives the messages.

    `on_failure` is called once, with the reason, if a connection closes, if another host is silent for SILENCE_S or
    reports a failure, or if a message cannot be read.
    """

    def __init__(self, cluster: Cluster, on_failure: Callable[[str], None], kind: Any) -> None:
        """`kind` is the type of the messages that come in."""
        self.cluster = cluster
        self.hint = ""  # about refused connections, for the errors of a start that takes too long
        self._on_failure = on_failure
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._received = Inbox[Any]()  # messages for the thread that waits for the next one
        self._asked: dict[int, Inbox[Any]] = {}  # replies, by the number of the question
        self._lock = threading.Lock()  # of sending, and of `_is_over`
        self._is_over = self._was_connected = False
        self.sockets = HostSockets(cluster)
        self._ending = threading.Event()
        self._receiver = threading.Thread(target=self._receive, name="hosts-receive", daemon=True)
        self._receiver.start()

    def _send(self, message: Any) -> None:
        """Sends a message without blocking. The caller holds the lock."""
        raise NotImplementedError

    def _take(self, message: Any) -> None:
        """Handles a message, on the receiver's thread. `_lose` handles the end."""
        raise NotImplementedError

    def _find_lost(self) -> str | None:
        """Names the host whose connection has closed. None: the connection was not that of a host that takes part."""
        raise NotImplementedError

    # --- within ---

    def _finish(self, last: Any = None) -> None:
        """Sends the last message and closes the connections. May be called again."""
        if self._end(last):
            self._receiver.join()
            self.sockets.close()

    def _lose(self, reason: str) -> None:
        """Ends the connections because of a failure, on the receiver's thread. The leader tells the followers why."""
        is_leader = self.cluster.is_leader
        if not self._end(Failed(reason) if is_leader else None):
            return
        if is_leader:
            self.sockets.close()  # sends the reason
        for inbox in (self._received, *self._asked.copy().values()):
            inbox.put(HostsError(reason))
        self._on_failure(reason)  # a follower must be quick: JAX aborts its process when the leader's has gone
        if not is_leader:
            self.sockets.close()

    def _end(self, last: Any) -> bool:
        """Sends the last message. Returns False if another thread has done so."""
        with self._lock:
            if self._is_over:
                return False
            if last is not None:
                self._send(last)
            self._is_over = True
        self._ending.set()
        return True

    def _receive(self) -> None:
        incoming = self.sockets.reports if self.cluster.is_leader else self.sockets.commands
        poller = zmq.Poller()
        poller.register(incoming, zmq.POLLIN)
        poller.register(self.sockets.monitor, zmq.POLLIN)
        while not self._ending.is_set():
            ready = dict(poller.poll(100))
            if incoming in ready:  # before the monitor: the last message has the reason of an end
                self._handle(incoming.recv())
            elif self.sockets.monitor in ready:
                event = int(parse_monitor_message(self.sockets.monitor.recv_multipart())["event"])
                self._was_connected |= event == CONNECTED
                if event & REFUSED and not self.hint:
                    logger.warning(DO_SECRETS_DIFFER)
                    self.hint = f"; {DO_SECRETS_DIFFER}"
                if event == LOST:
                    until = time.monotonic() + (LAST_MESSAGE_S if self.cluster.is_leader else 0)
                    while not self._ending.is_set() and incoming.poll(max(0, int((until - time.monotonic()) * 1000))):
                        self._handle(incoming.recv())
                    if (lost := self._find_lost()) is not None:
                        self._lose(f"{lost} has gone: its connection has closed")

    def _handle(self, data: bytes) -> None:
        if not data:  # the leader asks ZeroMQ whether this host is still connected
            return
        try:
            message = self._decode(data)
        except msgspec.DecodeError as error:
            self._lose(f"a message cannot be read ({error}): do all hosts run the same version?")
        else:
            self._take(message)


def leader_keys(secret: str) -> Keys:
    """The leader's keys. Every host with the secret can compute them."""
    return Keys.derived(secret, "pallas-serve hosts: leader")


def identity(host_id: int) -> bytes:
    """The name of a follower's socket."""
    return f"host {host_id}".encode()


def make_socket(context: zmq.Context[Socket], kind: int) -> Socket:
    """A socket that neither blocks nor drops messages. Its keys are set later."""
    socket = context.socket(kind)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.LINGER, int(LINGER_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_S * 1000))
    return socket
