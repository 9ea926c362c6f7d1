"""Finds the end of a run of characters."""

from __future__ import annotations

import re


def end_of_run(pattern: re.Pattern[str], text: str, at: int) -> int:
    """The index after the match of `pattern` at `at`; `at` itself if there is no match."""
    found = pattern.match(text, at)
    return found.end() if found else at
