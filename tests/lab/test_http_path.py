"""The bench of the HTTP path counts what its streams get; how fast it was is not tested."""

from __future__ import annotations

from scripts.lab.http_path import measure


def test_every_stream_gets_its_tokens():
    figures = measure(3, 40, 600.0)
    assert figures.streams == 3
    assert 0 < figures.events_per_token <= 1.05  # the end of a stream may have an event of its own
    assert figures.tokens_per_s > 0
    assert figures.first_ms > 0
