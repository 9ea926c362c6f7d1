from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.buckets import BucketConfig, BucketLadder
from batcher.step import Bucket, Variant, longest_first
from tests.batcher.harness import make_capacity
from tests.examples import examples

GREEDY, SAMPLE, SCORE = Variant.GREEDY, Variant.SAMPLE, Variant.SCORE


def make_ladder(max_num_batched_tokens: int, max_num_seqs: int, **options: object) -> BucketLadder:
    return BucketLadder(
        BucketConfig(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs, **options)
    )


def shapes(ladder: BucketLadder, variant: Variant) -> list[tuple[int, int]]:
    return [(b.num_tokens, b.num_rows) for b in ladder.buckets() if b.variant is variant]


def test_the_whole_ladder_by_hand() -> None:
    decodes = [(1, 1), (2, 2), (4, 4), (8, 8), (12, 12)]
    mixed = [(16, 8), (16, 12), (32, 8), (32, 12), (64, 8), (64, 12), (96, 8), (96, 12), (100, 8), (100, 12)]
    ladder = make_ladder(100, 12)
    assert shapes(ladder, GREEDY) == decodes
    assert shapes(ladder, SAMPLE) == decodes + mixed
    assert shapes(ladder, SCORE) == [(100, 12)]


def test_fewer_and_coarser_rungs_where_programs_are_dear() -> None:
    ladder = make_ladder(256, 16, min_decode_rows=8, min_mixed_tokens=64, half_steps=False, few_rows=16)
    assert shapes(ladder, SAMPLE) == [(8, 8), (16, 16), (64, 16), (128, 16), (256, 16)]
    drafts = {"num_drafts": 1, "max_draft_rows": 70}
    ladder = make_ladder(512, 256, min_decode_rows=8, decode_rungs_apart=4, **drafts)
    decodes = [(8, 8), (32, 32), (128, 128), (256, 256)]
    assert shapes(ladder, GREEDY) == sorted([*decodes, (16, 8), (32, 16), (64, 32), (128, 64)])
    ladder = make_ladder(300, 16, min_decode_rows=16, min_mixed_tokens=64, min_half_step=128, few_rows=None)
    assert shapes(ladder, SAMPLE) == [(16, 16), (64, 16), (128, 16), (192, 16), (256, 16), (300, 16)]


def test_a_start_traces_what_takes_longest_to_compile_first() -> None:
    """Decodes of as many tokens as a step with prompts come after it, and greedy ones last."""
    assert longest_first(make_ladder(32, 16, min_decode_rows=8, half_steps=False).buckets()) == [
        Bucket(32, 16, SCORE),
        Bucket(32, 16, SAMPLE),
        Bucket(32, 8, SAMPLE),
        Bucket(16, 8, SAMPLE),
        Bucket(16, 16, SAMPLE),
        Bucket(8, 8, SAMPLE),
        Bucket(16, 16, GREEDY),
        Bucket(8, 8, GREEDY),
    ]


def test_the_usual_ladder_stays_modest() -> None:
    assert len(make_ladder(512, 64).buckets()) == 32
    assert len(make_ladder(8192, 256, min_decode_rows=8, min_mixed_tokens=64, half_steps=False).buckets()) <= 30


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "decode_only", "expected"),
    [
        (1, 1, True, (1, 1)),
        (3, 3, True, (4, 4)),
        (17, 17, True, (20, 20)),
        (2, 1, False, (16, 8)),
        (16, 9, False, (32, 20)),  # nine rows do not fit (16, 8)
        (33, 9, False, (64, 20)),
        (97, 8, False, (100, 8)),
        (100, 20, False, (100, 20)),
    ],
)
def test_the_smallest_bucket_that_holds_the_step(
    num_tokens: int, num_rows: int, decode_only: bool, expected: tuple[int, int]
) -> None:
    bucket = make_ladder(100, 20).choose(num_tokens, num_rows, decode_only=decode_only, variant=SAMPLE)
    assert bucket == Bucket(*expected, SAMPLE)


