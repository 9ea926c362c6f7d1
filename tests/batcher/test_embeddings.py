"""Requests that embed: they share steps, pages and the queue with all others, and get one vector each."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.engine import Engine
from batcher.errors import InvalidRequestError
from batcher.request import ErrorCode, FinishReason, Pooling, Request
from batcher.step import Bucket, Variant
from tests.batcher.fake_runner import FakeRunner, expected_embedding
from tests.batcher.harness import CAPACITY, EOS, Drive, Heard, make_capacity, make_request

BOTH = pytest.mark.parametrize("pooling", Pooling)


def make_drive(pooling: Pooling, runner: FakeRunner | None = None, **config: object) -> Drive:
    changes = {name: config.pop(name) for name in ("num_pages", "num_slots") if name in config}
    return Drive(make_capacity(pooling=pooling, **changes), runner=runner, **config)


def embedding_request(request_id: str, prompt: Iterable[int], **options: object) -> Request:
    return make_request(request_id, prompt, embeds=True, max_tokens=1, **options)


def vector(heard: Heard) -> np.ndarray:
    assert len(heard.outputs) == 1
    assert heard.finish_reason is FinishReason.STOP
    return np.frombuffer(heard.last.embedding, "<f4")


@BOTH
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64])
def test_a_prompt_of_any_number_of_chunks_gives_the_same_vector(pooling: Pooling, length: int) -> None:
    drive = make_drive(pooling)
    request = embedding_request("a", range(5, 5 + length))
    heard = drive.add(request)
    drive.finish()
    np.testing.assert_allclose(vector(heard), expected_embedding(request, pooling), atol=1e-6)
    assert np.linalg.norm(vector(heard)) == pytest.approx(1, abs=1e-6)


def test_a_mean_computes_the_whole_prompt_and_the_last_token_only_the_rest() -> None:
    for pooling, num_computed in ((Pooling.MEAN, 40), (Pooling.LAST, 24)):
        drive = make_drive(pooling)
        for name in ("a", "b"):
            drive.add(embedding_request(name, range(20)))
            drive.finish()
        drive.check_outputs()
        assert drive.engine.stats().prompt_tokens_computed == num_computed
        assert drive.heard["b"].last.num_cached_tokens == (0 if pooling is Pooling.MEAN else 16)


def test_later_prompts_find_the_pages_of_a_mean() -> None:
    drive = make_drive(Pooling.MEAN)
    drive.add(embedding_request("a", range(20)))
    drive.finish()
    text = drive.add(make_request("b", range(20)))
    drive.finish()
    assert text.last.num_cached_tokens == 16
    drive.check_outputs()


def test_only_steps_that_pool_run_the_programs_that_do() -> None:
    drive = make_drive(Pooling.LAST)
    drive.add(embedding_request("a", range(5, 45)))  # two chunks: only the second one has the last token
    drive.finish()
    assert [bucket.variant for bucket in drive.runner.executed] == [Variant.SAMPLE, Variant.EMBED]
    drive = make_drive(Pooling.LAST)
    drive.add(make_request("a", range(5, 45)))
    drive.finish()
    assert not any(bucket.variant is Variant.EMBED for bucket in drive.runner.executed)


def test_what_embeds_is_not_counted_as_generated() -> None:
    drive = make_drive(Pooling.LAST)
    drive.add(embedding_request("a", range(5)))
    drive.finish()
    stats = drive.engine.stats()
    assert (stats.generation_tokens, stats.prompt_tokens, stats.finished) == (0, 5, {"stop": 1})
    assert sum(stats.time_to_first_token.counts) == 0


@BOTH
def test_a_vector_that_is_not_finite_fails_its_request_alone(pooling: Pooling) -> None:
    capacity = make_capacity(pooling=pooling)
    drive = make_drive(pooling, FakeRunner(capacity, nan_token=9))
    good, bad = drive.add(embedding_request("a", range(20, 30))), drive.add(embedding_request("b", [8, 9, 10]))
    drive.finish()
    assert bad.last.error_code is ErrorCode.NOT_FINITE
    np.testing.assert_allclose(vector(good), expected_embedding(drive.requests["a"], pooling), atol=1e-6)


def test_a_step_that_fails_is_computed_again_for_the_others() -> None:
    def on_result(number: int) -> None:
        if number == 1:
            raise RuntimeError("the device has stumbled")

    capacity = make_capacity(pooling=Pooling.MEAN, num_slots=2)
    drive = make_drive(Pooling.MEAN, FakeRunner(capacity, on_result=on_result), num_slots=2, pipeline_depth=1)
    long = drive.add(embedding_request("a", range(3, 43)))  # its second chunk fails
    waits = drive.add(embedding_request("b", range(50, 90)))
    drive.finish()
    assert long.last.error_code is ErrorCode.STEP_FAILED
    assert waits.finish_reason is FinishReason.STOP or waits.last.error_code is ErrorCode.STEP_FAILED
    drive.check_outputs()


def test_an_engine_without_embeddings_refuses_them() -> None:
    with pytest.raises(InvalidRequestError, match="makes no embeddings"):
        Drive().add(embedding_request("a", range(5)))


def test_runner_and_ladder_agree() -> None:
    ladder = BucketLadder(BucketConfig(max_num_batched_tokens=32, max_num_seqs=4))
    with pytest.raises(ValueError, match="one of runner and ladder"):
        Engine(FakeRunner(make_capacity(pooling=Pooling.LAST)), EngineConfig(eos_token_ids=EOS), ladder)
    embeds = BucketLadder(BucketConfig(max_num_batched_tokens=32, max_num_seqs=4, embeds=True))
    with pytest.raises(ValueError, match="one of runner and ladder"):
        Engine(FakeRunner(CAPACITY), EngineConfig(eos_token_ids=EOS), embeds)


def test_the_shapes_that_pool() -> None:
    sizes = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "half_steps": False}
    plain, embeds = (BucketLadder(BucketConfig(**sizes, embeds=embeds)) for embeds in (False, True))
    more = [Bucket(t, s, Variant.EMBED) for t, s in ((32, 31), (128, 64), (512, 64))]
    assert embeds.buckets() == sorted([*plain.buckets(), *more])

    def chosen(tokens: int, rows: int) -> int:
        return embeds.choose(tokens, rows, decode_only=tokens == rows, variant=Variant.EMBED).num_tokens

    assert [chosen(*shape) for shape in ((1, 1), (31, 31), (32, 32), (33, 2), (129, 1), (512, 64))] == [
        *(32, 32, 128, 128, 512, 512)
    ]
