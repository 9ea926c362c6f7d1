"""The responses and conversations in the server's database. Each belongs to the API key that made it, its `owner`.

All HTTP processes read them. The process that makes a response updates it, and sees here that another one has cancelled
or deleted it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from server.api.routes.responses.items import Item, items_of, output_items, response_of_item
from server.database import Database

TABLES = """
CREATE TABLE IF NOT EXISTS kept (  -- place: greater than those of all that have changed earlier
    id TEXT PRIMARY KEY, owner BLOB NOT NULL, place INTEGER NOT NULL, size INTEGER NOT NULL, is_over INTEGER NOT NULL,
    is_cancelled INTEGER NOT NULL DEFAULT 0, has_events INTEGER NOT NULL, seen REAL NOT NULL);
CREATE TABLE IF NOT EXISTS contents (  -- fields: the JSON object in the API; input: of a response, its items
    id TEXT PRIMARY KEY REFERENCES kept ON DELETE CASCADE, fields BLOB NOT NULL, input BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS kept_by_owner ON kept (owner, place, size);
CREATE INDEX IF NOT EXISTS kept_by_place ON kept (place);
CREATE TABLE IF NOT EXISTS items (  -- of conversations
    place INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, parent TEXT NOT NULL REFERENCES kept ON DELETE CASCADE,
    fields BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS items_by_parent ON items (parent);
CREATE TABLE IF NOT EXISTS events (  -- of responses that are streamed in the background
    parent TEXT REFERENCES kept ON DELETE CASCADE, number INTEGER, event BLOB NOT NULL, PRIMARY KEY (parent, number));
"""
NEWEST = "(SELECT coalesce(max(place), 0) + 1 FROM kept)"  # not a time: clocks are set back
MAX_KEPT = 1024
MAX_BYTES = 64 * 2**20  # of JSON, with the events
ABANDONED_S = 30.0  # a response of which its process has said nothing for so long has failed
EVENTS_AT_ONCE = 256
CHECKED_EVENTS = 64
ENDED = '{"code": "server_error", "message": "The HTTP process that made the response has ended."}'


@dataclass(frozen=True, slots=True)
class Kept:
    """A response or a conversation."""

    id: str
    fields: bytes  # its JSON object
    input: bytes  # of a response: the JSON list of the items that it answers
    is_over: bool  # false for a response that is being made
    has_events: bool

    def items(self) -> list[Item]:
        """The items of a response that is over: its input and its answer."""
        return [*items_of(self.input), *output_items(self.fields)]


class ResponseStore:
    """Keeps responses and conversations. If there are too many, or they have too many bytes, it drops the oldest one of
    the key that has most. So no key can displace those of a key that has fewer."""

    def __init__(self, database: Database, *, max_kept: int = MAX_KEPT, max_bytes: int = MAX_BYTES) -> None:
        self.database = database
        self._execute = database.execute
        self._max_kept = max_kept
        self._max_bytes = max_bytes
        database.create(TABLES)

    def add(
        self, id: str, owner: bytes, fields: bytes, input: bytes = b"[]", items: Sequence[Item] = (), *,
        is_over: bool = True, has_events: bool = False,
    ) -> None:  # fmt: skip
        """Adds a response, or a conversation with its items, as the newest. A response that is being made is not over,
        and `update` follows."""
        columns = "id, owner, place, size, is_over, has_events, seen"
        insert = f"INSERT INTO kept ({columns}) VALUES (?, ?, {NEWEST}, ?, ?, ?, ?)"
        values = (len(fields) + len(input), is_over, has_events, time.time())
        with self.database.transaction():
            self._execute(insert, id, owner, *values)
            self._execute("INSERT INTO contents VALUES (?, ?, ?)", id, fields, input)
            self._add_items(id, items)
            self._drop_oldest()

    def update(
        self, id: str, fields: bytes | None = None, *, is_over: bool = False, events: Sequence[tuple[int, bytes]] = ()
    ) -> None:
        """Changes a response and adds its numbered events, unless it has been removed meanwhile. It is then the newest.
        The bytes of events count after CHECKED_EVENTS of them, or with the next change."""
        change = f"UPDATE kept SET size = size + ?, is_over = ?, seen = ?, place = {NEWEST} WHERE id = ?"
        num_bytes = sum(len(event) for _, event in events)
        with self.database.transaction():
            for (num_before,) in self._execute("SELECT length(fields) FROM contents WHERE id = ?", id):
                if fields is not None:
                    num_bytes += len(fields) - num_before
                    self._execute("UPDATE contents SET fields = ? WHERE id = ?", fields, id)
                self._execute(change, num_bytes, is_over, time.time(), id)
                for number, event in events:
                    self._execute("INSERT INTO events VALUES (?, ?, ?)", id, number, event)
            if fields is not None or any(number % CHECKED_EVENTS == 0 for number, _ in events):
                self._drop_oldest()

    def add_items(self, conversation: str, items: Sequence[Item]) -> None:
        """Adds items to a conversation, unless it has been removed meanwhile."""
        with self.database.transaction():
            self._add_items(conversation, items)
            self._drop_oldest()

    def remove_item(self, conversation: str, id: str) -> bool:
        """Removes an item from a conversation. Returns whether it was there."""
        with self.database.transaction():
            delete = "DELETE FROM items WHERE id = ? AND parent = ? RETURNING length(fields)"
            removed = self._execute(delete, id, conversation)
            for (num_bytes,) in removed:
                self._execute("UPDATE kept SET size = size - ? WHERE id = ?", num_bytes, conversation)
        return bool(removed)

    def remove(self, id: str) -> bool:
        """Removes a response or a conversation. Returns whether it was kept."""
        return bool(self._execute("DELETE FROM kept WHERE id = ? RETURNING id", id))

    def find(self, id: str, owner: bytes) -> Kept | None:
        """The response or conversation with this id, if it belongs to `owner`."""
        self._is_over(id)
        query = """SELECT id, fields, input, is_over, has_events FROM kept JOIN contents USING (id)
                   WHERE id = ? AND owner = ?"""
        return next((Kept(*row) for row in self._execute(query, id, owner)), None)

    def items(self, conversation: str, id: str | None = None) -> list[Item]:
        """The items of a conversation, the oldest first, or the one with this id."""
        query = "SELECT id, fields FROM items WHERE parent = ?1 AND (?2 IS NULL OR id = ?2) ORDER BY place"
        return [Item(*row) for row in self._execute(query, conversation, id)]

    def find_items(self, ids: Iterable[str], owner: bytes) -> dict[str, Item]:
        """The items with these ids that are kept and belong to `owner`. They are items of conversations, or of
        responses that are over."""
        query = """SELECT items.id, items.fields FROM items JOIN kept ON items.parent = kept.id
                   WHERE items.id = ? AND kept.owner = ?"""
        found: dict[str, Item] = {}
        seen: set[str] = set()  # responses
        for id in ids:
            response = response_of_item(id)
            if id in found:
                continue
            if rows := self._execute(query, id, owner):
                found[id] = Item(*rows[0])
            elif response not in seen:
                seen.add(response)
                kept = self.find(response, owner)
                if kept is not None and kept.is_over:
                    found |= {item.id: item for item in kept.items()}
        return found

    def cancel(self, id: str) -> None:
        """Asks the process that makes a response to cancel it."""
        self._execute("UPDATE kept SET is_cancelled = 1 WHERE id = ?", id)

    def touch(self, ids: Sequence[str]) -> dict[str, bool]:
        """Says that this process is making these responses. Returns whether each has been cancelled; those that have
        been removed are missing."""
        places = ", ".join("?" * len(ids))
        change = f"UPDATE kept SET seen = ? WHERE id IN ({places}) RETURNING id, is_cancelled"
        return dict(self._execute(change, time.time(), *ids))

    def events(self, id: str, first: int) -> tuple[list[bytes], bool]:
        """Some of the events from the number `first` on, and whether they are the last ones."""
        is_over = self._is_over(id)
        query = "SELECT event FROM events WHERE parent = ? AND number >= ? ORDER BY number LIMIT ?"
        events = [event for (event,) in self._execute(query, id, first, EVENTS_AT_ONCE)]
        return events, is_over and len(events) < EVENTS_AT_ONCE

    def _is_over(self, id: str) -> bool:
        """Whether a response has ended or was removed. It has failed if its process has ended."""
        for is_over, seen in self._execute("SELECT is_over, seen FROM kept WHERE id = ?", id):
            if is_over or seen > time.time() - ABANDONED_S:
                return bool(is_over)
            failed = "json_set(CAST(fields AS TEXT), '$.status', 'failed', '$.error', json(?))"
            self._execute(f"UPDATE contents SET fields = CAST({failed} AS BLOB) WHERE id = ?", ENDED, id)
            self._execute("UPDATE kept SET is_over = 1 WHERE id = ?", id)
        return True

    def _add_items(self, conversation: str, items: Sequence[Item]) -> None:
        num_bytes = sum(len(item.fields) for item in items)
        if self._execute("UPDATE kept SET size = size + ? WHERE id = ? RETURNING id", num_bytes, conversation):
            for item in items:
                insert = "INSERT INTO items (id, parent, fields) VALUES (?, ?, ?)"
                self._execute(insert, item.id, conversation, item.fields)

    def _drop_oldest(self) -> None:
        """Drops the oldest of the key that has most, while there are too many or they have too many bytes."""
        while True:
            ((count, num_bytes),) = self._execute("SELECT count(*), total(size) FROM kept")
            if count <= self._max_kept and num_bytes <= self._max_bytes:
                return
            weight = "count(*)" if count > self._max_kept else "sum(size)"
            owner = f"SELECT owner FROM kept GROUP BY owner ORDER BY {weight} DESC LIMIT 1"
            oldest = f"SELECT id FROM kept WHERE owner = ({owner}) ORDER BY place LIMIT 1"
            self._execute(f"DELETE FROM kept WHERE id = ({oldest})")