def test_scoring_always_takes_the_largest() -> None:
    ladder = make_ladder(100, 12)
    assert ladder.choose(1, 1, decode_only=True, variant=SCORE) == Bucket(100, 12, SCORE)


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(101, 1), (20, 13), (3, 4), (0, 0)])
def test_a_step_over_a_limit_is_refused(num_tokens: int, num_rows: int) -> None:
    with pytest.raises(ValueError, match="no step has this shape"):
        make_ladder(100, 12).choose(num_tokens, num_rows, decode_only=False, variant=GREEDY)


def test_a_start_needs_the_largest_programs_and_those_for_a_few_requests() -> None:
    ladder = make_ladder(512, 64, half_steps=False, few_rows=16)
    needed = [Bucket(1, 1, SAMPLE), Bucket(64, 16, SAMPLE), Bucket(64, 64, SAMPLE), Bucket(512, 64, SCORE)]
    assert ladder.needed_first() == needed
    assert make_ladder(20, 12).needed_first() == [
        Bucket(1, 1, SAMPLE),
        Bucket(12, 12, SAMPLE),
        Bucket(20, 8, SAMPLE),
        Bucket(20, 12, SCORE),
    ]


def test_the_next_larger_program_stands_in() -> None:
    ladder = make_ladder(512, 64, half_steps=False, few_rows=16)
    missing = set(ladder.buckets()) - {*ladder.needed_first(), Bucket(16, 8, SAMPLE), Bucket(8, 8, GREEDY)}
    expected = {
        Bucket(4, 4, GREEDY): Bucket(8, 8, GREEDY),
        Bucket(8, 8, SAMPLE): Bucket(16, 8, SAMPLE),  # of as many rows, and half of the tokens of the next decode
        Bucket(16, 16, GREEDY): Bucket(64, 16, SAMPLE),
        Bucket(32, 32, GREEDY): Bucket(64, 64, SAMPLE),
        Bucket(32, 16, SAMPLE): Bucket(64, 16, SAMPLE),
        Bucket(64, 32, SAMPLE): Bucket(512, 64, SCORE),  # a decode program takes no prompt tokens
    }
    for bucket, other in expected.items():
        assert ladder.fallback(bucket, missing) == other
    with pytest.raises(ValueError, match="there is no fallback"):
        ladder.fallback(Bucket(512, 64, SCORE), ladder.buckets())


def test_with_adapters_each_program_has_a_second_one() -> None:
    options = {"num_drafts": 2, "max_draft_rows": 4, "embeds": True}
    plain, ladder = make_ladder(100, 12, **options), make_ladder(100, 12, adapters=True, **options)
    second = {replace(bucket, has_adapters=True) for bucket in plain.buckets()}
    assert ladder.buckets() == sorted({*plain.buckets(), *second})
    assert set(ladder.needed_first()) == {replace(bucket, has_adapters=True) for bucket in plain.needed_first()}
    for step in ((1, 1, True, GREEDY), (90, 9, False, SAMPLE), (9, 9, True, SCORE), (40, 3, False, Variant.EMBED)):
        *shape, decode_only, variant = step
        own = plain.choose(*shape, decode_only=decode_only, variant=variant)
        for has_adapters in (False, True):
            found = ladder.choose(*shape, decode_only=decode_only, variant=variant, has_adapters=has_adapters)
            assert found == replace(own, has_adapters=has_adapters)
    assert ladder.choose_drafts(3, GREEDY, has_adapters=True) == Bucket(12, 4, GREEDY, 2, has_adapters=True)
    with pytest.raises(ValueError, match="no program has adapters"):
        plain.choose(1, 1, decode_only=True, variant=GREEDY, has_adapters=True)


def test_programs_with_adapters_stand_in_for_those_without_and_not_the_other_way() -> None:
    ladder = make_ladder(512, 64, half_steps=False, few_rows=16, adapters=True)
    own, larger = Bucket(8, 8, GREEDY), Bucket(8, 8, SAMPLE)
    with_adapters = replace(own, has_adapters=True)
    assert ladder.fallback(own, {own}) == larger
    assert ladder.fallback(own, {own, larger}) == with_adapters
    others = {bucket for bucket in ladder.buckets() if bucket.has_adapters and bucket.num_tokens < 512}
    assert ladder.fallback(with_adapters, others).has_adapters


