"""`--speculative-config`: what is accepted, what is refused and how, and the limits that follow from it."""

from __future__ import annotations

import json

import pytest

from batcher.buckets import BucketLadder
from scripts.building.limits import bucket_config, runner_config
from scripts.flags.settings import EngineSettings
from scripts.flags.speculation import SpeculativeConfig

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("fields", "lookup"),
    [
        ({}, (2, 4)),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 1}, (1, 4)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 6}, (6, 6)),
    ],
)
def test_the_json_is_vllms(fields, lookup):
    for given in (NGRAM | fields, json.dumps(NGRAM | fields)):
        config = EngineSettings(speculative_config=given).speculation
        assert (config.num_speculative_tokens, config.lookup) == (3, lookup)
    drafted = {"model": "a/b", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}
    assert SpeculativeConfig.parse(drafted) == SpeculativeConfig(
        method="draft_model", model="a/b", num_speculative_tokens=3
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("ngram", "is not JSON"),
        ("[3]", "is a JSON object"),
        ({"num_speculative_tokens": 3}, "has no method"),
        ({"model": "[ngram]", "num_speculative_tokens": 3}, "has no method"),
        ({"method": "magic"}, "unknown method 'magic'"),
        ({"method": ["ngram"]}, "unknown method"),
        ({"method": "eagle3", "num_speculative_tokens": 3}, 'add a "model", the folder of the eagle3 head'),
        ({"method": "eagle", "model": "a/b", "prompt_lookup_min": 2, "num_speculative_tokens": 3}, "prompt_lookup"),
        ({"method": "medusa"}, "Medusa"),
        ({"method": "draft_model"}, "num_speculative_tokens"),
        (NGRAM | {"model": "a/b"}, '"model" is for the other methods'),
        (NGRAM | {"method": "draft_model", "prompt_lookup_max": 3}, "prompt_lookup"),
        ({"method": "ngram"}, "num_speculative_tokens"),
        (NGRAM | {"draft_sample_method": "greedy"}, "unknown fields draft_sample_method"),
        (NGRAM | {"quantization": "int8"}, '"ngram" has no weights'),
        ({"method": "eagle3", "model": "a/b", "quantization": "int8", "num_speculative_tokens": 3}, "not quantised"),
        (NGRAM | {"method": "draft_model", "quantization": "awq"}, "unknown quantization 'awq'; there are int8"),
        (NGRAM | {"num_speculative_tokens": 0}, "num_speculative_tokens"),
        (NGRAM | {"num_speculative_tokens": 16}, "num_speculative_tokens"),
        (NGRAM | {"num_speculative_tokens": "3"}, "num_speculative_tokens"),
        (NGRAM | {"prompt_lookup_min": 0}, "prompt_lookup_min"),
        (NGRAM | {"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_min 5 is more than"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(value, words):
    given = value if isinstance(value, str) else json.dumps(value)
    with pytest.raises(ValueError, match=words) as refused:
        EngineSettings(speculative_config=given)
    assert "--speculative-config" in str(refused.value)


def programs(platform: str, **settings: object) -> list[tuple[int, int]]:
    """(tokens, rows) of the speculative programs, in one of the two variants."""
    buckets = bucket_config(EngineSettings(speculative_config=NGRAM, **settings), platform, 1)
    shapes = [(b.num_tokens, b.num_rows) for b in BucketLadder(buckets).buckets() if b.num_drafts]
    assert shapes == [shape for shape in sorted(set(shapes)) for _ in range(2)]
    return sorted(set(shapes))


def test_there_are_programs_up_to_the_rows_at_which_reading_weights_and_computing_take_as_long():
    assert programs("cpu") == [(4, 1), (8, 2), (16, 4), (32, 8)]
    assert programs("cpu", max_num_seqs=2) == [(4, 1), (8, 2)]
    assert programs("tpu") == [(32, 8), (64, 16), (128, 32), (256, 64)]
    assert programs("gpu", max_num_seqs=12) == [(32, 8), (48, 12)]


def test_drafts_that_no_step_has_room_for_are_refused():
    with pytest.raises(ValueError, match="lower num_speculative_tokens, or raise --max-num-batched-tokens"):
        programs("tpu", max_num_seqs=8, max_num_batched_tokens=16)


def test_the_memory_plan_counts_the_text_and_the_logits_of_the_drafts():
    settings = EngineSettings(speculative_config=NGRAM, max_num_seqs=2, max_num_batched_tokens=16)
    limits = runner_config(settings, bucket_config(settings, "cpu", 1), 64)
    assert (limits.lookup.min_tokens, limits.lookup.max_tokens, limits.max_drawn) == (2, 4, 8)
    assert limits.draft_pass_tokens == 16  # those of a step, where a CPU has 64 and a chip 256
    head = EngineSettings(speculative_config=NGRAM | {"method": "eagle3", "model": "a/b"})
    assert runner_config(head, bucket_config(head, "cpu", 1), 64).lookup is None
    plain = EngineSettings(max_num_seqs=2)
    assert runner_config(plain, bucket_config(plain, "cpu", 1), 64).lookup is None
    assert SpeculativeConfig.parse(NGRAM) == settings.speculation
