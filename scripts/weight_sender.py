"""Sends new weights from a trainer to a server: arrays to a server on this machine, or the path of a folder to any.

    from scripts.weight_sender import WeightSender

    with WeightSender("http://127.0.0.1:8000", "ADMIN KEY") as sender:
        sender.send(arrays, version="step-40")  # by their Hugging Face names

The old weights serve until all new ones have arrived and have been checked. If the trainer is killed, the old weights
stay, and the next `send` begins a new update. Only one trainer at a time may send to a server.
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np

from model.loading.received_arrays import DTYPES, places

if TYPE_CHECKING:
    import jax

    Array = np.ndarray | jax.Array
    Arrays = Mapping[str, Array]


class SendError(RuntimeError):
    """The server has refused the weights and keeps the old ones. The message has its reason."""


class _Named(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]


class WeightSender:
    """Sends weights to a server on this machine, and pauses it. A server elsewhere reads a folder (`send_folder`).

    Args:
        base_url: the URL of the server, such as "http://127.0.0.1:8000".
        admin_api_key: one of its keys of `--admin-api-key`.
        piece_bytes: weights are sent in pieces of this many bytes, or of one array if it is larger. A piece takes this
            much additional memory of this host.
        timeout_s: seconds to wait for an answer of the server.
    """

    def __init__(
        self,
        base_url: str,
        admin_api_key: str,
        *,
        piece_bytes: int = 2**28,
        timeout_s: float = 600.0,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._key = admin_api_key
        self._piece_bytes = piece_bytes
        self._timeout_s = timeout_s
        self._block: SharedMemory | None = None  # as large as the largest piece so far; all engines read it

    def send(self, arrays: Arrays, version: str | None = None) -> None:
        """Updates the server's weights. It serves them when this returns.

        Args:
            arrays: all weights by their Hugging Face names, in NumPy's or JAX's arrays of float32, bfloat16 or float16.
            version: the name of these weights, which answers may have; None: the number of updates since
                its start.

        Raises ValueError for an array of another type, and SendError if the server does not take them.
        """
        wrong = [f"{name} has {array.dtype}" for name, array in arrays.items() if str(array.dtype) not in DTYPES]
        wrong += [f"{name} is empty" for name, array in arrays.items() if 0 in array.shape]
        if wrong:
            raise ValueError(f"arrays must be of one of {', '.join(DTYPES)}: {', '.join(wrong[:5])}")
        self._ask("/start_weight_update")
        try:
            for piece in _pieces(arrays, self._piece_bytes):
                named = [_Named(name, str(array.dtype), tuple(array.shape)) for name, array in piece.items()]
                names, dtypes, shapes = zip(*named, strict=True)
                info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
                block = self._put(piece.values(), named)
                self._ask("/update_weights", {"update_info": info | {"shared_memory": block}})
        except SendError:
            self.close()  # the server may still read what is there
            raise
        self._ask("/finish_weight_update", {} if version is None else {"weight_version": version})

    def send_folder(self, path: str, version: str | None = None) -> None:
        """Updates the server's weights from a folder that it can read, or a bucket. Raises SendError."""
        self._ask("/start_weight_update")
        self._ask("/update_weights", {"update_info": {"path": path}})
        self._ask("/finish_weight_update", {} if version is None else {"weight_version": version})

    def pause(self, mode: Literal["abort", "wait", "keep"] = "abort", *, clear_cache: bool = True) -> None:
        """Holds all requests until `resume`. Running requests are aborted with their output so far, finish first, or
        stop and continue later. `clear_cache` empties the prefix cache. Raises SendError."""
        self._ask(f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}")

    def resume(self) -> None:
        """Lets requests run again. Raises SendError."""
        self._ask("/resume")

    @property
    def weight_version(self) -> str:
        """The name of the weights that serve. Raises SendError."""
        return str(self._ask("/get_weight_version", method="GET")["weight_version"])

    def close(self) -> None:
        """Frees the shared memory."""
        if self._block is not None:
            self._block.close()
            self._block.unlink()
            self._block = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _put(self, arrays: Iterable[Array], named: Sequence[_Named]) -> str:
        """Copies arrays into the block of shared memory. Returns its name."""
        starts, size = places(named)
        if self._block is None or self._block.size < size:
            self.close()
            self._block = SharedMemory(create=True, size=max(1, size))
        for array, one, start in zip(arrays, named, starts, strict=True):
            np.ndarray(one.shape, DTYPES[one.dtype], self._block.buf, start)[...] = np.asarray(array)
        return self._block.name

    def _ask(self, target: str, body: Mapping[str, Any] | None = None, method: str = "POST") -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        data = None if method == "GET" else b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base_url + target, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                read: dict[str, Any] = json.load(answer)
                return read
        except urllib.error.HTTPError as error:
            raise SendError(f"{target}: {_words(error)}") from error
        except OSError as error:
            raise SendError(f"{target}: the server at {self._base_url} does not answer: {error}") from error


def _pieces(arrays: Arrays, most: int) -> Iterator[Arrays]:
    """The arrays in their order, in pieces of at most `most` bytes or of one array."""
    piece: dict[str, Array] = {}
    size = 0
    for name, array in arrays.items():
        own = math.prod(array.shape) * array.dtype.itemsize
        if piece and size + own > most:
            yield piece
            piece, size = {}, 0
        piece[name] = array
        size += own
    if piece:
        yield piece


def _words(error: urllib.error.HTTPError) -> str:
    body = error.read()
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {error.code}: {body[:200]!r}"
