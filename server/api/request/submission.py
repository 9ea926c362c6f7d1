"""The common steps of chat and completions from a decoded body to a running generation."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Sequence

from starlette.requests import Request

from server.api.answers.usage import UsageOptions
from server.api.answers.writer import AnswerHead
from server.api.request.bad_words import bad_word_ids
from server.api.request.body_reader import BodyReader
from server.api.request.sampling import check_sampling, sampling_params, stop_strings
from server.api.request.schemas import SamplingFields
from server.api.request.structured import field_of_grammar
from server.api.state import ServerState
from server.api.tracing import current_trace
from server.engine import wire
from server.engine.generation import Choice, Generation
from server.http.auth import current_client, current_key
from server.http.errors import RequestError, invalid
from server.settings import MOST_SECONDS
from server.text.stop_strings import StopStrings
from server.text.stream import TextStream
from server.text.tool_calls.parser import CallParser

MAX_ID_CHARS = 200
TIMEOUT_HEADER = "X-Request-Timeout"
MAX_ALLOWED_IDS = 2**20  # of all sequences of a request
LEAST_LEFT_S = 0.001  # left if the deadline has passed while the prompt was encoded


async def read_generation[T: SamplingFields](
    state: ServerState, request: Request, reader: BodyReader[T], *, id_prefix: str
) -> tuple[T, AnswerHead]:
    """The body after the checks of both routes, and the head of its answer. Raises RequestError."""
    body = await reader.read(request, state.body_limits, state.aside)
    header = request.headers.get(TIMEOUT_HEADER)
    return body, check_generation(state, body, id_prefix=id_prefix, timeout_header=header)


def check_generation(
    state: ServerState, body: SamplingFields, *, id_prefix: str, timeout_header: str | None = None
) -> AnswerHead:
    """The head of the answer. Raises RequestError for an unknown model or invalid sampling fields."""
    model = state.check_model(body.model)
    check_sampling(body, vocab_size=state.client.info.vocab_size)
    return AnswerHead(
        id=f"{id_prefix}-{_own_id(body.request_id)}",
        model=model,
        created=int(time.time()),
        n=body.n or 1,
        usage=_usage_options(state, body),
        deadline=deadline_of(body.timeout_s, timeout_header),
        every_token=bool(body.ignore_eos),
        token_ids=bool(body.return_token_ids),
        names_are_ids=bool(body.return_tokens_as_token_ids),
    )


def _own_id(id: str | None) -> str:
    """The part of an answer's id that a request may choose. Raises RequestError 400."""
    if id is None:
        return uuid.uuid4().hex
    if not (0 < len(id) <= MAX_ID_CHARS and id.isprintable()):
        raise invalid("request_id", f"must have 1 to {MAX_ID_CHARS} characters, all of them printable")
    return id


def deadline_of(timeout_s: float | None, header: str | None) -> float | None:
    """The earlier deadline of the field and the header, which are in seconds. Raises RequestError 400."""
    given = {} if timeout_s is None else {"timeout_s": timeout_s}
    if header is not None:
        try:
            given[TIMEOUT_HEADER] = float(header)
        except ValueError as error:
            raise invalid(TIMEOUT_HEADER, f"must be a number of seconds, got {header[:40]!r}") from error
    for name, value in given.items():
        if not 0 < value <= MOST_SECONDS:
            raise invalid(name, f"must be above 0 and at most {MOST_SECONDS} seconds, got {value:g}")
    return time.monotonic() + min(given.values()) if given else None


def _usage_options(state: ServerState, body: SamplingFields) -> UsageOptions:
    options = body.stream_options
    if options and not body.stream:  # null and absent are the same
        raise invalid("stream_options", "is only allowed when `stream` is true")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "is not available when `stream` is true")
    asked = bool(options and options.include_usage)
    return UsageOptions(
        in_stream=asked or state.settings.force_usage,
        in_every_chunk=asked and bool(options and options.continuous_usage_stats),
        show_cached=state.settings.show_cached_tokens,
        show_drafts=bool(body.return_draft_counts),
    )


