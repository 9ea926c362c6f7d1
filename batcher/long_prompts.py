"""How long prompts share the steps with other prompts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LongPrompts:
    """A prompt is long as long as more than `threshold` of its tokens are left to compute.

    A step computes at most `threshold` tokens of each prompt, so the rest of its budget is left to others. At most
    `most` long prompts are computed at the same time; the others wait, and short ones may pass them.

    No request starves. Long prompts begin in the order of the queue. One that has begun gets its tokens of every step
    before all prompts after it in the queue. So a long prompt waits, besides for a slot and pages, for the steps that
    those before it take: at most their tokens divided by `threshold`, where decodes leave a budget of so many tokens.
    No request passes one that waits for a slot or pages. Short prompts do not wait for long ones, however many there
    are: in each step the scheduler looks at a few requests that it has not seen before.
    """

    threshold: int = 0  # tokens; 0: no prompt is long, and one prompt may take a step's whole budget
    most: int | None = None  # None: any number

    def is_long(self, num_left: int) -> bool:
        """Whether a prompt with so many tokens left to compute is long."""
        return 0 < self.threshold < num_left

    def may_begin(self, num_long: int) -> bool:
        """Whether one more long prompt may be computed while `num_long` are."""
        return self.most is None or num_long < self.most

    def chunk(self, num_left: int) -> int:
        """The most tokens that one step computes of a prompt with `num_left` tokens left."""
        return min(num_left, self.threshold) if self.threshold else num_left


ANY_LENGTH = LongPrompts()
