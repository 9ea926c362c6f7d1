"""The engine's core without its threads, where the order of its calls matters."""

from __future__ import annotations

import dataclasses

import numpy as np

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.core import EngineCore
from batcher.request import ErrorCode
from batcher.requests.admission import make_request_state
from tests.batcher.fake_runner import FakeRunner
from tests.batcher.harness import CAPACITY, EOS, make_request


def make_core() -> EngineCore:
    limits = BucketConfig(
        max_num_batched_tokens=CAPACITY.max_num_batched_tokens, max_num_seqs=CAPACITY.num_slots, min_mixed_tokens=8
    )
    runner, ladder = FakeRunner(CAPACITY), BucketLadder(limits)
    runner.warm_up(ladder.buckets(), lambda _line: None)
    return EngineCore(runner, EngineConfig(eos_token_ids=EOS, seed=0), ladder, lambda: 0.0)


def test_a_page_that_a_step_without_finite_logits_filled_is_not_kept() -> None:
    """Two results are taken before the next dispatch, so that the page becomes full of known tokens only with the step
    after them; that step's logits are not finite."""
    core = make_core()
    request = make_request("bad", [10, 11], ignore_eos=True)
    options = {"capacity": CAPACITY, "eos_token_ids": EOS, "seed": 0, "arrived_s": 0.0}
    sequence = make_request_state(request, lambda _output: None, **options)
    core.requests.add(sequence)
    core.dispatch()
    core.dispatch()
    for _ in range(2):
        core.complete(core.in_flight[0].handle.result())
    assert sequence.num_known == CAPACITY.page_size
    core.dispatch()  # computes the page's last token
    core.dispatch()
    broken = core.in_flight[0].handle.result()
    broken = dataclasses.replace(broken, finite=np.zeros_like(broken.finite))
    ((_, output),) = core.complete(broken).outputs
    assert output.error_code is ErrorCode.NOT_FINITE
    core.complete(core.in_flight[0].handle.result())
    pool = core.scheduler.pool
    assert (pool.num_used, pool.num_reusable) == (0, 0)
    pool.extend(sequence.prefix, sequence.digests, 1, lambda page: sequence.page_bytes(page, CAPACITY.page_size))
    assert sequence.prefix.pages == []
    core.scheduler.check_integrity()
