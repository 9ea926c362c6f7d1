"""`scripts.precompile` of one step and the updates of the state: a whole ladder takes minutes.

`python -m tests.scripts.precompile_one FLAGS` prints what the command says, and last its CPU seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING
from unittest.mock import patch

from batcher import buckets
from batcher.step import Bucket, Variant
from scripts import precompile
from scripts.flags.settings import EngineSettings

if TYPE_CHECKING:  # a process that describes chips imports jax later
    from scripts.building.runner import Built


class OneStep(buckets.BucketLadder):
    """The smallest step that only decodes."""

    def buckets(self) -> list[Bucket]:
        return [bucket for bucket in super().buckets() if bucket.decode_only and bucket.variant is Variant.GREEDY][:1]


def built(settings: EngineSettings, said: list[str], **options: bool) -> Built:
    """A runner with the one step."""
    from scripts.building import limits, runner

    with patch.object(limits, "BucketLadder", OneStep):
        return runner.build_runner(settings, said.append, **options)


def described(settings: EngineSettings) -> Built:
    """As `built`, without weights."""
    return built(settings, [], only_programs=True)


def shapes(start: Built) -> Mapping[str, str]:
    """The facts that shape its programs."""
    return start.plan.facts(start.loader.attention)


if __name__ == "__main__":
    buckets.BucketLadder = OneStep
    sys.exit(precompile.main(sys.argv[1:]))
