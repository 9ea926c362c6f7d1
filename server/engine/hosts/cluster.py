"""The hosts of one engine, and their connections: encrypted, both ends authenticated, and nothing dropped."""

from __future__ import annotations

import hashlib
import socket
from dataclasses import dataclass, field

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

LEADER = 0  # the host's number
MIN_SECRET_CHARS = 16
# The leader's ports, counted from the coordinator's, which is JAX's own.
COMMANDS_OFFSET, REPORTS_OFFSET = 1, 2
Socket = zmq.Socket[bytes]
# ZeroMQ's own threads send and answer heartbeats, also while Python is busy. A stopped process does not answer.
HEARTBEAT_S = 2.0
SILENCE_S = 10.0
LINGER_S = 2.0  # at the end, for what has not been sent
LOST = zmq.EVENT_DISCONNECTED  # also after a refusal
CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class HostsError(ConnectionError):
    """The hosts of one engine cannot start together, or can no longer work together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The hosts of one engine, as this host sees them.

    The leader listens on three ports, at the coordinator's address only: `port` for `jax.distributed`, the next for
    commands to the followers, and the one after it for their reports.
    """

    coordinator: str  # the leader's name or address
    port: int
    num_hosts: int
    host_id: int  # 0: the leader
    timeout_s: float  # for all hosts to arrive at the start
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        if self.num_hosts < 2:
            raise ValueError(f"a cluster has at least two hosts: --num-hosts {self.num_hosts}")
        if not 0 <= self.host_id < self.num_hosts:
            raise ValueError(f"--host-id is from 0 to {self.num_hosts - 1}, not {self.host_id}")
        if not 0 < self.port <= 65535 - REPORTS_OFFSET:
            raise ValueError(f"--coordinator: port {self.port} and the two after it must be below 65536")
        if not self.timeout_s > 0:
            raise ValueError(f"--hosts-timeout must be above 0, not {self.timeout_s:g}")
        if len(self.secret) < MIN_SECRET_CHARS:
            raise ValueError(f"the hosts' secret has {len(self.secret)} characters; {MIN_SECRET_CHARS} are the least")

    @property
    def is_leader(self) -> bool:
        """Whether this host plans the steps."""
        return self.host_id == LEADER

    def endpoint(self, offset: int = 0) -> str:
        """HOST:PORT of one of the leader's ports, for the followers. A name that is not known yet is no error here."""
        return f"{_bracketed(self.coordinator)}:{self.port + offset}"

    def own_endpoint(self, offset: int = 0) -> str:
        """The same for the leader to listen on, with the IP address. Raises HostsError if the name is unknown."""
        try:
            found = socket.getaddrinfo(self.coordinator, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise HostsError(f"--coordinator {self.coordinator}: {error.strerror or error}") from error
        return f"{_bracketed(str(found[0][4][0]))}:{self.port + offset}"


def _bracketed(address: str) -> str:
    """IPv6 in brackets, as before a port."""
    return f"[{address}]" if ":" in address else address


@dataclass(frozen=True, slots=True)
class Keys:
    """A pair of CURVE keys, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


def keys_of(secret: str, role: str) -> Keys:
    """The keys of the `leader` or of a `follower`. Who has the secret can compute both.

    The public keys are as secret as the others: no message has them in clear. A host without the secret knows neither
    the leader's, to which its first message must be encrypted, nor a key that the leader accepts. The derivation is
    slow (scrypt), because a recorded handshake lets an eavesdropper test guesses of the secret.
    """
    seed = hashlib.scrypt(secret.encode(), salt=f"pallas-serve hosts: {role}".encode(), n=2**14, r=8, p=1, dklen=32)
    encoded = z85.encode(seed)
    return Keys(public=zmq.curve_public(encoded), secret=encoded)


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
