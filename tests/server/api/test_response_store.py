"""The responses and conversations in the database: their limits, and what two processes see of each other."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.routes.responses import store as stores
from server.api.routes.responses.items import Item
from server.api.routes.responses.store import ResponseStore
from server.database import NAME, Database

EVENTS = [(0, b"event a\n\n"), (1, b"event b\n\n")]


def store_of(**limits: int) -> ResponseStore:
    return ResponseStore(Database(None), **limits)


def add(store: ResponseStore, id: str, num_bytes: int, owner: bytes = b"", **options) -> None:
    store.add(id, owner, b"x" * num_bytes, b"", **options)


def kept(store: ResponseStore, ids: str, owner: bytes = b"") -> list[str]:
    return [id for id in ids if store.find(id, owner) is not None]


def test_the_oldest_are_forgotten():
    store = store_of(max_kept=3, max_bytes=100)
    for id in "abcd":
        add(store, id, 10)
    assert kept(store, "abcd") == ["b", "c", "d"]
    add(store, "e", 85)
    assert kept(store, "abcde") == ["d", "e"]
    add(store, "f", 200)
    assert kept(store, "def") == []
    add(store, "g", 50, is_over=False)
    add(store, "h", 10)
    store.update("g", b"x" * 90)
    assert kept(store, "gh") == ["g", "h"]
    add(store, "i", 1)
    assert kept(store, "ghi") == ["g", "i"]  # it was changed after the other
    add(store, "j", 20)
    assert kept(store, "gij") == ["i", "j"]
    assert store.remove("j")
    assert not store.remove("j")


@given(st.lists(st.tuples(st.sampled_from([b"one", b"two", b"three"]), st.integers(0, 40)), max_size=60))
def test_a_key_with_its_share_of_the_store_loses_nothing_to_others(made):
    """Of three keys, one with a third of the number and of the bytes or less."""
    store = store_of(max_kept=6, max_bytes=100)
    sizes: dict[bytes, dict[str, int]] = {owner: {} for owner in (b"one", b"two", b"three")}
    for number, (owner, size) in enumerate(made):
        add(store, str(number), size, owner)
        sizes[owner][str(number)] = size
        for name, own in sizes.items():
            found = [id for id in own if store.find(id, name) is not None]
            assert found == [*own][len(own) - len(found) :]  # the oldest go first
            if len(own) <= 2 and sum(own.values()) <= 33:
                assert len(found) == len(own)
            sizes[name] = {id: own[id] for id in found}
        assert sum(map(len, sizes.values())) <= 6
        assert sum(sum(own.values()) for own in sizes.values()) <= 100


def test_events_and_items_take_their_share_and_go_with_their_owner():
    store = store_of(max_bytes=100)
    add(store, "a", 10)
    add(store, "b", 10, is_over=False)
    store.update("b", events=[(0, b"e" * 80)])
    assert kept(store, "ab") == ["a", "b"]
    store.update("b", events=[(stores.CHECKED_EVENTS, b"e")])
    assert kept(store, "ab") == ["b"]
    store.add("c", b"", b"{}", items=[Item("item_1", b"x" * 30)])
    assert kept(store, "bc") == ["c"]
    assert store.events("b", 0) == ([], True)
    store.add_items("c", [Item("item_2", b"x" * 60)])
    assert [item.id for item in store.items("c")] == ["item_1", "item_2"]
    assert store.remove_item("c", "item_1")
    assert not store.remove_item("c", "item_1")
    add(store, "d", 36)
    assert kept(store, "cd") == ["c", "d"]
    assert store.find_items(["item_2"], b"other") == {}
    assert [*store.find_items(["item_2"], b"")] == ["item_2"]
    store.add_items("c", [Item("item_3", b"x" * 100)])
    assert store.find_items(["item_2", "item_3"], b"") == {}


def test_processes_see_what_others_have_done(tmp_path):
    maker, other = (ResponseStore(Database(tmp_path)) for _ in range(2))
    maker.add("a", b"", b"{}", is_over=False, has_events=True)
    maker.add("b", b"", b"{}", is_over=False)
    maker.update("a", events=EVENTS)
    assert other.events("a", 1) == ([EVENTS[1][1]], False)
    assert maker.touch(["a", "b"]) == {"a": False, "b": False}
    other.cancel("a")
    other.remove("b")
    assert maker.touch(["a", "b"]) == {"a": True}
    maker.update("a", b'{"status": "cancelled"}', is_over=True, events=[(2, b"c\n\n")])
    maker.update("b", b"{}", is_over=True, events=EVENTS)
    assert other.find("b", b"") is None
    assert other.events("a", 2) == ([b"c\n\n"], True)


def test_a_response_of_a_process_that_has_ended_has_failed(tmp_path, monkeypatch):
    store = ResponseStore(Database(tmp_path))
    store.add("a", b"", b'{"status": "in_progress", "error": null}', is_over=False, has_events=True)
    store.update("a", events=EVENTS)
    now = time.time()
    monkeypatch.setattr(stores.time, "time", lambda: now + stores.ABANDONED_S - 1)
    assert not store.find("a", b"").is_over
    monkeypatch.setattr(stores.time, "time", lambda: now + stores.ABANDONED_S + 1)
    found = json.loads(store.find("a", b"").fields)
    assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
    assert store.events("a", 0) == ([event for _, event in EVENTS], True)


@pytest.mark.parametrize("content", [b"not a database, but text\n" * 100, b"SQLite format 3\x00" + b"\xff" * 4096])
def test_a_damaged_database_is_named(tmp_path, content):
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{tmp_path / NAME} cannot be used: .*Move it away"):
        ResponseStore(Database(tmp_path))
