"""Where a run of characters ends."""

from __future__ import annotations

import re


def end_of_run(pattern: re.Pattern[str], text: str, at: int) -> int:
    """The index after what `pattern` matches at `at`, which may be nothing."""
    found = pattern.match(text, at)
    return found.end() if found else at
