"""Pages that leave the device and come back: the texts stay what the requests alone determine."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.change import Change
from batcher.config import EngineConfig
from batcher.page_store import Offloading
from batcher.request import FinishReason
from batcher.step import Capacity
from tests.batcher.fake_runner import FakeRunner, fake_page_bytes
from tests.batcher.harness import EOS, Drive, make_capacity, make_request
from tests.batcher.test_engine_threads import Listener, check, running
from tests.batcher.test_page_events import Follower
from tests.batcher.test_properties import Scenario, play, scenarios
from tests.examples import examples

PROMPT = tuple(range(3, 43))  # ten pages


class Memory:
    """A store in a dict. `loses` and `breaks` make it lose pages, and give wrong tokens for them."""

    def __init__(self) -> None:
        self.pages: dict[bytes, tuple[bytes, np.ndarray]] = {}
        self.num_loads = self.num_clears = 0
        self.num_broken = self.num_failed = self.num_pages = self.bytes_on_disk = 0
        self.loses = False
        self.is_closed = False

    def has(self, digest: bytes) -> bool:
        return digest in self.pages

    def load(self, digest: bytes, tokens: bytes, page: np.ndarray) -> bool:
        self.num_loads += 1
        if self.loses or digest not in self.pages:
            return False
        assert self.pages[digest][0] == tokens
        page[:] = self.pages[digest][1]
        return True

    def store(self, digest: bytes, tokens: bytes, page: np.ndarray) -> bool:
        self.pages[digest] = tokens, page.copy()
        return True

    def clear(self) -> None:
        self.num_clears += 1
        self.pages.clear()

    def close(self) -> None:
        self.is_closed = True


def moving(capacity: Capacity, pages_of_copy: int = 4) -> Capacity:
    return replace(capacity, page_bytes=fake_page_bytes(capacity.page_size), pages_of_copy=pages_of_copy)


def offloading(capacity: Capacity, num_pages: int, store: Memory | None = None) -> Offloading:
    return Offloading(host_bytes=num_pages * fake_page_bytes(capacity.page_size), store=store)


def small(num_host_pages: int = 64, store: Memory | None = None, **changes: object) -> Drive:
    """An engine whose device has room for one request of full length only."""
    capacity = moving(make_capacity(num_pages=16, **changes), pages_of_copy=8)
    return Drive(capacity, offloading=offloading(capacity, num_host_pages, store))


def run(drive: Drive, request_id: str, prompt: tuple[int, ...], **sampling: object) -> int:
    """Runs a request alone. Returns how many of its tokens were found."""
    heard = drive.add(make_request(request_id, prompt, **sampling))
    drive.finish()
    return heard.last.num_cached_tokens


def fill(drive: Drive, name: str = "filler") -> None:
    """Evicts every page of others from the device."""
    run(drive, name, tuple(Random(name).choices(range(50, 99), k=50)), ignore_eos=True, max_tokens=14)


def counts(drive: Drive):
    return drive.engine.stats().offloading


def test_an_evicted_prefix_comes_back() -> None:
    drive = small()
    run(drive, "first", PROMPT)
    fill(drive)
    assert run(drive, "second", PROMPT) == 36  # the last token is always computed
    assert counts(drive).num_loaded == 9
    assert counts(drive).num_lost == counts(drive).num_not_loaded == 0
    drive.check_outputs()


def test_a_prefix_is_found_partly_on_the_device_and_partly_away() -> None:
    drive = small()
    run(drive, "first", PROMPT)
    run(drive, "other", tuple(range(50, 74)), ignore_eos=True, max_tokens=8)  # evicts the end of the first prompt
    before = drive.engine.stats()
    assert run(drive, "second", PROMPT) == 36
    assert 0 < counts(drive).num_loaded < 9
    after, loaded = drive.engine.stats(), 4 * counts(drive).num_loaded
    assert after.prefix_cache_hits - before.prefix_cache_hits == 36 - loaded
    new = {name: count - before.prompt_tokens_by_source[name] for name, count in after.prompt_tokens_by_source.items()}
    assert new == {
        "local_compute": len(PROMPT) - 36, "local_cache_hit": 36 - loaded, "external_kv_transfer": loaded
    }  # fmt: skip
    drive.check_outputs()


def test_salts_and_adapters_share_nothing() -> None:
    drive = small(max_loras=1)
    run(drive, "first", PROMPT)
    fill(drive)
    assert run(drive, "salted", PROMPT, cache_salt=7) == 0
    assert run(drive, "adapted", PROMPT, adapter=5) == 0
    drive.check_outputs()


def test_others_pass_a_row_that_waits_for_its_pages() -> None:
    drive = small()
    run(drive, "first", PROMPT)
    fill(drive)
    mover = drive.engine._page_mover
    work, mover.work_here = mover.work_here, lambda: work(0)
    waiting = drive.add(make_request("second", PROMPT))
    passing = drive.add(make_request("third", range(70, 74), max_tokens=3))
    while passing.finish_reason is None:
        drive.step()
    assert waiting.outputs == []
    assert drive.scheduler.running[0].load is not None
    mover.work_here = work
    drive.finish()
    assert waiting.last.num_cached_tokens == 36
    drive.check_outputs()


def test_a_row_whose_pages_take_too_long_computes_them() -> None:
    drive = small()
    run(drive, "first", PROMPT)
    fill(drive)
    mover = drive.engine._page_mover
    work, mover.work_here = mover.work_here, lambda: work(0)
    heard = drive.add(make_request("second", PROMPT))
    for _ in range(5):
        drive.step()
    assert heard.outputs == []
    drive.clock.now += 60
    drive.finish()
    assert heard.last.num_cached_tokens == 0
    mover.work_here = work
    drive.step()  # what comes late is not written anywhere
    drive.check_outputs()
    assert counts(drive).num_not_loaded == 9


def test_an_aborted_row_takes_no_more_pages() -> None:
    drive = small()
    run(drive, "first", PROMPT)
    fill(drive)
    mover = drive.engine._page_mover
    work, mover.work_here = mover.work_here, lambda: work(0)
    heard = drive.add(make_request("second", PROMPT))
    drive.step()
    drive.engine.abort("second")
    mover.work_here = work
    drive.finish()
    assert heard.finish_reason is FinishReason.ABORT
    fill(drive, "another")
    assert run(drive, "third", PROMPT) == 36
    drive.check_outputs()


def test_samples_of_one_prompt_load_it_once() -> None:
    drive = small()
    run(drive, "first", PROMPT)
    fill(drive)
    for n in range(2):
        drive.add(make_request(f"sample {n}", PROMPT, max_tokens=2))
    drive.finish()
    assert counts(drive).num_loaded == 9
    assert [drive.heard[f"sample {n}"].last.num_cached_tokens for n in range(2)] == [36, 36]


def test_a_changed_byte_is_noticed_and_computed() -> None:
    drive = small()
    run(drive, "first", PROMPT)
    fill(drive)
    drive.engine._page_mover._memory[:, 3] ^= 1
    assert run(drive, "second", PROMPT) == 0
    assert counts(drive).num_broken == 1
    drive.check_outputs()


def test_the_least_recently_used_page_of_the_host_makes_room() -> None:
    drive = small(num_host_pages=16)
    run(drive, "first", PROMPT)
    for n in range(3):
        fill(drive, f"filler {n}")
    assert run(drive, "second", PROMPT) == 0
    drive.check_outputs()


def test_a_store_has_what_the_host_has_no_room_for() -> None:
    store = Memory()
    drive = small(num_host_pages=16, store=store)
    run(drive, "first", PROMPT)
    for n in range(3):
        fill(drive, f"filler {n}")
    assert run(drive, "second", PROMPT) == 36
    assert counts(drive).num_loaded_from_store == 9
    drive.check_outputs()


def test_a_restart_finds_the_prefixes_of_before() -> None:
    store = Memory()
    drive = small(store=store)
    run(drive, "first", PROMPT)
    drive.step()
    drive.engine.shutdown()
    assert store.is_closed
    later = small(store=store)
    assert run(later, "second", PROMPT) == 36
    later.check_outputs()


def test_a_page_that_the_store_has_lost_is_computed() -> None:
    store = Memory()
    run(small(store=store), "first", PROMPT)
    store.loses = True
    drive = small(store=store)
    assert run(drive, "second", PROMPT) == 0
    assert store.num_loads == 1
    drive.check_outputs()


def test_more_copies_than_there_are_buffers_come_from_a_store() -> None:
    store = Memory()
    run(small(store=store), "first", PROMPT)
    capacity = moving(make_capacity(num_pages=16), pages_of_copy=1)
    listener = Listener()
    requests = [make_request(str(n), PROMPT[: 40 - n], max_tokens=3) for n in range(12)]
    with running(FakeRunner(capacity), offloading=offloading(capacity, 16, store)) as engine:
        for request in requests:
            engine.add_request(request, listener)
        engine.abort("5")
        ends = [listener.end(request.request_id) for request in requests]
        assert engine.stats().offloading.num_loaded_from_store > 0
    assert ends[0].num_cached_tokens == 36
    check([request for request in requests if request.request_id != "5"], listener)


def test_other_weights_find_no_pages_of_the_former_ones() -> None:
    store = Memory()
    drive = small(store=store)
    run(drive, "first", PROMPT)
    drive.engine.change(Change(work=lambda: None, on_done=lambda _error: None))
    drive.step()
    assert store.num_clears == 1
    assert run(drive, "second", PROMPT) == 0
    drive.engine.reset_prefix_cache(reset_external=True)
    drive.step()
    assert store.num_clears == 2
    assert run(drive, "third", PROMPT) == 0


def test_a_reset_of_the_prefix_cache_keeps_the_host_tier() -> None:
    store = Memory()
    drive = small(store=store)
    run(drive, "first", PROMPT)
    drive.engine.reset_prefix_cache()
    drive.step()
    assert store.num_clears == 0
    assert run(drive, "second", PROMPT) > 0


def waiting_for_pages() -> Drive:
    """The row of `second`, whose adapter is in no slot any more, waits for its pages, which do not come."""
    drive = small(max_loras=1)
    run(drive, "first", PROMPT, adapter=7)
    run(drive, "filler", tuple(range(50, 98)), ignore_eos=True, max_tokens=16, adapter=8)
    drive.engine._page_mover.work_here = lambda: False
    drive.add(make_request("second", PROMPT, adapter=7))
    for adapter in (9, 10, 11):
        drive.add(make_request(str(adapter), (adapter,), max_tokens=2, adapter=adapter))
    for _ in range(3):
        drive.step()
    assert drive.scheduler.offloaded.is_loading_any
    return drive


def come(drive: Drive) -> None:
    """Pages move again."""
    del drive.engine._page_mover.work_here
    drive.finish()
    drive.check_outputs()


def test_while_a_row_waits_for_pages_its_adapter_counts_as_staged() -> None:
    drive = waiting_for_pages()
    assert drive.engine.stats().num_adapters_resident == 1
    come(drive)


def test_a_row_that_leaves_before_its_pages_have_come_leaves_its_adapter_staged() -> None:
    drive = waiting_for_pages()
    drive.engine.abort("second")
    drive.add(make_request("third", PROMPT, adapter=7))
    come(drive)


def test_other_weights_find_an_adapter_that_waits_to_be_written() -> None:
    drive = waiting_for_pages()
    drive.engine.change(Change(work=lambda: None, on_done=lambda _error: None))
    come(drive)


def test_a_working_set_that_fits_moves_nothing() -> None:
    capacity = moving(make_capacity(num_pages=64))
    drive = Drive(capacity, offloading=offloading(capacity, 64))
    for n in range(6):
        run(drive, str(n), PROMPT)
    assert counts(drive).num_saved == counts(drive).num_loaded == 0


def test_no_prefix_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="prefixes"):
        EngineConfig(eos_token_ids=EOS, offloading=Offloading(host_bytes=1 << 20), prefix_caching=False)


def test_a_host_without_room_for_a_page_is_refused() -> None:
    capacity = moving(make_capacity())
    with pytest.raises(ValueError, match="no room for a page"):
        Drive(capacity, offloading=Offloading(host_bytes=1))


@st.composite
def offloads(draw: st.DrawFn) -> tuple[Scenario, int, int, bool, int]:
    """A scenario, pages of a copy, pages of the host, whether there is a store, and the seed of the mover's haste."""
    scenario = draw(scenarios())
    tight = replace(scenario.capacity, num_pages=scenario.capacity.pages_per_seq + draw(st.integers(0, 3)))
    scenario = replace(scenario, capacity=tight, prefix_caching=True)
    return scenario, draw(st.integers(1, 4)), draw(st.integers(1, 30)), draw(st.booleans()), draw(st.integers(0, 99))


@settings(max_examples=examples(150))
@given(offloads())
def test_everybody_gets_their_own_text_however_slowly_pages_move(given: tuple[Scenario, int, int, bool, int]) -> None:
    scenario, pages_of_copy, num_host_pages, has_store, seed = given
    capacity = moving(scenario.capacity, pages_of_copy)
    follower = Follower()
    drive = Drive(
        capacity,
        page_events=follower,
        runner=FakeRunner(capacity),
        pipeline_depth=scenario.pipeline_depth,
        offloading=offloading(capacity, num_host_pages, Memory() if has_store else None),
    )
    mover, random = drive.engine._page_mover, Random(seed)
    work = mover.work_here
    mover.work_here = lambda: work(random.choice([0, 0, 1, 2, None]))
    play(scenario, drive)
    drive.check_outputs()
    work()
    offloaded = drive.scheduler.offloaded
    offloaded.check_integrity()
    drive.engine.core.tell_of_pages()
    assert follower.on_host == offloaded._index.keys()
