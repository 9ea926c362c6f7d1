"""Conversations that grow turn by turn, each with a history of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scripts.lab.load.lengths import Lengths
from scripts.lab.load.workload import BenchRequest, random_ids

VOCAB_SIZE = 1000  # of the prompts, which are token ids: every model has as many
ANSWER, QUESTION = 32, 16  # tokens


class Conversations:
    """The prompt of a turn has the one before, an answer and a new question. The answers in it are made up, so that
    all servers get the same prompts.

    Args:
        lengths: of the first prompts, in tokens.
        num_turns: that a conversation takes at most.
    """

    def __init__(self, count: int, lengths: Lengths, num_turns: int, random: np.random.Generator) -> None:
        self._ends = lengths.draw(count, random)  # of the next turns' prompts
        longest = self._ends + (num_turns - 1) * (ANSWER + QUESTION)
        self._ids = random_ids(longest, vocab_size=VOCAB_SIZE, shared_prefix=0, random=random)

    def next_turn(self, which: Sequence[int]) -> list[BenchRequest]:
        """The next requests of these conversations."""
        requests = [BenchRequest(self._ids[i][: self._ends[i]], ANSWER) for i in which]
        self._ends[list(which)] += ANSWER + QUESTION
        return requests

    def longest(self) -> int:
        """Tokens of the longest conversation after its last turn."""
        return max(map(len, self._ids)) + ANSWER

    def num_pages(self, page_size: int) -> int:
        """Pages of all conversations after their last turns."""
        return sum(-(-(len(ids) + ANSWER) // page_size) for ids in self._ids)
