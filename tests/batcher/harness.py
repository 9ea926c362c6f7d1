"""An engine over the fake runner, driven step by step, with every invariant checked at every step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.engine import Engine
from batcher.page_events import PageEventSink
from batcher.request import FinishReason, Request, RequestOutput, SamplingParams
from batcher.scheduling.request_state import OnOutput
from batcher.stats import ModelState
from batcher.step import Capacity, WeightsKind
from batcher.step_times import StepTimes
from tests.batcher.fake_runner import FakeRunner, expected_embedding, expected_tokens, fake_sampled_logprob
from tests.batcher.toy_grammar import ToyGrammars

EOS = (1, 2)
CAPACITY = Capacity(num_slots=4, num_pages=64, page_size=4, max_model_len=64, max_num_batched_tokens=32, vocab_size=100)

_OF_REQUESTS = (
    "client", "group", "cache_salt", "deadline_s", "embeds", "counts_drafts", "adapter", "model", "targets", "is_flex",
)  # fmt: skip


def make_capacity(**changes: object) -> Capacity:
    return Capacity(**{name: getattr(CAPACITY, name) for name in CAPACITY.__dataclass_fields__} | changes)


def make_request(request_id: str, prompt: Iterable[int], *, priority: int = 0, **sampling: object) -> Request:
    """Greedy and ten tokens long unless told otherwise."""
    extra = {name: sampling.pop(name) for name in _OF_REQUESTS if name in sampling}
    params = SamplingParams(**{"max_tokens": 10, "temperature": 0.0, "seed": 0} | sampling)
    return Request(request_id=request_id, prompt=tuple(prompt), sampling=params, priority=priority, **extra)


def after_weights(num_tokens: float) -> StepTimes:
    """Reading the weights takes as long as computing so many tokens, and both take their time."""
    return StepTimes(num_tokens=(0, 1), times=(num_tokens, num_tokens + 1))


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Heard:
    """What one request's listener was told."""

    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason if self.outputs else None


class Drive:
    """One engine, its fake runner, and what was heard of every request."""

    def __init__(
        self,
        capacity: Capacity = CAPACITY,
        *,
        runner: FakeRunner | None = None,
        grammars: ToyGrammars | None = None,
        buckets: dict[str, object] | None = None,
        leaves_programs: bool = False,  # all that a start can leave; `compile_one` brings them
        page_events: PageEventSink | None = None,
        **config: object,
    ) -> None:
        self.capacity = capacity
        self.clock = Clock()
        self.runner = runner or FakeRunner(capacity)
        limits = {"max_num_batched_tokens": capacity.max_num_batched_tokens, "max_num_seqs": capacity.num_slots}
        limits |= {"embeds": capacity.pooling is not None, "adapters": capacity.max_loras > 0}
        self.ladder = BucketLadder(BucketConfig(**limits | {"min_mixed_tokens": 8} | (buckets or {})))
        settings = EngineConfig(**{"eos_token_ids": EOS, "seed": 0} | config)
        self.grammars = grammars = grammars or ToyGrammars(capacity.vocab_size)
        self.engine = Engine(
            self.runner, settings, self.ladder, clock=self.clock, grammars=grammars, page_events=page_events
        )
        later = set(self.ladder.buckets()) - set(self.ladder.needed_first()) if leaves_programs else ()
        self.engine.warm_up(lambda _line: None, later)
        self.heard: dict[str, Heard] = {}
        self.requests: dict[str, Request] = {}
        self.num_steps = 0
        self.on_output: OnOutput | None = None  # hears everything in place of the requests' own listeners

    @property
    def scheduler(self):
        return self.engine.core.scheduler

    def add(self, request: Request) -> Heard:
        heard = Heard()
        if request.model:
            self.engine.add_model(request.model, EOS, self.grammars)
        self.engine.add_request(request, self.on_output or heard.outputs.append)
        self.heard[request.request_id] = heard
        self.requests[request.request_id] = request
        return heard

    def step(self) -> bool:
        more = self.engine.step()
        self.num_steps += 1
        self.scheduler.check_integrity()
        assert self.runner.violations == []
        return more

    def compile_one(self) -> None:
        """Does what the engine's compiling thread does, once."""
        later = self.engine._deferred_programs
        if (following := later.next()) is not None:
            self.runner.compile_later(following[0])
            later.arrived(following[0])

    def finish(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is live; failing that within `max_steps`, somebody starves."""
        for _ in range(max_steps):
            if not self.step():
                break
        assert self.engine.num_live == 0, "somebody starves"
        self.check_idle()

    def check_idle(self) -> None:
        """Nothing is held by anybody when nothing is live."""
        while self.engine.core.in_flight:
            self.step()
        pool = self.scheduler.pool
        assert pool.num_used == 0
        assert pool.num_free + pool.num_reusable == pool.num_pages
        stats = self.engine.stats()
        assert stats.num_compiles_after_warm_up == 0
        assert stats.num_requests_running == stats.num_requests_waiting == stats.num_pages_used == 0
        assert stats.running_of_adapters == stats.waiting_of_adapters == {}
        assert self.engine.in_use(WeightsKind.ADAPTER) == self.runner.staged == set()
        assert self.engine.in_use(WeightsKind.MODEL) == set()
        assert stats.running_of_models == stats.waiting_of_models == {}
        assert len(stats.models) <= self.capacity.max_models and set(stats.models.values()) <= {ModelState.RESIDENT}

    def expected(self, request_id: str) -> list[int]:
        return expected_tokens(self.requests[request_id], self.capacity, EOS)

    def _sampled_logprobs(self, request_id: str, tokens: list[int]) -> list[float]:
        request = self.requests[request_id]
        if not request.sampling.sampled_logprobs:
            return []
        text = np.array([*request.prompt, *tokens])
        return [fake_sampled_logprob(text[:at], int(text[at])) for at in range(len(request.prompt), len(text))]

    def check_outputs(self) -> None:
        """Everybody heard exactly one end, and the tokens that the request alone determines."""
        for request_id, heard in self.heard.items():
            reasons = [output.finish_reason for output in heard.outputs]
            assert reasons, request_id
            assert reasons[-1] is not None, request_id
            assert set(reasons[:-1]) <= {None}, request_id
            if self.requests[request_id].embeds:
                if heard.finish_reason is FinishReason.STOP:
                    found = np.frombuffer(heard.last.embedding, "<f4")
                    wanted = expected_embedding(self.requests[request_id], self.capacity.pooling)
                    np.testing.assert_allclose(found, wanted, atol=1e-6)
                assert heard.tokens == []
                continue
            expected = self.expected(request_id)
            sampled = [value for output in heard.outputs for value in output.sampled_logprobs]
            assert sampled == self._sampled_logprobs(request_id, heard.tokens)
            if reasons[-1] in (FinishReason.STOP, FinishReason.LENGTH):
                assert heard.tokens == expected, request_id
            else:
                assert heard.tokens == expected[: len(heard.tokens)], request_id