async def start_generation(
    state: ServerState,
    body: SamplingFields,
    head: AnswerHead,
    prompts: Sequence[list[int]],
    limits: Sequence[int],
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
    new_call_parser: Callable[[], CallParser] | None = None,
    grammar: str | None = None,
) -> Generation:
    """Submits `head.n` sequences for each prompt, prompt by prompt; `limits` are the prompts' output limits.

    `grammar` is one of `state.grammars` and applies to every sequence's output.
    `new_call_parser` makes the parser of a choice's tool calls; None: tool calls are not parsed.
    Without streaming, only the first choice of each prompt has the prompt's log-probabilities.
    """
    generation = Generation(
        state.client,
        # An id that the request has chosen may come again while the engine still has outputs of the one before.
        head.id if body.request_id is None else f"{head.id}-{uuid.uuid4().hex}",
        stream=bool(body.stream),
        on_limit=state.metrics.observe_limit,
        on_end=state.metrics.observe_end,
        grammar_field=None if grammar is None else lambda: field_of_grammar(body),
    )
    include_stop = bool(body.include_stop_str_in_output)
    bad_words = await bad_word_ids(state, body.bad_words)
    allowed = _allowed_ids(body, len(prompts) * head.n)
    texts = stop_strings(body)
    stops = await state.aside.run(sum(map(len, texts)), StopStrings, texts) if texts else None
    packed = await state.aside.run(sum(map(len, prompts)), wire.packed_prompts, prompts)
    left_s = None if head.deadline is None else max(LEAST_LEFT_S, head.deadline - time.monotonic())
    requests: list[wire.WireRequest] = []
    for prompt, packed_prompt, max_tokens in zip(prompts, packed, limits, strict=True):
        for choice in range(head.n):
            stream = TextStream(
                state.tokenizer,
                stops=stops,
                include_stop=include_stop,
                skip_special_tokens=body.skip_special_tokens is not False,
                min_tokens=body.min_tokens or 0,
            )
            index = len(generation.choices)
            calls = None if new_call_parser is None else new_call_parser()
            generation.choices.append(
                Choice(generation, index, stream, len(prompt), include_stop=include_stop, calls=calls)
            )
            sampling = sampling_params(
                body,
                state.settings.generation_defaults,
                max_tokens=max_tokens,
                vocab_size=state.client.info.vocab_size,
                choice=choice,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs if choice == 0 or body.stream else None,
                grammar=wire.SAME_GRAMMAR if grammar is not None and requests else grammar,
                bad_words=bad_words,
                allowed_token_ids=allowed,
            )
            requests.append(
                wire.WireRequest(
                    generation.choices[-1].request_id,
                    packed_prompt if choice == 0 else b"",  # empty: the same prompt as the request before
                    sampling,
                    body.priority or 0,
                    cache_salt_of(state, body.cache_salt),
                    min((s for s in (left_s, state.settings.queue_timeout_s) if s is not None), default=None),
                    counts_drafts=bool(body.return_draft_counts),
                    client=current_client(),
                    group=head.id,
                )
            )
    running = state.generations.get(head.id)
    if running is not None and not running.finished:
        raise invalid("request_id", "a request with this id is running already")
    state.metrics.observe_request(n=head.n, max_tokens=max(limits))
    if (trace := current_trace.get()) is not None:
        trace.generation, trace.model, trace.sampling = generation, head.model, requests[0].sampling
    generation.submit(requests, timeout_s=left_s)
    state.generations[head.id] = generation
    return generation


def _allowed_ids(body: SamplingFields, num_sequences: int) -> tuple[int, ...] | None:
    """Raises RequestError 400 if there are too many: each sequence brings its own to the engine."""
    if body.allowed_token_ids is None:
        return None
    allowed = tuple(dict.fromkeys(body.allowed_token_ids))
    if len(allowed) * num_sequences > MAX_ALLOWED_IDS:
        most = MAX_ALLOWED_IDS // num_sequences
        raise invalid("allowed_token_ids", f"at most {most} are allowed for {num_sequences} sequences")
    return allowed


def check_num_choices(state: ServerState, num_prompts: int, n: int | None) -> None:
    """Raises RequestError 400. Call it before prompts are encoded: a body has room for millions of prompts."""
    most = state.settings.max_choices
    if num_prompts * (n or 1) > most:
        param = "n" if num_prompts == 1 else "prompt"
        raise invalid(param, f"at most {most} sequences per request are allowed, prompts times n")


def check_min_tokens(body: SamplingFields, limit: int) -> None:
    """Raises RequestError 400 if `min_tokens` exceeds the tokens that fit."""
    if (body.min_tokens or 0) > limit:
        message = f"min_tokens: {body.min_tokens} is more than the {limit} tokens that fit."
        raise RequestError(400, message, param="min_tokens")


def cache_salt_of(state: ServerState, salt: str | None) -> int:
    """Requests with different salts share no cached prefixes, so timing a request reveals no other client's prompt.
    With `prefix_caching_per_key`, the API key is part of the salt."""
    key = current_key.get() if state.settings.prefix_caching_per_key else b""
    if not salt and not key:
        return 0
    return int.from_bytes(hashlib.blake2b((salt or "").encode(), key=key, digest_size=8).digest()) >> 1
