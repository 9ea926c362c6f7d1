"""What the engine says of its stored pages is enough to know them all."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.page_events import Medium, PageCopied, PageEvent, PageEventRecorder, PageRemoved, PagesCleared, PageStored
from batcher.scheduling.digests import next_digest
from tests.batcher.fake_runner import FakeRunner
from tests.batcher.harness import CAPACITY, Drive, make_capacity, make_request
from tests.batcher.test_properties import Scenario, play, scenarios
from tests.examples import examples


class Follower:
    """Knows the stored pages by what it is told."""

    def __init__(self) -> None:
        self.pages: dict[bytes, PageStored] = {}
        self.on_host: set[bytes] = set()
        self.steps: list[list[PageEvent]] = []
        self.is_closed = False

    def put(self, events: list[PageEvent]) -> bool:
        assert events and not self.is_closed
        self.steps.append(events)
        for event in events:
            match event:
                case PageStored():
                    assert event.digest not in self.pages, "a page is stored twice"
                    self.pages[event.digest] = event
                case PageRemoved(digest=digest, medium=Medium.DEVICE):
                    del self.pages[digest]
                case PagesCleared(medium=Medium.DEVICE):
                    self.pages.clear()
                case PageCopied(digest=digest, medium=Medium.HOST):
                    assert digest not in self.on_host, "a page is copied twice"
                    self.on_host.add(digest)
                case PageRemoved(digest=digest, medium=Medium.HOST):
                    self.on_host.discard(digest)  # its copy may not have come
                case PagesCleared(medium=Medium.HOST):
                    self.on_host.clear()
        return True

    def close(self) -> None:
        self.is_closed = True


@settings(max_examples=examples(100))
@given(scenarios(), st.booleans())
def test_a_follower_knows_the_engines_own_index(scenario: Scenario, clears: bool) -> None:
    follower = Follower()
    drive = play(scenario, scenario.drive(follower))
    pool = drive.scheduler.pool
    assert follower.pages.keys() == pool._index.keys()
    for digest, page in follower.pages.items():
        assert page.tokens == pool._tokens[pool._index[digest]]
        request = replace(make_request("any", ()), cache_salt=page.salt, adapter=page.adapter)
        assert next_digest(request, [page.parent] if page.parent else [], page.tokens) == digest
    if clears:
        drive.engine.reset_prefix_cache()
        drive.step()
        assert follower.pages == {}
    stats = drive.engine.stats()
    assert stats.kv_events_published == sum(map(len, follower.steps)) and stats.kv_events_dropped == 0
    drive.engine.shutdown()
    assert follower.is_closed


def test_a_page_whose_values_are_not_to_be_trusted_is_removed():
    follower = Follower()
    drive = Drive(runner=FakeRunner(CAPACITY, nan_token=66), page_events=follower)
    drive.add(make_request("bad", [66, 11, 12, 13, 14, 15]))
    drive.step()
    drive.scheduler.preempt(drive.scheduler.running[0])  # before its step has returned
    drive.finish()
    (stored,), (removed,) = follower.steps
    assert isinstance(stored, PageStored) and removed == PageRemoved(stored.digest, Medium.DEVICE)


def test_what_the_sink_does_not_take_is_counted():
    class Full(Follower):
        def put(self, events: list[PageEvent]) -> bool:
            return False

    drive = Drive(make_capacity(page_size=4), page_events=Full())
    drive.add(make_request("a", range(10, 19), max_tokens=1))
    drive.finish()
    stats = drive.engine.stats()
    assert (stats.kv_events_published, stats.kv_events_dropped) == (0, 2)


def test_another_medium_has_events_of_its_own():
    follower = Follower()
    recorder = PageEventRecorder(follower)
    recorder.add(PageCopied(b"a", Medium.HOST))
    recorder.add(PageRemoved(b"a", Medium.HOST))
    recorder.add(PagesCleared(Medium.HOST))
    recorder.tell()
    recorder.tell()  # there is nothing new
    assert follower.steps == [
        [PageCopied(b"a", Medium.HOST), PageRemoved(b"a", Medium.HOST), PagesCleared(Medium.HOST)]
    ]
