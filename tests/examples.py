"""How many examples a property is tried with: those that its test states, or with the profile `few` a third of them.

`scripts/test` takes the profile, and `scripts/test --all` does not.
"""

from __future__ import annotations

from hypothesis import settings

UNSTATED = settings.default.max_examples  # of a property whose test states no number
settings.register_profile("few", max_examples=UNSTATED // 3)


def examples(number: int) -> int:
    """`number`, or the profile's share of it. Read while tests are imported, when the profile is in force."""
    return max(1, number * settings.default.max_examples // UNSTATED)
