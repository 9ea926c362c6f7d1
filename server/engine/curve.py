"""Keys and options for CURVE, ZeroMQ's encryption. A peer without a socket's public key cannot complete the handshake.

The public keys are kept secret here, too: no message contains them in clear, and a client's first message is encrypted
with the server's. With CURVE, ZeroMQ refuses each frame of an unknown peer. Without it, ZeroMQ keeps any number of
parts of a message that does not end.
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

KEY_CHARS = 40  # characters of a key in Z85
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
        """The pair that follows from a secret text. Everyone with the text can compute both keys.

        The derivation is slow (scrypt), because a recorded handshake lets an eavesdropper test guesses of the text.
        """
        seed = hashlib.scrypt(secret.encode(), salt=salt.encode(), n=2**14, r=8, p=1, dklen=32)
        encoded = z85.encode(seed)
        return cls(zmq.curve_public(encoded), encoded)

    @classmethod
    def read(cls, file: Path) -> Self:
        """Reads the pair from a file of `zmq.auth.create_certificates`. Raises ValueError if it has no secret key."""
        try:
            public, secret = zmq.auth.load_certificate(file)
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
        if secret is None or len(secret) != KEY_CHARS or len(public) != KEY_CHARS:
            raise ValueError(f"{file} has no secret key: zmq.auth.create_certificates writes it to NAME.key_secret")
        return cls(public, secret)


def as_server(socket: Socket, keys: Keys) -> None:
    """Makes the socket a CURVE server, whose public key the peers must know."""
    socket.curve_server = True
    socket.curve_secretkey, socket.curve_publickey = keys.secret, keys.public


def as_client(socket: Socket, keys: Keys, server: bytes) -> None:
    """Makes the socket a CURVE client. The other end must have the secret key of the public key `server`."""
    socket.curve_secretkey, socket.curve_publickey = keys.secret, keys.public
    socket.curve_serverkey = server


def limit(socket: Socket, most_bytes: int) -> None:
    """Limits the bytes of a frame from a peer, and the time of its handshake to HANDSHAKE_S."""
    socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
