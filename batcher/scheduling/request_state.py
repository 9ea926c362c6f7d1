"""The engine's record of one request: its tokens, its slot and pages, and counters of its progress."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from enum import Enum

import numpy as np

from batcher.grammar import Matcher
from batcher.request import Pooling, Request, RequestOutput, TokenLogprobs
from batcher.sampling_table import PARAMETERS, is_asked
from batcher.scheduling.page_moves import PageLoad
from batcher.scheduling.prefix import StoredPrefix
from batcher.step import Variant

OnOutput = Callable[[RequestOutput], None]


class State(Enum):
    """The stages of a sequence between arrival and end."""

    COMPILING = "compiling"  # its grammar is being compiled; it is not in the scheduler's queue yet
    WAITING = "waiting"  # never admitted, or preempted: owns no slot and no pages
    RUNNING = "running"  # owns a slot and pages
    FINISHED = "finished"


class RequestState:
    """The engine's record of one request.

    Positions: the tokens `to_compute` are computed in chunks first (`num_computed` counts the K/V that dispatched steps
    have written or will write). The step that computes the last of them emits the next token, and from then on every
    step feeds the slot's last token back (`decoding`). A token is *pending* from the dispatch of the step that emits it
    to the reading of that step.
    """

    __slots__ = (
        "adapter_slot",
        "allowed",
        "arrival",
        "arrived_s",
        "decoding",
        "digests",
        "draft_rate",
        "first_token_s",
        "has_penalties",
        "is_blocked",
        "is_new",
        "is_slow_to_mask",
        "key",
        "last_step",
        "last_token_s",
        "limit",
        "load",
        "mask",
        "matcher",
        "needs_sampling",
        "num_accepted",
        "num_committed",
        "num_computed",
        "num_emitted",
        "num_hit_pages",
        "num_hit_tokens",
        "num_preemptions",
        "num_prompt",
        "num_rejected",
        "num_stalls",
        "number",
        "on_output",
        "output",
        "pages",
        "pooled",
        "pooling",
        "prefix",
        "prompt",
        "prompt_logprobs",
        "request",
        "request_id",
        "sampling",
        "seed",
        "slot",
        "started_s",
        "state",
        "stop_ids",
        "to_compute",
    )

    def __init__(
        self,
        request: Request,
        prompt: np.ndarray,  # i32[num_prompt]
        *,
        limit: int,  # most output tokens: max_tokens, or fewer if the context ends first
        stop_ids: frozenset[int],  # any of these ends it
        seed: int,
        arrived_s: float,
        on_output: OnOutput,
        matcher: Matcher | None = None,  # of the request's grammar and its bad words
        allowed: np.ndarray | None = None,  # i32[num_mask_words], the mask of tokens that may ever be drawn
        pooling: Pooling | None = None,  # of its embedding; None: it generates
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.request_id = request.request_id
        self.number = -1  # rank among the engine's requests, set when it is accepted
        self.sampling = sampling
        self.prompt = prompt
        self.num_prompt = len(prompt)
        self.limit = limit
        self.stop_ids = stop_ids
        self.seed = seed
        self.arrived_s = arrived_s
        self.on_output = on_output
        self.matcher = matcher
        self.allowed = allowed
        self.pooling = pooling
        asked = [parameter for name, parameter in PARAMETERS.items() if is_asked(sampling, name)]
        self.needs_sampling = any(parameter.variant is Variant.SAMPLE for parameter in asked)
        self.has_penalties = any(parameter.counts_tokens for parameter in asked)

        self.state = State.WAITING if matcher is None else State.COMPILING
        self.is_blocked = matcher is not None  # the mask of its next token is not computed yet
        self.mask: np.ndarray | None = None  # of its next token; None after that token's dispatch
        self.is_slow_to_mask = True  # its first mask includes compilation, which is slow
        self.arrival = -1  # rank, set when it joins the scheduler's queue; kept at preemption
        self.key = (request.priority, 0, -1)  # rank among those that run, set at admission
        self.output = array("i")  # tokens read back
        self.num_emitted = 0  # output tokens of dispatched steps, pending ones included
        self.to_compute = prompt  # before it decodes: the prompt, and after a preemption also the output
        self.num_computed = 0
        self.decoding = False
        self.slot = -1
        self.adapter_slot = 0  # of its LoRA adapter while it runs; 0: the base model
        self.is_new = False  # it has a slot, and no step has set the slot's state yet
        self.load: PageLoad | None = None  # it waits for pages that come back to the device
        self.pages: list[int] = []
        self.digests: list[bytes] = []  # of the full pages of prompt and output, as far as computed
        self.prefix = StoredPrefix()  # of a waiting request
        self.num_committed = 0  # leading pages offered to the prefix cache
        self.num_hit_pages = 0  # leading pages that were found at the last admission, on the device or away
        self.num_hit_tokens = 0  # prompt tokens found in the prefix cache at the first admission
        self.pooled: np.ndarray | None = None  # f32[D], the sum of the hidden states of the tokens read back, for MEAN
        self.num_stalls = 0  # steps in a row in which it has waited for a page while decoding
        self.num_accepted = 0  # drafts that are in its output
        self.num_rejected = 0
        self.draft_rate: float | None = None  # probability that its next draft is right; None: not known
        self.last_step = -1  # the last dispatched step that has a row of it
        self.num_preemptions = 0
        self.started_s = -1.0
        self.first_token_s = -1.0
        self.last_token_s = -1.0  # of a request in a slot: see `SlotColumns.last_token_of`
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if sampling.prompt_logprobs is None else [None] * (self.num_prompt - 1)
        )

    def take_mask(self) -> np.ndarray:
        """The mask of the token that is dispatched now. Blocks the sequence until its next mask is computed."""
        mask, self.mask = self.mask, None
        assert mask is not None
        self.is_blocked = True
        return mask

    @property
    def num_known(self) -> int:
        """Tokens whose ids the host knows."""
        return self.num_prompt + len(self.output)

    def num_to_end(self, drawn: tuple[int, ...]) -> int:
        """How many of the next tokens belong to the request: those after its end do not."""
        for count, token in enumerate(drawn, 1):
            total = len(self.output) + count
            if total == self.limit or (token in self.stop_ids and total >= self.sampling.min_tokens):
                return count
        return len(drawn)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions must be scored. They have all been scored when the first token is read."""
        return self.prompt_logprobs is not None and self.first_token_s < 0

    @property
    def needs_every_position(self) -> bool:
        """Whether no position of the prompt may be skipped, even where the prefix cache has its K/V."""
        return self.wants_prompt_logprobs or self.pooling is Pooling.MEAN

    def tokens(self) -> np.ndarray:
        """i32[num_known], prompt and output."""
        if not self.output:
            return self.prompt
        return np.concatenate([self.prompt, np.array(self.output, np.int32)])

    def page_bytes(self, page: int, page_size: int) -> bytes:
        """The known tokens of one full page, as the bytes of i32[page_size]."""
        start, stop = page * page_size, (page + 1) * page_size
        n = self.num_prompt
        if start >= n:
            return self.output[start - n : stop - n].tobytes()
        prompt = self.prompt[start:stop].tobytes()
        return prompt if stop <= n else prompt + self.output[: stop - n].tobytes()
