"""How many tokens a row may draw in a step without prompts: one, or as many as a policy says.

The scheduler asks its policy once a step, and reduces the answer to each request's limit and to the available pages.
The results from the device are passed to the policy, which learns from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from batcher.scheduling.request_state import RequestState
from batcher.scheduling.step_plan import StepPlan
from batcher.step import Bucket


@dataclass(frozen=True, slots=True)
class SeveralTokens:
    """A step in which rows may draw several tokens.

    If no row can draw more than one token, or `most` is empty, the step is a plain one.
    """

    bucket: Bucket  # the bucket of the step's program
    most: Mapping[RequestState, int] = field(default_factory=dict)  # most tokens of a row; the other rows draw one
    looks_up: bool = False  # a plain step tells which drafts would have been right


class OneToken:
    """The policy of a scheduler whose rows draw one token a step."""

    # Whether rows without drafts tell if the first draft would have been right.
    tells_would_accept = False

    def several(
        self, decodes: Sequence[RequestState], step: int, *, is_alone: bool, has_adapters: bool = False
    ) -> SeveralTokens | None:
        """What the rows of step number `step` may draw; None: one token each.

        `is_alone`: all running requests decode in the step, and no request waits. `has_adapters`: a row has an adapter.
        """
        return None

    def learn(self, seq: RequestState, num_right: int, num_drafts: int, last_step: int) -> None:
        """Records that the first `num_right` of a row's `num_drafts` drafts were right. `last_step` is the number of
        the last planned step."""

    def took(self, plan: StepPlan, seconds: float) -> None:
        """Records for how many seconds the device ran a plan's program."""
