"""The ZeroMQ sockets between hosts. They are encrypted and authenticated, have heartbeats, and drop no messages."""

from __future__ import annotations

import ctypes
import logging
import socket as tcp
import struct

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from server.engine.curve import Keys, Socket, as_client, as_server, limit
from server.engine.hosts.cluster import COMMANDS_OFFSET, REPORTS_OFFSET, Cluster, HostsError

# ZeroMQ's own threads send and answer heartbeats, also while Python is busy. A stopped process does not answer.
HEARTBEAT_S = 2.0
SILENCE_S = 10.0
LINGER_S = 2.0  # the time at the end for messages that are not sent yet
MOST_REPORT_BYTES = 1 << 20  # the size limit of a follower's message
MOST_COMMAND_BYTES = 1 << 30  # the size limit of the leader's message
_SO_ATTACH_FILTER = 26  # Linux: a program of the kernel decides which packets a socket gets
_NO_PACKET = struct.pack("HBBI", 0x06, 0, 0, 0)  # such a program: "return 0", so many bytes of each packet

logger = logging.getLogger("pallas_serve")

LOST = zmq.EVENT_DISCONNECTED  # also after a refusal
CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


def keys_of(secret: str, role: str) -> Keys:
    """The keys of the `leader` or of a `follower`. Every host with the secret can compute both."""
    return Keys.derived(secret, f"pallas-serve hosts: {role}")


class HostSockets:
    """A host's sockets: one for the leader's commands, one for the followers' reports, and a monitor of the first one,
    which receives CONNECTED, LOST and REFUSED."""

    def __init__(self, commands: int, reports: int) -> None:
        """`commands` and `reports` are the ZeroMQ types of the two sockets."""
        self._context: zmq.Context[Socket] = zmq.Context()
        self.commands = make_socket(self._context, commands)
        self.reports = make_socket(self._context, reports)
        self.authenticator: ThreadAuthenticator | None = None
        self.monitor: Socket = self.commands.get_monitor_socket(CONNECTED | LOST | REFUSED)

    def read_event(self) -> int:
        """The next event of the monitor."""
        return int(parse_monitor_message(self.monitor.recv_multipart())["event"])

    def close(self) -> None:
        """Closes the sockets. Waits at most LINGER_S until all messages have been sent."""
        self.commands.disable_monitor()
        for socket in (self.monitor, self.commands, self.reports):
            socket.close()
        if self.authenticator is not None:
            self.authenticator.stop()
        self._context.term()


class LeaderSockets(HostSockets):
    """The leader's sockets. They listen, and refuse connections without the followers' key. After `accept_no_more` an
    unknown connection takes no resources, not even a descriptor.

    Raises HostsError if the coordinator's address is not this machine's, or is in use.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(zmq.ROUTER, zmq.PULL)
        self.commands.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a host that is not connected is an error
        self._follower = keys_of(cluster.secret, "follower")
        self.authenticator = ThreadAuthenticator(self._context)
        self.authenticator.start()
        self.authenticator.configure_curve_callback(credentials_provider=self)
        keys, where = keys_of(cluster.secret, "leader"), cluster.coordinator
        self._listeners: list[tcp.socket] = []
        try:
            for socket, offset in ((self.commands, COMMANDS_OFFSET), (self.reports, REPORTS_OFFSET)):
                limit(socket, MOST_REPORT_BYTES)
                as_server(socket, keys)
                where = cluster.own_endpoint(offset)
                host, _, port = where.rpartition(":")
                listener = tcp.create_server(
                    (host.strip("[]"), int(port)), family=tcp.AF_INET6 if host.startswith("[") else tcp.AF_INET
                )
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
        super().close()
        for listener in self._listeners:
            listener.close()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a host with this key may connect."""
        return key == self._follower.public


class FollowerSockets(HostSockets):
    """A follower's sockets. They connect to the leader in the background."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(zmq.DEALER, zmq.PUSH)
        self.commands.setsockopt(zmq.ROUTING_ID, f"host {cluster.host_id}".encode())
        keys, leader = keys_of(cluster.secret, "follower"), keys_of(cluster.secret, "leader")
        for socket, offset in ((self.commands, COMMANDS_OFFSET), (self.reports, REPORTS_OFFSET)):
            limit(socket, MOST_COMMAND_BYTES)
            as_client(socket, keys, leader.public)
            socket.connect(f"tcp://{cluster.endpoint(offset)}")


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
