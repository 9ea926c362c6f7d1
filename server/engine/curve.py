"""CURVE, ZeroMQ's encryption: who does not know a socket's public key gets no further than the handshake.

A public key is as secret as the others here: no message has it in clear, and a client's first message is encrypted to
it. With CURVE, the frames of a stranger are refused one by one. Without it, ZeroMQ keeps the parts of a message that
does not end, however many there are.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import zmq
import zmq.auth
from zmq.utils import z85

Socket = zmq.Socket[bytes]

KEY_CHARS = 40  # of a key in Z85
HANDSHAKE_S = 5.0  # a peer that has not ended the handshake by then is disconnected


@dataclass(frozen=True, slots=True)
class Keys:
    """A pair of CURVE keys, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def drawn(cls) -> Self:
        """A new pair."""
        return cls(*zmq.curve_keypair())

    @classmethod
    def derived(cls, secret: str, salt: str) -> Self:
        """The pair of a secret text: who has the text can compute both.

        The derivation is slow (scrypt), because a recorded handshake lets an eavesdropper test guesses of the text.
        """
        seed = hashlib.scrypt(secret.encode(), salt=salt.encode(), n=2**14, r=8, p=1, dklen=32)
        encoded = z85.encode(seed)
        return cls(zmq.curve_public(encoded), encoded)

    @classmethod
    def read(cls, file: Path) -> Self:
        """The pair of a file that `zmq.auth.create_certificates` has written. Raises ValueError if it has none."""
        try:
            public, secret = zmq.auth.load_certificate(file)
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
        if secret is None or len(secret) != KEY_CHARS or len(public) != KEY_CHARS:
            raise ValueError(f"{file} has no secret key: zmq.auth.create_certificates writes it to NAME.key_secret")
        return cls(public, secret)


def as_server(socket: Socket, keys: Keys) -> None:
    """The peers must know the public key."""
    socket.curve_server = True
    socket.curve_secretkey, socket.curve_publickey = keys.secret, keys.public


def as_client(socket: Socket, keys: Keys, server: bytes) -> None:
    """The other end must have the secret key of the public key `server`."""
    socket.curve_secretkey, socket.curve_publickey = keys.secret, keys.public
    socket.curve_serverkey = server


def limit(socket: Socket, most_bytes: int) -> None:
    """Bounds what a peer can send in one frame, and the time of its handshake."""
    socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
