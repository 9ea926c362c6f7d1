"""The bench "speculation"'s counting over the fake runner."""

from __future__ import annotations

from scripts.lab import speculation
from tests.batcher.scheduling.test_speculation import mixed, speculative


def test_every_stream_is_counted_to_its_end():
    engine = speculative(mixed).engine
    seconds, outputs = speculation.measure(engine, (5, 6, 7, 8), 3, 20)
    assert [len(tokens) for tokens in outputs] == [20] * 3
    assert len({tuple(tokens) for tokens in outputs}) == 3
    assert seconds > 0


def test_its_texts_and_flags():
    args = speculation.parser().parse_args(["--streams", "1,4"])
    assert args.streams == [1, 4]
    assert speculation.settings_with_drafts(args).speculation.num_speculative_tokens == 3
