"""Responses and conversations in memory, with limits on their number and on their bytes. Each belongs to the API key
that made it. With several HTTP processes, each keeps its own."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request

from server.api.peers import FORWARDED, Peers
from server.api.routes.responses.conversation import Conversation
from server.api.routes.responses.record import ResponseRecord

MAX_KEPT = 1024
MAX_BYTES = 64 * 2**20  # of texts, log-probabilities and events

Kept = ResponseRecord | Conversation


class ResponseStore:
    """Keeps responses and conversations. If there are too many or they take too much memory, drops the oldest of the
    key that has most: no key can displace those of another one that has fewer.

    `on_drop` is called with what is dropped.
    """

    def __init__(
        self,
        *,
        max_kept: int = MAX_KEPT,
        max_bytes: int = MAX_BYTES,
        on_drop: Callable[[Kept], None] = lambda kept: None,
    ) -> None:
        self._max_kept = max_kept
        self._max_bytes = max_bytes
        self._on_drop = on_drop
        self._owners: dict[str, bytes] = {}
        self._kept: defaultdict[bytes, OrderedDict[str, Kept]] = defaultdict(OrderedDict)  # by owner
        self._sizes: dict[str, int] = {}
        self._num_bytes: Counter[bytes] = Counter()  # by owner

    def put(self, kept: Kept) -> None:
        """Stores it as the newest. Call it again when it has grown."""
        self.remove(kept.id)
        self._owners[kept.id] = kept.owner
        self._kept[kept.owner][kept.id] = kept
        self._sizes[kept.id] = kept.num_bytes
        self._num_bytes[kept.owner] += kept.num_bytes
        while len(self._owners) > self._max_kept:
            self._drop_oldest(max(self._kept, key=lambda owner: len(self._kept[owner])))
        while self._num_bytes.total() > self._max_bytes:
            self._drop_oldest(max(self._kept, key=self._num_bytes.__getitem__))

    def put_again(self, kept: Kept) -> None:
        """Stores what has grown, unless it has been removed meanwhile."""
        if kept.id in self._owners:
            self.put(kept)

    def response(self, id: str, owner: bytes) -> ResponseRecord | None:
        """The response, if it belongs to `owner`."""
        kept = self._get(id, owner)
        return kept if isinstance(kept, ResponseRecord) else None

    def conversation(self, id: str, owner: bytes) -> Conversation | None:
        """The conversation, if it belongs to `owner`."""
        kept = self._get(id, owner)
        return kept if isinstance(kept, Conversation) else None

    def _get(self, id: str, owner: bytes) -> Kept | None:
        return self._kept[owner].get(id) if self._owners.get(id) == owner else None

    def __contains__(self, id: str) -> bool:
        """Whether it is kept, whoever made it."""
        return id in self._owners

    async def keeper_of(self, id: str | None, request: Request, peers: Peers | None) -> Path | None:
        """The other process that keeps it. None: this one does, or none."""
        if id is None or peers is None or FORWARDED in request.scope or id in self:
            return None
        return await peers.keeper_of(id)

    def remove(self, id: str) -> bool:
        """Returns whether it was there."""
        owner = self._owners.pop(id, None)
        if owner is None:
            return False
        self._num_bytes[owner] -= self._sizes.pop(id)
        del self._kept[owner][id]
        return True

    def _drop_oldest(self, owner: bytes) -> None:
        oldest = next(iter(self._kept[owner].values()))
        self.remove(oldest.id)
        self._on_drop(oldest)
