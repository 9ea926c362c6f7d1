"""The engine's record of one request: its tokens, its slot and pages, and counters of its progress."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum

import numpy as np

from batcher.grammar import Matcher
from batcher.request import Pooling, Request, RequestOutput, SamplingParams, Targets, TokenLogprobs
from batcher.sampling_table import PARAMETERS, is_asked
from batcher.scheduling.page_moves import PageLoad
from batcher.scheduling.pages import StoredPrefix
from batcher.step import Variant

OnOutput = Callable[[RequestOutput], None]


class State(Enum):
    """The stages of a sequence between arrival and end."""

    COMPILING = "compiling"  # its grammar is being compiled; it is not in the scheduler's queue yet
    WAITING = "waiting"  # never admitted, or preempted: owns no slot and no pages
    RUNNING = "running"  # owns a slot and pages
    FINISHED = "finished"


@dataclass(eq=False, repr=False, slots=True)
class RequestState:
    """The engine's record of one request.

    Positions: the tokens `to_compute` are computed in chunks first (`num_computed` counts the K/V that dispatched steps
    have written or will write). The step that computes the last of them emits the next token, and from then on every
    step feeds the slot's last token back (`decoding`). A token is *pending* from the dispatch of the step that emits it
    to the reading of that step.
    """

    request: Request
    prompt: np.ndarray  # i32[num_prompt]
    _: KW_ONLY
    limit: int  # most output tokens: max_tokens, or fewer if the context ends first
    stop_ids: frozenset[int]  # any of these ends it
    seed: int
    arrived_s: float
    on_output: OnOutput
    matcher: Matcher | None = None  # of the request's grammar and its bad words
    allowed: np.ndarray | None = None  # i32[num_mask_words], the mask of tokens that may ever be drawn
    pooling: Pooling | None = None  # how its embedding is pooled; None: it generates

    request_id: str = field(init=False)
    sampling: SamplingParams = field(init=False)
    num_prompt: int = field(init=False)
    needs_sampling: bool = field(init=False)
    has_penalties: bool = field(init=False)
    state: State = field(init=False)
    is_blocked: bool = field(init=False)  # the mask of its next token is not computed yet
    key: tuple[int, int, int] = field(init=False)  # rank among those that run, set at admission
    to_compute: np.ndarray = field(init=False)  # before it decodes: the prompt, and after a preemption also the output
    prompt_logprobs: list[TokenLogprobs | None] | None = field(init=False)
    number: int = -1  # rank among the engine's requests, set when it is accepted
    mask: np.ndarray | None = None  # the mask of its next token; None after that token's dispatch
    is_slow_to_mask: bool = True  # its first mask includes compilation, which is slow
    arrival: int = -1  # rank, set when it joins the scheduler's queue; kept at preemption
    order: tuple[float, int] = (0.0, -1)  # in the queue, of a group: the deadline of its first token, its arrival
    targets: Targets | None = None  # set when it joins the queue
    is_last: bool = False  # it goes after all others of its priority: it is `flex`, or late
    num_late_gaps: int = 0  # gaps longer than its target, of a request in a slot: see `SlotColumns.num_late`
    output: array[int] = field(default_factory=lambda: array("i"))  # tokens read back
    num_emitted: int = 0  # output tokens of dispatched steps, pending ones included
    num_computed: int = 0
    decoding: bool = False
    slot: int = -1
    adapter_slot: int = 0  # the slot of its LoRA adapter while it runs; 0: the base model
    is_new: bool = False  # it has a slot, and no step has set the slot's state yet
    load: PageLoad | None = None  # it waits for pages that come back to the device
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of the full pages of prompt and output, as far as computed
    prefix: StoredPrefix = field(default_factory=StoredPrefix)  # of a waiting request
    num_committed: int = 0  # leading pages offered to the prefix cache
    num_hit_pages: int = 0  # leading pages that were found at the last admission, on the device or away
    num_hit_tokens: int = 0  # prompt tokens found at the first admission, in the prefix cache or behind it
    num_loaded_tokens: int = 0  # those of them that were found behind it
    pooled: np.ndarray | None = None  # f32[D], the sum of the hidden states of the tokens read back, for MEAN
    num_stalls: int = 0  # steps in a row in which it has waited for a page while decoding
    num_accepted: int = 0  # drafts that are in its output
    num_rejected: int = 0
    draft_rate: float | None = None  # probability that its next draft is right; None: not known
    last_step: int = -1  # the last dispatched step that has a row of it
    num_preemptions: int = 0
    started_s: float = -1.0
    first_token_s: float = -1.0
    last_token_s: float = -1.0  # of a request in a slot: see `SlotColumns.last_token_of`

    def __post_init__(self) -> None:
        request, sampling = self.request, self.request.sampling
        asked = [parameter for name, parameter in PARAMETERS.items() if is_asked(sampling, name)]
        self.request_id, self.sampling = request.request_id, sampling
        self.num_prompt, self.to_compute = len(self.prompt), self.prompt
        self.needs_sampling = any(parameter.variant is Variant.SAMPLE for parameter in asked)
        self.has_penalties = any(parameter.counts_tokens for parameter in asked)
        self.is_blocked = self.matcher is not None
        self.state = State.COMPILING if self.is_blocked else State.WAITING
        self.is_last = request.is_flex
        self.key = (self.level, 0, -1)
        self.prompt_logprobs = None if sampling.prompt_logprobs is None else [None] * (self.num_prompt - 1)

    @property
    def level(self) -> int:
        """Requests of a lower level go first. Each priority has two levels, one of them for those that go last."""
        return 2 * self.request.priority + self.is_last

    @property
    def itl_s(self) -> float:
        """The target of a gap between two tokens, in seconds."""
        itl_ms = None if self.targets is None else self.targets.itl_ms
        return math.inf if itl_ms is None else itl_ms / 1000

    @property
    def ttft_s(self) -> float | None:
        """The target of the time to the first token, in seconds; None also if there can be none any more."""
        ttft_ms = None if self.targets is None or self.first_token_s >= 0 else self.targets.ttft_ms
        return None if ttft_ms is None else ttft_ms / 1000

    @property
    def is_within_targets(self) -> bool | None:
        """Whether a request that has ended was within its targets; None: it had none."""
        if self.targets is None:
            return None
        return self.targets.are_kept(self.first_token_s - self.arrived_s, len(self.output) - 1, self.num_late_gaps)

    def take_mask(self) -> np.ndarray:
        """The mask of the token that is dispatched now. Blocks the sequence until its next mask is computed."""
        mask, self.mask = self.mask, None
        assert mask is not None
        self.is_blocked = True
        return mask

    @property
    def num_known(self) -> int:
        """The number of tokens whose ids the host knows."""
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
        """The known tokens of prompt and output, i32[num_known]."""
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
