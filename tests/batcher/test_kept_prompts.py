"""Prompts that one engine computes for another: pages are kept until they are taken, and texts stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from batcher.change import Change
from batcher.page_store import KeptPage, NoPage, Offloading, PageSource
from batcher.request import Request
from tests.batcher.fake_runner import fake_page_bytes
from tests.batcher.harness import Drive, make_capacity, make_request
from tests.batcher.test_offloading import Memory
from tests.examples import examples

PROMPT = tuple(range(3, 44))  # ten full pages and a token
KEEP_S = 30.0
TOKEN = b"token"
SOURCE = PageSource(address="there", key="", token=TOKEN, keep_s=KEEP_S)


class Wire:
    """`RemotePages` over the other engine itself, which must run for pages that are not there yet."""

    def __init__(self, prefill: Drive) -> None:
        self.prefill = prefill
        self.expected: dict[bytes, tuple[bytes, int]] = {}
        self.num_failed = self.num_pages = 0
        self.loses = False

    def expect(self, digests: Sequence[bytes], source: PageSource) -> None:
        self.expected |= {digest: (source.token, index) for index, digest in enumerate(digests)}

    def has(self, digest: bytes) -> bool:
        return digest in self.expected

    def load(self, digest: bytes, tokens: bytes, page: np.ndarray) -> bool:
        kept = taken(self.prefill, *self.expected[digest])
        if self.loses or not isinstance(kept, KeptPage):
            return False
        assert kept.tokens == tokens
        assert xxh3_64_intdigest(kept.page) == kept.checksum
        page[:] = kept.page
        self.num_pages += 1
        return True

    def clear(self) -> None:
        self.expected.clear()

    def close(self) -> None: ...


def engine(*, num_pages: int = 16, num_host_pages: int = 64, pages_of_copy: int = 16, **offloading: object) -> Drive:
    capacity = make_capacity(num_pages=num_pages)
    page_bytes = fake_page_bytes(capacity.page_size)
    capacity = replace(capacity, page_bytes=page_bytes, pages_of_copy=pages_of_copy)
    return Drive(capacity, offloading=Offloading(host_bytes=num_host_pages * page_bytes, **offloading))


def prefill_engine(**changes: object) -> Drive:
    return engine(keep_s=KEEP_S, **changes)


def pair() -> tuple[Drive, Drive, Wire]:
    prefill = prefill_engine()
    wire = Wire(prefill)
    return prefill, engine(remote=wire), wire


def computed(drive: Drive, prompt: Sequence[int] = PROMPT, token: bytes = TOKEN) -> None:
    request = make_request(f"of {token!r}", prompt, max_tokens=1)
    drive.add(replace(request, keep_as=token))
    while drive.engine.num_live:  # its pages may go to the host after its end
        drive.step()


def taken(drive: Drive, token: bytes, index: int) -> KeptPage | NoPage:
    """The page, as soon as it is known whether it comes."""
    while (page := drive.engine.kept_page(token, index)) is NoPage.NOT_YET:
        drive.step()
    return page


def ask(drive: Drive, request: Request) -> int:
    heard = drive.add(request)
    drive.finish()
    return heard.last.num_cached_tokens


def gauges(drive: Drive):
    return drive.engine.stats().offloading


def test_the_other_engine_computes_the_last_page_only() -> None:
    prefill, decode, wire = pair()
    computed(prefill)
    assert ask(decode, replace(make_request("first", PROMPT, temperature=0.7, seed=5), source=SOURCE)) == 40
    assert gauges(decode).num_fetched == wire.num_pages == 10
    assert decode.engine.stats().prompt_tokens_computed == 1
    prefill.check_outputs()
    decode.check_outputs()


def test_pages_are_taken_although_computing_them_would_be_quicker() -> None:
    prefill, decode, _ = pair()
    computed(prefill)
    times = decode.scheduler.offloaded.times
    times._of_token, times._of_page[False] = 1e-9, 1.0
    assert ask(decode, replace(make_request("first", PROMPT), source=SOURCE)) == 40
    assert times._of_page[False] == 1.0  # the other engine's pages say nothing about the store


def test_a_store_has_what_another_engine_has_lost_and_gets_what_it_has_given() -> None:
    store, prefill = Memory(), prefill_engine()
    wire = Wire(prefill)
    computed(prefill)
    decode = engine(remote=wire, store=store)
    assert ask(decode, replace(make_request("first", PROMPT), source=SOURCE)) == 40
    decode.step()
    assert len(store.pages) == 12  # two are of the output
    wire.loses = True
    later = engine(remote=wire, store=store)
    assert ask(later, replace(make_request("second", PROMPT), source=SOURCE)) == 40
    assert wire.num_pages == 10
    later.check_outputs()


def test_a_prompt_that_was_there_before_is_kept_too() -> None:
    prefill = prefill_engine(num_pages=32)
    ask(prefill, make_request("first", PROMPT))
    computed(prefill)
    assert all(isinstance(taken(prefill, TOKEN, index), KeptPage) for index in range(10))
    assert taken(prefill, TOKEN, 10) is NoPage.NEVER


def test_kept_pages_outlast_any_traffic_until_they_are_taken() -> None:
    prefill = prefill_engine(num_host_pages=24)
    computed(prefill)
    pages = [taken(prefill, TOKEN, index).page.copy() for index in range(10)]
    for seed in range(6):
        ask(prefill, make_request(f"other {seed}", Random(seed).choices(range(50, 99), k=50), max_tokens=14))
    for index, page in enumerate(pages):
        np.testing.assert_array_equal(taken(prefill, TOKEN, index).page, page)
    assert gauges(prefill).num_kept == 10
    prefill.engine.drop_kept(TOKEN)
    prefill.step()
    assert gauges(prefill).num_kept == 0
    assert taken(prefill, TOKEN, 0) is NoPage.NEVER


def test_pages_that_nobody_takes_are_kept_for_a_time_only() -> None:
    prefill = prefill_engine()
    computed(prefill)
    prefill.step()
    prefill.clock.now += KEEP_S - 1
    prefill.step()
    assert gauges(prefill).num_kept == 10
    prefill.clock.now += 1
    prefill.step()
    assert gauges(prefill).num_kept == 0
    assert prefill.scheduler.pool.num_used == 0


def test_a_prompt_beyond_half_the_hosts_memory_is_kept_in_part() -> None:
    prefill = prefill_engine(num_host_pages=8)
    computed(prefill)
    assert [isinstance(taken(prefill, TOKEN, index), KeptPage) for index in range(10)] == [True] * 4 + [False] * 6
    computed(prefill, tuple(range(50, 80)), b"another")
    assert taken(prefill, b"another", 0) is NoPage.NEVER
    prefill.step()
    assert prefill.scheduler.pool.num_used == 0


def test_a_page_of_two_prompts_is_kept_once_and_as_long_as_one_of_them() -> None:
    prefill = prefill_engine(num_host_pages=24)
    for token in (TOKEN, b"another"):
        computed(prefill, token=token)
        assert isinstance(taken(prefill, token, 9), KeptPage)
    assert gauges(prefill).num_kept == 10
    prefill.engine.drop_kept(TOKEN)
    prefill.step()
    assert gauges(prefill).num_kept == 10
    assert isinstance(taken(prefill, b"another", 9), KeptPage)
    prefill.engine.drop_kept(b"another")
    prefill.step()
    assert gauges(prefill).num_kept == 0


def test_pages_of_former_weights_are_not_given() -> None:
    prefill = prefill_engine(pages_of_copy=1)
    computed(prefill)
    prefill.engine.change(Change(work=lambda: None, on_done=lambda _error: None))
    prefill.step()
    prefill.step()
    assert all(taken(prefill, TOKEN, index) is NoPage.NEVER for index in range(10))
    assert prefill.scheduler.pool.num_used == 0


def test_other_weights_take_no_pages_of_the_former_ones() -> None:
    prefill, decode, wire = pair()
    computed(prefill)
    decode.add(replace(make_request("first", PROMPT), source=SOURCE))
    decode.engine.change(Change(work=lambda: None, on_done=lambda _error: None))
    decode.finish()
    assert wire.num_pages == 0
    decode.check_outputs()


def test_an_aborted_prompt_is_not_kept() -> None:
    prefill = prefill_engine()
    prefill.add(replace(make_request("first", PROMPT, max_tokens=1), keep_as=TOKEN))
    prefill.engine.abort("first")
    prefill.finish()
    assert prefill.engine.kept_page(TOKEN, 0) is NoPage.NEVER


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 45), st.booleans(), st.booleans(), st.sampled_from([0, 5, 40])),
        min_size=1,
        max_size=6,
    ),
    st.integers(2, 40),
    st.integers(0, 99),
)
def test_everybody_gets_their_own_text(
    asked: list[tuple[int, int, bool, bool, int]], num_host_pages: int, haste: int
) -> None:
    """Prompts with common beginnings; some sent alone, some lost on the way, after more or less time."""
    prefill = prefill_engine(num_host_pages=num_host_pages)
    wire = Wire(prefill)
    decode = engine(num_host_pages=num_host_pages, remote=wire)
    random = Random(haste)
    work = prefill.engine._page_mover.work_here
    prefill.engine._page_mover.work_here = lambda: work(random.choice([0, 1, None]))
    for number, (start, length, is_sent, is_lost, seconds) in enumerate(asked):
        prompt = tuple(range(start, start + length))
        token = b"%d" % number
        request = make_request(str(number), prompt, temperature=number % 2, seed=number)
        if is_sent:
            computed(prefill, prompt, token)
            request = replace(request, source=replace(SOURCE, token=token))
        wire.loses = is_lost
        prefill.clock.now += seconds
        ask(decode, request)
        if number % 2:
            prefill.engine.drop_kept(token)
    prefill.clock.now += KEEP_S
    for _ in range(20):
        prefill.step()
    assert gauges(prefill).num_kept == 0
    assert prefill.scheduler.pool.num_used == 0
    prefill.check_outputs()
    decode.check_outputs()
