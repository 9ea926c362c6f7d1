from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.http.encoding import ITEMS, LongList, NestedList, json_pieces, list_of

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.lists(PLAIN, max_size=2 * ITEMS + 1), max_size=4), PLAIN, st.text())
def test_the_pieces_are_the_json_of_the_whole(lists, plain, text):
    whole = [{"plain": plain, "text": text, "list": items} for items in lists]
    cut = NestedList({"plain": plain, "text": text, "list": LongList(iter(items))} for items in lists)
    assert json.loads(b"".join(json_pieces({"all": cut, "text": "\x00"}))) == {"all": whole, "text": "\x00"}


def test_no_piece_is_long():
    assert max(map(len, json_pieces({"list": LongList(range(10_000))}))) <= 6 * ITEMS


def test_the_items_of_a_long_list_are_made_when_they_are_needed():
    made = []
    pieces = json_pieces(list_of((made.append(i) for i in range(1000)), 1000))
    for _ in range(3):
        next(pieces)
    assert 0 < len(made) < 1000


def test_a_short_list_is_made_at_once():
    assert list_of(iter([1, 2]), 2) == [1, 2]


def test_what_is_no_json_is_an_error():
    with pytest.raises(TypeError, match="no JSON for object"):
        list(json_pieces({"a": object()}))
