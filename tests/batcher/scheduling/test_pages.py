from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling.digests import next_digest
from batcher.scheduling.pages import PagePool, StoredPrefix
from tests.batcher.harness import make_request
from tests.examples import examples


def contents(tokens: list[int], page_size: int) -> list[bytes]:
    """The bytes of each full page."""
    array = np.array(tokens, np.int32)
    return [array[i : i + page_size].tobytes() for i in range(0, len(tokens) - page_size + 1, page_size)]


def digests_of(tokens: list[int], page_size: int, salt: int = 0) -> list[bytes]:
    digests: list[bytes] = []
    for content in contents(tokens, page_size):
        digests.append(next_digest(make_request("a", tokens, cache_salt=salt), digests, content))
    return digests


def compute(pool: PagePool, tokens: list[int], salt: int = 0) -> list[int]:
    """A sequence comes, finds what it can, computes the rest and commits it all."""
    size = pool.page_size
    pages = found(pool, tokens, salt)
    pool.acquire(pages)
    pages = pages + pool.allocate(-(-len(tokens) // size) - len(pages))
    for page, digest, content in zip(pages, digests_of(tokens, size, salt), contents(tokens, size), strict=False):
        pool.commit(page, digest, content)
    return pages


def watch(pool: PagePool, prefix: StoredPrefix, tokens: list[int], salt: int = 0) -> None:
    digests = digests_of(tokens, pool.page_size, salt)
    pool.extend(prefix, digests, len(digests), contents(tokens, pool.page_size).__getitem__)


def found(pool: PagePool, tokens: list[int], salt: int = 0) -> list[int]:
    prefix = StoredPrefix()
    watch(pool, prefix, tokens, salt)
    return pool.let_go(prefix)


def test_only_full_pages_are_found_again_and_only_behind_their_own_prefix() -> None:
    pool = PagePool(10, 2)
    pages = compute(pool, [5, 6, 7, 8, 9])
    assert pages == [1, 2, 3]
    pool.release(pages)
    assert (pool.num_free, pool.num_reusable, pool.num_used) == (8, 2, 0)
    assert found(pool, [5, 6, 7, 8, 9, 9]) == [1, 2]
    assert found(pool, [5, 6, 1, 2]) == [1]
    assert found(pool, [7, 8]) == []
    assert found(pool, [5, 6, 7, 8], salt=1) == []


def test_a_hit_is_checked_token_by_token() -> None:
    pool = PagePool(4, 2)
    pool.release(compute(pool, [5, 6]))
    prefix = StoredPrefix()
    pool.extend(prefix, digests_of([5, 6], 2), 1, contents([5, 7], 2).__getitem__)  # as if two digests collided
    assert prefix.pages == []


def test_a_page_with_two_holders_stays_until_both_have_released_it() -> None:
    pool = PagePool(4, 2)
    first = compute(pool, [5, 6])
    second = compute(pool, [5, 6])
    assert first == second == [1]
    assert pool.num_held_once(first) == 0
    pool.release(first)
    assert pool.num_used == 1
    assert pool.num_held_once(second) == 1
    pool.release(second)
    assert pool.num_used == 0


def test_eviction_takes_the_least_recently_released_and_a_prefix_outlives_what_follows_it() -> None:
    pool = PagePool(4, 1)
    old, new = compute(pool, [10, 11]), compute(pool, [20, 21])
    pool.release(old)
    pool.release(new)
    assert pool.num_reusable == 4
    assert pool.allocate(1) == [old[1]]
    assert found(pool, [10, 11]) == [old[0]]
    assert found(pool, [20, 21]) == new
    assert pool.allocate(1) == [old[0]]
    assert found(pool, [10]) == []
    pool.acquire(found(pool, [20]))  # a hit revives; the next eviction has to take the other
    assert pool.allocate(1) == [new[1]]
    assert pool.num_available == 0


def test_of_two_equal_pages_one_is_known_and_the_other_returns_to_the_free_ones() -> None:
    pool = PagePool(4, 2)
    (digest,), (content,) = digests_of([5, 6], 2), contents([5, 6], 2)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.commit(first[0], digest, content)
    pool.commit(second[0], digest, content)
    assert found(pool, [5, 6]) == first
    pool.release(second)
    pool.release(first)
    assert (pool.num_free, pool.num_reusable) == (3, 1)


def test_what_is_forgotten_is_not_found() -> None:
    pool = PagePool(4, 2)
    pages = compute(pool, [5, 6, 7, 8])
    pool.forget(digests_of([5, 6, 7, 8], 2)[1:])
    assert found(pool, [5, 6, 7, 8]) == pages[:1]
    pool.clear_cache()
    assert found(pool, [5, 6]) == []
    pool.release(pages)
    assert (pool.num_free, pool.num_reusable) == (4, 0)
    pool.check_integrity([])


def test_integrity_finds_a_lost_reference_a_lost_page_and_a_page_in_two_states() -> None:
    pool = PagePool(4, 2)
    pages = compute(pool, [5, 6, 7])
    pool.check_integrity([pages])
    with pytest.raises(AssertionError, match="holders"):
        pool.check_integrity([])
    pool._free.append(pages[0])
    with pytest.raises(AssertionError, match="two states"):
        pool.check_integrity()
    pool._free[:] = [3]
    with pytest.raises(AssertionError, match="lost"):
        pool.check_integrity()


def test_a_pool_without_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="num_pages=0"):
        PagePool(0, 4)


def test_a_prefix_that_was_found_is_not_searched_again() -> None:
    pool = PagePool(8, 2)
    pages = compute(pool, [5, 6, 7, 8, 9, 9])
    pool.release(pages)
    looked_at: list[int] = []

    def content(page: int) -> bytes:
        looked_at.append(page)
        return contents([5, 6, 7, 8, 9, 9], 2)[page]

    prefix, digests = StoredPrefix(), digests_of([5, 6, 7, 8, 9, 9], 2)
    for _ in range(3):
        pool.extend(prefix, digests, 3, content)
    assert prefix.pages == pages
    assert looked_at == [0, 1, 2]
    pool.allocate(6)  # evicts the last page
    pool.extend(prefix, digests, 3, content)
    assert prefix.pages == pages[:2]
    assert looked_at == [0, 1, 2]


@settings(max_examples=examples(200))
@given(st.data())
def test_the_prefix_of_a_waiting_request_is_what_a_new_search_finds(data: st.DataObject) -> None:
    pool = PagePool(data.draw(st.integers(1, 12)), data.draw(st.integers(1, 2)))
    texts = st.lists(st.integers(0, 1), min_size=1, max_size=10)
    waiting = [(StoredPrefix(), tokens) for tokens in data.draw(st.lists(texts, min_size=1, max_size=3))]
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        tokens = data.draw(texts)
        event = data.draw(st.sampled_from(["come", "come", "come", "go", "go", "forget", "clear", "admit"]))
        if event == "come" and -(-len(tokens) // pool.page_size) <= pool.num_available:
            held.append(compute(pool, tokens))
        elif event == "go" and held:
            pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif event == "forget":
            pool.forget(digests_of(tokens, pool.page_size))
        elif event == "clear":
            pool.clear_cache()
        elif event == "admit":
            held.append(pool.let_go(waiting[0][0]))
            pool.acquire(held[-1])
        pool.check_integrity(held)
        for prefix, own in waiting:
            watch(pool, prefix, own)
            assert prefix.pages == found(pool, own)
            assert prefix.num_reusable == sum(page not in {p for pages in held for p in pages} for page in prefix.pages)
    for prefix, _ in waiting:
        pool.let_go(prefix)
    assert not pool._prefixes
