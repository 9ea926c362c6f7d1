"""The digests of a request's pages, by which the prefix cache finds them."""

from __future__ import annotations

from hashlib import blake2b

from batcher.request import Request
from batcher.scheduling.request_state import RequestState


def add_digests(seq: RequestState, page_size: int, most: int | None = None) -> bool:
    """Adds the missing digests of a request's full pages of known tokens, at most `most`. Whether none is missing."""
    digests, count = seq.digests, seq.num_known // page_size
    stop = count if most is None else min(count, len(digests) + most)
    for page in range(len(digests), stop):
        digests.append(next_digest(seq.request, digests, seq.page_bytes(page, page_size)))
    return stop >= count


def next_digest(request: Request, digests: list[bytes], content: bytes) -> bytes:
    """The digest of the request's page with `content`, the bytes of its tokens, that follows those with `digests`."""
    return blake2b((digests[-1] if digests else _root(request)) + content, digest_size=16).digest()


def _root(request: Request) -> bytes:
    """The first value of a request's chain of digests: its salt, and the weights that compute its K/V."""
    root = request.cache_salt.to_bytes(16, "little", signed=True)
    if request.adapter:
        root += request.adapter.to_bytes(16, "little", signed=True)
    return root + b"model" + request.model.to_bytes(16, "little", signed=True) if request.model else root
