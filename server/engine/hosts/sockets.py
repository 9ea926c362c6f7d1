"""The ZeroMQ sockets between hosts: encrypted, both ends authenticated, with heartbeats, and nothing dropped."""

from __future__ import annotations

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from server.engine.hosts.cluster import Keys

Socket = zmq.Socket[bytes]

# ZeroMQ's own threads send and answer heartbeats, also while Python is busy. A stopped process does not answer.
HEARTBEAT_S = 2.0
SILENCE_S = 10.0
LINGER_S = 2.0  # at the end, for what has not been sent

LOST = zmq.EVENT_DISCONNECTED  # also after a refusal
CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


def make_socket(context: zmq.Context[Socket], kind: int) -> Socket:
    """A socket without keys, which neither blocks nor drops messages."""
    socket = context.socket(kind)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.LINGER, int(LINGER_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_S * 1000))
    return socket


def as_leader(socket: Socket, keys: Keys) -> None:
    """Gives the socket the leader's keys. The context must have `accept_only`."""
    socket.curve_server = True
    socket.curve_secretkey = keys.secret
    socket.curve_publickey = keys.public


def as_follower(socket: Socket, keys: Keys, leader: Keys) -> None:
    """Gives the socket a follower's keys, and the leader's key to check the other end."""
    socket.curve_secretkey = keys.secret
    socket.curve_publickey = keys.public
    socket.curve_serverkey = leader.public


class _Only:
    """Says that one public key may connect."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


def accept_only(context: zmq.Context[Socket], follower: Keys) -> ThreadAuthenticator:
    """Refuses all connections to the context's leader sockets but those with the followers' key. Stop it at the end."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(credentials_provider=_Only(follower.public))
    return authenticator


def monitor_of(socket: Socket) -> Socket:
    """A socket that receives what happens to the connections of `socket`: CONNECTED, LOST and REFUSED."""
    return socket.get_monitor_socket(CONNECTED | LOST | REFUSED)


def read_event(monitor: Socket) -> int:
    """The next event of a monitor."""
    return int(parse_monitor_message(monitor.recv_multipart())["event"])