def test_ladder_and_runner_agree_on_adapters() -> None:
    for max_loras, adapters in ((0, True), (2, False)):
        with pytest.raises(ValueError, match=rf"{max_loras=} self.adapters={adapters}"):
            make_ladder(32, 4, adapters=adapters).config.check(make_capacity(max_loras=max_loras))
    make_ladder(32, 4, adapters=True).config.check(make_capacity(max_loras=2))


@given(data=st.data())
def test_the_programs_of_a_start_hold_every_step(data: st.DataObject) -> None:
    num_seqs = data.draw(st.integers(1, 70))
    drafts = data.draw(st.booleans())
    ladder = make_ladder(
        num_seqs + data.draw(st.integers(1, 600)) + 4 * drafts,
        num_seqs,
        min_decode_rows=data.draw(st.integers(1, 8)),
        decode_rungs_apart=data.draw(st.integers(2, 5)),
        half_steps=data.draw(st.booleans()),
        few_rows=data.draw(st.none() | st.integers(1, 20)),
        embeds=data.draw(st.booleans()),
        adapters=data.draw(st.booleans()),
        num_drafts=3 if drafts else 0,
        max_draft_rows=1 if drafts else 0,
    )
    needed = ladder.needed_first()
    assert len(needed) == len(set(needed)) <= 5
    assert set(needed) <= set(ladder.buckets())
    for bucket in ladder.buckets():
        assert ladder.fallback(bucket, set(ladder.buckets()) - set(needed)) in needed
        assert ladder.fallback(bucket, ()) == bucket


def test_limits_that_leave_no_room_for_a_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=64 must exceed self\.max_num_seqs=64"):
        make_ladder(64, 64)


@pytest.mark.parametrize(
    ("num_tokens", "next_decodes", "expected"),
    [
        (16, None, 0),  # a rung itself
        (9, None, 0),  # no rung below
        (33, None, 1),  # 32 now and 1 later for 64 now
        (50, None, 18),  # 32 + 18 and a step's cost of 10 for 64
        (54, None, 0),
        (60, None, 0),
        (33, 0, 1),  # 32, then 16 for the one token
        (33, 12, 1),  # 32, then 16 in the place of 12
        (70, 2, 6),  # 64, then 16 in the place of 2, for 96
        (97, 12, 0),  # four tokens of padding are cheap
    ],
)
def test_what_is_better_left_to_the_next_step(num_tokens: int, next_decodes: int | None, expected: int) -> None:
    ladder = make_ladder(100, 12)
    rest = ladder.better_left(num_tokens, next_decodes=next_decodes, step_cost_tokens=10)
    assert rest == expected


@settings(max_examples=examples(60))
@given(
    max_num_seqs=st.integers(1, 40),
    room=st.integers(1, 200),
    min_decode_rows=st.integers(1, 70),
    decode_rungs_apart=st.integers(2, 5),
    min_mixed_tokens=st.integers(1, 300),
    few_rows=st.none() | st.integers(1, 64),
    half_steps=st.booleans(),
)
def test_no_legal_step_lacks_a_program(max_num_seqs: int, room: int, **options: int) -> None:
    limit = max_num_seqs + room
    ladder = make_ladder(limit, max_num_seqs, **options)
    buckets = ladder.buckets()
    assert len(set(buckets)) == len(buckets)
    assert Bucket(limit, max_num_seqs, SCORE) in buckets
    for rows in range(1, max_num_seqs + 1):
        for variant in (GREEDY, SAMPLE):
            decode = ladder.choose(rows, rows, decode_only=True, variant=variant)
            assert decode in buckets
            assert decode.decode_only
            assert decode.num_rows >= rows
        for tokens in range(rows + 1, limit + 1, 7):
            bucket = ladder.choose(tokens, rows, decode_only=False, variant=GREEDY)
            assert bucket in buckets
            assert not bucket.decode_only
            assert bucket.num_tokens >= tokens
            assert bucket.num_rows >= rows
    assert ladder.choose(limit, 1, decode_only=False, variant=GREEDY).num_tokens == limit
