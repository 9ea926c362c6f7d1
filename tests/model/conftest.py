"""Fixtures of the tests of the model."""

from __future__ import annotations

import pytest


@pytest.fixture
def two_passes(monkeypatch) -> None:
    """Chips search for a threshold in two passes, which are too few: for programs that are read and never run."""
    monkeypatch.setattr("model.sampling.threshold.MAX_PASSES_ON_CHIPS", 2)
