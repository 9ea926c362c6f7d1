"""`scripts.precompile` of one step and the updates of the state: a whole ladder takes minutes.

`python -m tests.scripts.precompile_one FLAGS` prints what the command says, and last its CPU seconds.
"""

import sys

from batcher.buckets import BucketLadder
from batcher.step import Bucket, Variant
from scripts import precompile


class OneStep(BucketLadder):
    """The smallest step that only decodes."""

    def buckets(self) -> list[Bucket]:
        return [bucket for bucket in super().buckets() if bucket.decode_only and bucket.variant is Variant.GREEDY][:1]


if __name__ == "__main__":
    from scripts.building import build

    build.BucketLadder = OneStep
    sys.exit(precompile.main(sys.argv[1:]))
