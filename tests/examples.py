"""How many examples a property is tried with: those that its test states, or with the profile `few` a third of them.

`scripts/test` takes the profile, and `scripts/test --all` does not.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

UNSTATED = settings.default.max_examples  # of a property whose test states no number
# A busy machine is slow: no property fails because of it.
settings.register_profile("all", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", settings.get_profile("all"), max_examples=UNSTATED // 3)
settings.load_profile("all")


def examples(number: int) -> int:
    """`number`, or the profile's share of it. Read while tests are imported, when the profile is in force."""
    return max(1, number * settings.default.max_examples // UNSTATED)
