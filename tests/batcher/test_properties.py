"""Whatever arrives, leaves and fails to fit: the invariants hold at every step, and every request gets its own text."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.page_events import PageEventSink
from batcher.request import FinishReason, Request, SamplingParams
from batcher.step import Capacity
from tests.batcher.fake_runner import FakeRunner, Proposal
from tests.batcher.harness import Drive
from tests.examples import examples

VOCAB = 40
TRUNK = tuple(range(3, 3 + 32))  # many prompts begin alike


@dataclass(frozen=True)
class Arrival:
    request: Request
    at_step: int
    aborted_after: int | None  # steps


@dataclass(frozen=True)
class Scenario:
    capacity: Capacity
    prefix_caching: bool
    pipeline_depth: int
    arrivals: tuple[Arrival, ...]
    num_drafts: int = 0
    max_draft_rows: int = 0
    propose: Proposal | None = None
    draft_cost: float = 0.0

    def of_equals(self) -> Scenario:
        """The same requests of one client, each of them alone: none takes a row of another."""
        equals = [replace(a, request=replace(a.request, client=0, group="")) for a in self.arrivals]
        return replace(self, arrivals=tuple(equals))

    def drive(self, page_events: PageEventSink | None = None) -> Drive:
        capacity = replace(self.capacity, keeps_text=self.num_drafts > 0)
        buckets = {"num_drafts": self.num_drafts, "max_draft_rows": self.max_draft_rows}
        return Drive(
            self.capacity,
            runner=FakeRunner(capacity, propose=self.propose, tells_would_accept=self.draft_cost == 0),
            draft_cost=self.draft_cost,
            buckets=buckets,
            prefix_caching=self.prefix_caching,
            pipeline_depth=self.pipeline_depth,
            page_events=page_events,
        )


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    plain = draw(st.booleans())
    max_tokens = draw(st.integers(1, 24))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=0 if plain else draw(st.integers(0, max_tokens)),
        temperature=draw(st.sampled_from([0.0, 0.7])),
        top_k=0 if plain else draw(st.integers(0, 5)),
        presence_penalty=0.0 if plain else draw(st.sampled_from([0.0, 0.5])),
        logit_bias=() if plain else draw(st.sampled_from([(), ((3, 1.5), (7, -2.0))])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        stop_token_ids=draw(st.sampled_from([(), (5, 6, 7)])),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, None, 3])),
        sampled_logprobs=draw(st.sampled_from([False, False, True])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 2])),
        grammar=draw(st.sampled_from([None, None, "1 0 5", "3 2 6", "2 50 50"])),
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    page_size = draw(st.integers(1, 6))
    max_model_len = draw(st.integers(8, 48))
    num_slots = draw(st.integers(1, 5))
    pages_per_seq = -(-max_model_len // page_size)
    capacity = Capacity(
        num_slots=num_slots,
        num_pages=pages_per_seq + draw(st.integers(0, (num_slots - 1) * pages_per_seq)),
        page_size=page_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=num_slots + draw(st.integers(1, 30)),
        vocab_size=VOCAB,
        max_loras=draw(st.sampled_from([0, 0, 1, 2])),
    )
    arrivals = []
    for i in range(draw(st.integers(1, 12))):
        shared = draw(st.integers(0, min(len(TRUNK), max_model_len - 2)))
        own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=max_model_len - 1 - shared))
        request = Request(
            request_id=str(i),
            prompt=TRUNK[:shared] + tuple(own),
            sampling=draw(sampling_params()),
            priority=draw(st.integers(-1, 1)),
            client=draw(st.sampled_from([0, 0, 1])),
            group=draw(st.sampled_from(["", "", "samples", "others"])),
            cache_salt=draw(st.sampled_from([0, 0, 1])),
            adapter=draw(st.sampled_from([0, 0, 1, 2, 3, 2**63 - 1])) if capacity.max_loras else 0,
        )
        aborted_after = draw(st.one_of(st.none(), st.none(), st.integers(0, 15)))
        arrivals.append(Arrival(request, draw(st.integers(0, 12)), aborted_after))
    return Scenario(
        capacity,
        prefix_caching=draw(st.booleans()),
        pipeline_depth=draw(st.integers(1, 3)),
        arrivals=tuple(arrivals),
    )


def play(scenario: Scenario, drive: Drive | None = None) -> Drive:
    """Plays the arrivals and aborts at their steps, then runs dry. Bounded: who needs more than this starves."""
    drive = drive or scenario.drive()
    events: dict[int, list[tuple[str, Request]]] = {}
    for arrival in scenario.arrivals:
        events.setdefault(arrival.at_step, []).append(("add", arrival.request))
        if arrival.aborted_after is not None:
            events.setdefault(arrival.at_step + arrival.aborted_after, []).append(("abort", arrival.request))
    for number in range(max(events) + 1):
        for kind, request in events.get(number, ()):
            if kind == "add":
                drive.add(request)
            else:
                drive.engine.abort(request.request_id)
        drive.step()
    work = sum(len(a.request.prompt) + a.request.sampling.max_tokens for a in scenario.arrivals)
    drive.finish(max_steps=20 + 5 * work)
    return drive


quick = settings(max_examples=examples(250))


@quick
@given(scenarios())
def test_every_invariant_at_every_step_and_everybody_its_own_text(scenario: Scenario) -> None:
    drive = play(scenario)
    drive.check_outputs()
    aborted = {a.request.request_id for a in scenario.arrivals if a.aborted_after is not None}
    for request_id, heard in drive.heard.items():
        assert heard.finish_reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)
        assert request_id in aborted or heard.finish_reason is not FinishReason.ABORT


@settings(max_examples=examples(25))
@given(scenarios())
def test_the_same_order_of_calls_gives_the_same_steps(scenario: Scenario) -> None:
    first, second = play(scenario).runner, play(scenario).runner
    assert first.executed == second.executed
    for a, b in zip(first.steps, second.steps, strict=True):
        assert (a.packed == b.packed).all()
        assert a.adapters == b.adapters


@quick
@given(scenarios())
def test_with_room_for_everybody_nobody_is_preempted(scenario: Scenario) -> None:
    c = scenario.capacity
    roomy = replace(c, num_pages=c.num_slots * c.pages_per_seq)
    drive = play(replace(scenario.of_equals(), capacity=roomy, prefix_caching=True))
    assert drive.engine.stats().num_preemptions == 0
