"""A conversation: items that are kept under an id and that requests for responses continue."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from sys import getsizeof
from typing import Any

from server.api.request.schemas import Message
from server.api.routes.responses.items import KeptItem, joined, message_size, one_by_one
from server.http.request_error import invalid

MAX_ITEMS = 10_000
BYTES_OF_A_CONVERSATION = 2000  # in memory, without its items and its metadata


class Conversation:
    """A conversation. Only the event loop may use it.

    Args:
        owner: the digest of the API key that it belongs to; empty if the server has no keys.
    """

    def __init__(self, owner: bytes, metadata: dict[str, str]) -> None:
        self.id = f"conv_{uuid.uuid4().hex}"
        self.owner = owner
        self.metadata = metadata
        self.items: dict[str, KeptItem] = {}  # by their ids, the oldest first
        self._bytes_of_items = 0
        self._created = int(time.time())

    @property
    def num_bytes(self) -> int:
        """The size of the conversation in memory, approximately."""
        texts = (*self.metadata, *self.metadata.values())
        return BYTES_OF_A_CONVERSATION + self._bytes_of_items + sum(map(getsizeof, texts))

    def check_room(self, num_items: int, param: str) -> None:
        """Raises RequestError 400 if there is no room for `num_items` more items."""
        if len(self.items) + num_items > MAX_ITEMS:
            raise invalid(param, f"a conversation has at most {MAX_ITEMS} items")

    def add(self, items: Iterable[KeptItem]) -> None:
        """Adds items. For a conversation in a store, call `ResponseStore.add_items` instead."""
        for item in items:
            self.items[item.id] = item
            self._bytes_of_items += item.num_bytes

    def remove(self, item: KeptItem) -> None:
        """Removes an item. For a conversation in a store, call `ResponseStore.remove_item` instead."""
        del self.items[item.id]
        self._bytes_of_items -= item.num_bytes

    def messages(self) -> list[Message]:
        """The messages that the template shows."""
        return joined(item.message for item in self.items.values() if item.message is not None)

    def body(self) -> dict[str, Any]:
        """The conversation's JSON object."""
        return {"id": self.id, "object": "conversation", "created_at": self._created, "metadata": self.metadata}


def new_items(messages: Sequence[Message]) -> list[KeptItem]:
    """The messages as items of a conversation, with new ids."""
    return [KeptItem(f"item_{uuid.uuid4().hex}", message, message_size(message)) for message in one_by_one(messages)]
