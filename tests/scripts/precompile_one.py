"""`scripts.precompile` of one step and the updates of the state: a whole ladder takes minutes.

`python -m tests.scripts.precompile_one FLAGS` prints what the command says, and last its CPU seconds.
"""

import sys
from dataclasses import replace

from batcher.buckets import BucketLadder
from batcher.step import Bucket, Variant
from scripts import precompile
from scripts.building import build
from scripts.flags.settings import EngineSettings


class OneStep(BucketLadder):
    """The smallest step that only decodes."""

    def buckets(self) -> list[Bucket]:
        return [bucket for bucket in super().buckets() if bucket.decode_only and bucket.variant is Variant.GREEDY][:1]


def described(settings: EngineSettings) -> build.Built:
    """A runner without weights, with the one step."""
    built = build.build_runner(settings, lambda line: None, only_programs=True)
    return replace(built, ladder=OneStep(built.ladder.config))


if __name__ == "__main__":
    build.BucketLadder = OneStep
    sys.exit(precompile.main(sys.argv[1:]))
