"""Keeps responses and conversations in memory, with limits on their number and their bytes. Each belongs to the API key
that made it. With several HTTP processes, each process keeps its own."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from server.api.routes.responses.conversation import Conversation
from server.api.routes.responses.items import KeptItem
from server.api.routes.responses.record import ResponseRecord, response_of_item

MAX_KEPT = 1024
MAX_BYTES = 64 * 2**20  # of texts, log-probabilities and events

Kept = ResponseRecord | Conversation


class ResponseStore:
    """Keeps responses and conversations. If there are too many, or they take too much memory, it drops the oldest one
    of the key that has most. So no key can displace those of a key that has fewer.

    `on_drop` is called with each dropped object.
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
        self._kept: OrderedDict[str, Kept] = OrderedDict()  # the newest last
        self._sizes: dict[str, int] = {}
        self._num_bytes = 0
        self._conversations: dict[str, str] = {}  # their ids, by those of their items

    def put(self, kept: Kept) -> None:
        """Stores an object as the newest. Call it again when the object has grown."""
        if kept.id not in self._kept and isinstance(kept, Conversation):
            self._conversations |= dict.fromkeys(kept.items, kept.id)
        self._kept[kept.id] = kept
        self._kept.move_to_end(kept.id)
        self._num_bytes += kept.num_bytes - self._sizes.get(kept.id, 0)
        self._sizes[kept.id] = kept.num_bytes
        while len(self._kept) > self._max_kept:
            self._drop_oldest(lambda id: 1)
        while self._num_bytes > self._max_bytes:
            self._drop_oldest(self._sizes.__getitem__)

    def put_again(self, kept: Kept) -> None:
        """Stores an object that has grown, unless it has been removed meanwhile."""
        if kept.id in self._kept:
            self.put(kept)

    def add_items(self, conversation: Conversation, items: Sequence[KeptItem]) -> None:
        """Adds items to a conversation, unless it has been removed meanwhile."""
        if conversation.id in self._kept:
            conversation.add(items)
            self._conversations |= {item.id: conversation.id for item in items}
            self.put(conversation)

    def remove_item(self, conversation: Conversation, item: KeptItem) -> None:
        """Removes an item from a conversation."""
        conversation.remove(item)
        del self._conversations[item.id]
        self.put(conversation)

    def find_items(self, ids: Iterable[str], owner: bytes) -> dict[str, KeptItem]:
        """The items with these ids that are kept and belong to `owner`. They are items of conversations, or of
        responses that are over. May be called from any thread."""
        found: dict[str, KeptItem] = {}
        seen: set[str] = set()  # responses
        for id in ids:
            if id in found:
                continue
            conversation = self.conversation(self._conversations.get(id, ""), owner)
            item = None if conversation is None else conversation.items.get(id)
            if item is not None:
                found[id] = item
                continue
            record = self.response(response_of_item(id), owner)
            if record is not None and record.is_over and record.id not in seen:
                seen.add(record.id)
                found |= {item.id: item for item in (*record.input_items(), *record.output_items())}
        return found

    def response(self, id: str, owner: bytes) -> ResponseRecord | None:
        """The response, if it belongs to `owner`."""
        kept = self._get(id, owner)
        return kept if isinstance(kept, ResponseRecord) else None

    def conversation(self, id: str, owner: bytes) -> Conversation | None:
        """The conversation, if it belongs to `owner`."""
        kept = self._get(id, owner)
        return kept if isinstance(kept, Conversation) else None

    def _get(self, id: str, owner: bytes) -> Kept | None:
        kept = self._kept.get(id)
        return None if kept is None or kept.owner != owner else kept

    def __contains__(self, id: str) -> bool:
        """Whether a response, a conversation or an item of one with this id is kept, for any owner."""
        return id in self._kept or id in self._conversations or response_of_item(id) in self._kept

    def remove(self, id: str) -> bool:
        """Removes an object. Returns whether it was kept."""
        kept = self._kept.pop(id, None)
        if kept is None:
            return False
        self._num_bytes -= self._sizes.pop(id)
        if isinstance(kept, Conversation):
            for item_id in kept.items:
                del self._conversations[item_id]
        return True

    def _drop_oldest(self, weight: Callable[[str], int]) -> None:
        """Drops the oldest of the key that has most by this weight."""
        held: Counter[bytes] = Counter()
        for id, kept in self._kept.items():
            held[kept.owner] += weight(id)
        owner = max(held, key=held.__getitem__)
        oldest = next(kept for kept in self._kept.values() if kept.owner == owner)
        self.remove(oldest.id)
        self._on_drop(oldest)
