"""The digests of a request's pages, by which the prefix cache finds them."""

from __future__ import annotations

from hashlib import blake2b

from batcher.scheduling.request_state import RequestState


def add_digests(seq: RequestState, page_size: int, most: int | None = None) -> bool:
    """Adds the missing digests of a request's full pages of known tokens, at most `most`. Whether none is missing."""
    digests, count = seq.digests, seq.num_known // page_size
    stop = count if most is None else min(count, len(digests) + most)
    for page in range(len(digests), stop):
        digests.append(next_digest(digests, seq.page_bytes(page, page_size), seq.request.cache_salt))
    return stop >= count


def next_digest(digests: list[bytes], content: bytes, salt: int) -> bytes:
    """The digest of the page with `content`, the bytes of its tokens, that follows the pages with `digests`."""
    parent = digests[-1] if digests else salt.to_bytes(16, "little", signed=True)
    return blake2b(parent + content, digest_size=16).digest()
