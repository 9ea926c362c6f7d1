"""The engine's requests and outputs, in token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300
MAX_DEVICE_STOP_IDS = 16
MOST_TARGET_MS = 10**7


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """The parameters of one request's sampling and of its end. `make_request_state` checks the values.

    Order on the device: logit_bias, penalties, the `min_tokens` ban, the grammar's mask, temperature, top_k, top_p,
    min_p.
    """

    max_tokens: int
    min_tokens: int = 0  # end-of-sequence and stop ids cannot be drawn before this many output tokens
    temperature: float = 1.0  # 0: greedy; top_k, top_p, min_p and seed are then ignored
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output tokens
    logit_bias: tuple[tuple[int, float], ...] = ()  # at most MAX_LOGIT_BIAS (token id, bias)
    seed: int | None = None  # None: the engine draws one
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end-of-sequence ids
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; n: of the sampled token and the n most likely ones, n <= MAX_LOGPROBS
    logprob_token_ids: tuple[int, ...] = ()  # reported with each token instead of the n most likely ones
    # Returns each token's log-probability under the distribution that it was drawn from. For greedy tokens it is the
    # distribution before the temperature. `logprobs` are not affected.
    sampled_logprobs: bool = False
    prompt_logprobs: int | None = None  # likewise for each prompt token except the first; bypasses the prefix cache
    allowed_token_ids: tuple[int, ...] | None = None  # None: all; no other token can be drawn
    bad_words: tuple[tuple[int, ...], ...] = ()  # no output has these tokens one after the other
    grammar: str | None = None  # of the output, in the text form that the engine's `Grammars` read


class LogprobsMode(StrEnum):
    """The kind of the log-probabilities of generated tokens, by its name in vLLM. For prompts they are always raw."""

    RAW_LOGPROBS = "raw_logprobs"  # under the model's own distribution
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGPROBS = "processed_logprobs"  # under the distribution that the token was drawn from
    PROCESSED_LOGITS = "processed_logits"

    @property
    def is_processed(self) -> bool:
        """Whether they are computed after bias, penalties, bans, masks, temperature, top_k, top_p and min_p."""
        return self in (LogprobsMode.PROCESSED_LOGPROBS, LogprobsMode.PROCESSED_LOGITS)

    @property
    def are_logits(self) -> bool:
        """Whether they are logits, which are not normalised."""
        return self in (LogprobsMode.RAW_LOGITS, LogprobsMode.PROCESSED_LOGITS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """The latencies that a request wants. None: it has no such target."""

    itl_ms: float | None = None  # of a gap between two tokens
    ttft_ms: float | None = None  # from arrival to the first token
    percentile: float = 0.99  # the share of the gaps that must be within `itl_ms`

    def are_kept(self, ttft_s: float, num_gaps: int, num_late: int) -> bool:
        """Whether a request is within its targets. `num_late` of its gaps were longer than `itl_ms`; k tokens that came
        together have k gaps."""
        is_in_time = self.ttft_ms is None or ttft_s * 1000 <= self.ttft_ms
        return is_in_time and (self.itl_ms is None or num_late <= (1 - self.percentile) * num_gaps + 1e-9)

    def __str__(self) -> str:
        """The name of the class of requests with these targets, such as `50/500` or `-/500`."""
        return "/".join("-" if ms is None else f"{ms:g}" for ms in (self.itl_ms, self.ttft_ms))


class Pooling(StrEnum):
    """How the hidden states of a prompt's tokens become one vector, its embedding."""

    LAST = "last"  # the state of the last token, the only token that attends to all others
    MEAN = "mean"  # the mean over all tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sequence to generate. The server makes n requests of `n > 1`, and finds stop strings in the text.

    A request that `embeds` generates nothing. Its one output has the prompt's embedding, and none of its sampling
    parameters is read.
    """

    request_id: str
    prompt: Sequence[int]
    sampling: SamplingParams
    priority: int = 0  # lower runs sooner
    cache_salt: int = 0  # requests share cached prefix pages only within one salt
    deadline_s: float | None = None  # seconds it may wait in the queue before it is refused
    embeds: bool = False
    counts_drafts: bool = False  # its outputs say how many of its drafts were right
    client: int = 0  # clients share the rows of a step, and so do a client's groups: see `fair_queue.py`
    group: str = ""  # "": it is alone
    adapter: int = 0  # the identity of the LoRA adapter's weights; 0: the base model
    model: int = 0  # the identity of the model's weights; 0: the model that the engine started with
    targets: Targets | None = None  # None: the engine's own, if it has some
    is_flex: bool = False  # it has no targets, and is served in what the others leave


class FinishReason(StrEnum):
    """Why a request has ended."""

    STOP = "stop"  # an end-of-sequence or stop id, or a stop string that the caller found
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"  # the client left, or the engine pauses or shuts down
    ERROR = "error"  # see RequestOutput.error


class ErrorCode(StrEnum):
    """Why a request ended with FinishReason.ERROR."""

    QUEUE_DEADLINE = "queue_deadline"  # the request waited longer than its deadline_s (HTTP 503)
    LATE = "late"  # its first token would have come after its target (HTTP 429)
    GRAMMAR = "grammar"  # the grammar cannot be compiled or costs too much (HTTP 400)
    ADAPTER = "adapter"  # the weights of its LoRA adapter cannot be read any more (HTTP 404)
    MODEL = "model"  # the weights of its model cannot be read any more (HTTP 503)
    NOT_FINITE = "not_finite"  # the model gave NaN or infinity
    STEP_FAILED = "step_failed"  # a step that computed the request failed; other requests go on
    ENGINE_DEAD = "engine_dead"  # the engine stopped for good


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the raw model distribution (before bias, penalties and temperature)."""

    logprob: float
    top_ids: tuple[int, ...] = ()  # most likely first; or those of `logprob_token_ids`
    top_logprobs: tuple[float, ...] = ()
    rank: int | None = None  # 1 + the number of more likely tokens


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """One request's output of one step, usually one token. `token_ids` holds new tokens only.

    Treat it as immutable. It is not frozen, because that would cost two microseconds per token.
    """

    request_id: str
    number: int = -1  # the request's number in the engine; -1: the engine has not accepted it
    token_ids: tuple[int, ...] = ()  # including the id that ended the request
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token id, if requested
    sampled_logprobs: tuple[float, ...] = ()  # one per token id, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # with the first token; entry i is of prompt token i + 1
    embedding: bytes | None = None  # the embedding, f32[D] in little-endian bytes, scaled to length 1
    times: tuple[float, float] | None = None  # with the first token: seconds in the queue, and of the prompt's prefill
    num_cached_tokens: int = 0  # prompt tokens whose K/V came from the prefix cache
    drafts: tuple[int, int] | None = None  # if asked for: accepted and rejected drafts since the request's start
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop id that ended the request; None for end-of-sequence
    error: str | None = None
    error_code: ErrorCode | None = None
    retry_after_s: int | None = None  # of LATE
    by_pause: bool = False  # a pause has aborted the request: what it has is its answer
