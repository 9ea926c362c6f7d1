"""The plan of a generation: the work that a request asks of the engine, from the checks to `submit`."""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request

from batcher.request import MOST_TARGET_MS, Targets
from server.api.answers.writer import AnswerHead, UsageOptions
from server.api.record import UNENFORCED, begun, current_record, note
from server.api.request.prompts import read_bad_words
from server.api.request.sampling import Sampling, checked_sampling
from server.api.request.schemas import LatencyTargets, SamplingFields
from server.api.served_model import ServedModel
from server.api.state import ServerState
from server.engine import wire
from server.engine.generation import Choice, Generation
from server.flag import MOST_SECONDS
from server.grammar.forms import Grammar
from server.http.auth import current_client, current_key
from server.http.request_error import invalid
from server.logs import ThrottledLog
from server.settings import FLEX
from server.text.reasoning import ReasoningReader
from server.text.stop_strings import StopStrings
from server.text.stream import NoText, TextStream
from server.text.tool_calls.parser import CallParser

_log = ThrottledLog(logging.getLogger("pallas_serve"))

MAX_ID_CHARS = 200
TIMEOUT_HEADER = "X-Request-Timeout"
TARGET_HEADERS = {"itl_ms": "X-SLO-ITL-Ms", "ttft_ms": "X-SLO-TTFT-Ms"}
MAX_ALLOWED_IDS = 2**20  # the most allowed token ids of all sequences of a request
LEAST_LEFT_S = 0.001  # the time that is left if the deadline has passed while the prompt was encoded


@dataclass(kw_only=True, slots=True)
class GenerationPlan:
    """The work that a request asks of the engine. `check_generation` makes the plan, and later steps fill in the rest.

    Without streaming, only the first choice of each prompt has the prompt's log-probabilities.
    """

    head: AnswerHead
    sampling: Sampling
    stream: bool
    model: ServedModel
    has_own_id: bool  # whether the request has chosen the answer's id
    priority: int
    cache_salt: int
    targets: Targets | None  # None: the engine's own; with `is_flex` none
    is_flex: bool
    shows_text: bool = True
    # of the prompt
    prompts: Sequence[list[int]] = ()
    limits: Sequence[int] = ()  # the prompts' output limits
    logprobs: int | None = None  # tokens whose log-probabilities are reported with each token
    prompt_logprobs: int | None = None
    # of the output's form
    grammar: Grammar | None = None  # one of `state.grammars`; it applies to every sequence
    grammar_field: str = "tools"  # the field that asks for it
    new_reasoning: Callable[[], ReasoningReader | None] = lambda: None  # None: the whole text is the answer
    new_calls: Callable[[], CallParser | None] = lambda: None  # None: the whole answer is content


async def check_generation(
    state: ServerState, body: SamplingFields, request: Request, *, id_prefix: str
) -> GenerationPlan:
    """Reads the model and the sampling fields of a body. Raises RequestError if one is unknown or invalid."""
    model = await state.find_model(body.model)
    sampling = checked_sampling(body, model.generation_defaults, vocab_size=model.vocab_size)
    if body.bad_words:
        bad_words = await read_bad_words(model, body.bad_words)
        sampling = replace(sampling, values={**sampling.values, "bad_words": bad_words})
    targets, is_flex = _targets_of(state, body, request)
    head = AnswerHead(
        id=f"{id_prefix}-{_own_id(body.request_id)}",
        model=model.name,
        created=int(time.time()),
        n=body.n or 1,
        usage=_usage_options(state, body),
        deadline=deadline_of(body.timeout_s, request),
        every_token=bool(body.ignore_eos),
        token_ids=bool(body.return_token_ids),
        sampled_logprobs=bool(body.sampled_logprobs),
        names_are_ids=state.settings.return_tokens_as_token_ids
        if body.return_tokens_as_token_ids is None
        else body.return_tokens_as_token_ids,
        asked_ids=bool(body.logprob_token_ids),
        logprobs_by_id=bool(body.return_logprobs_by_id),
        weight_versions=bool(body.return_weight_versions),
    )
    return GenerationPlan(
        head=head,
        sampling=sampling,
        stream=bool(body.stream),
        model=model,
        has_own_id=body.request_id is not None,
        priority=body.priority or 0,
        cache_salt=cache_salt_of(state, body.cache_salt),
        targets=targets,
        is_flex=is_flex,
    )


async def submit(state: ServerState, plan: GenerationPlan, *others: GenerationPlan) -> Generation:
    """Submits `head.n` sequences for each prompt, prompt by prompt. Raises RequestError.

    The `others` belong to the same request. They differ in their prompts, limits, grammars, reasoning and calls only.
    """
    plans = (plan, *others)
    head, sampling = plan.head, plan.sampling
    prompts = [(plan, prompt, limit) for plan in plans for prompt, limit in zip(plan.prompts, plan.limits, strict=True)]
    _check_allowed_ids(sampling, len(prompts) * head.n)
    unenforced = () if plan.grammar is None else plan.grammar.unenforced
    if unenforced:
        _log.warning("%s: a grammar cannot hold %s; answers may break it", plan.grammar_field, ", ".join(unenforced))
        note(UNENFORCED, *unenforced)
    generation = Generation(
        state.engine,
        # An id that the request has chosen may come again while the engine still has outputs of the one before.
        f"{head.id}-{uuid.uuid4().hex}" if plan.has_own_id else head.id,
        stream=plan.stream,
        on_limit=state.metrics.observe_limit,
        on_end=state.metrics.observe_end,
        grammar_field=None if plan.grammar is None else plan.grammar_field,
    )
    stops = StopStrings(sampling.stops) if sampling.stops else None
    packed = wire.packed_prompts([prompt for _, prompt, _ in prompts])
    left_s, queue_s = times_left(state, head.deadline)
    requests: list[wire.WireRequest] = []
    earlier: str | None = None  # the last request's grammar
    for (own, prompt, max_tokens), packed_prompt in zip(prompts, packed, strict=True):
        for i in range(head.n):
            text = None if own.grammar is None else own.grammar.text or None
            choice = add_choice(generation, own, len(prompt), stops)
            requests.append(
                wire.WireRequest(
                    choice.request_id,
                    packed_prompt if i == 0 else b"",  # empty: the same prompt as the request before
                    sampling.params(
                        i,
                        max_tokens=max_tokens,
                        logprobs=None if head.asked_ids else plan.logprobs,
                        prompt_logprobs=plan.prompt_logprobs if i == 0 or plan.stream else None,
                        grammar=wire.SAME_GRAMMAR if text is not None and text == earlier else text,
                    ),
                    plan.priority,
                    plan.cache_salt,
                    queue_s,
                    counts_drafts=head.usage.show_drafts,
                    client=current_client(),
                    group=head.id,
                    adapter=plan.model.adapter,
                    model=plan.model.identity,
                    targets=plan.targets,
                    is_flex=plan.is_flex,
                )
            )
            earlier = text
    running = state.generations.get(head.id)
    if running is not None and not running.finished:
        raise invalid("request_id", "a request with this id is running already")
    state.metrics.observe_request(n=head.n, max_tokens=max(limit for *_, limit in prompts))
    begun(
        generation,
        answer_id=head.id,
        model=head.model,
        num_choices=head.n,
        num_prompt_tokens=sum(len(prompt) for _, prompt, _ in prompts),
        sampling=requests[0].sampling,
    )
    generation.submit(requests, timeout_s=left_s)
    state.generations[head.id] = generation
    return generation


def add_choice(
    generation: Generation, plan: GenerationPlan, num_prompt: int, stops: StopStrings | None = None
) -> Choice:
    """Adds a choice to the generation, with the plan's form of the output."""
    sampling = plan.sampling
    stream = (TextStream if plan.shows_text or stops is not None else NoText)(
        plan.model.tokenizer,
        stops=stops,
        include_stop=sampling.include_stop,
        skip_special_tokens=sampling.skip_special_tokens,
        min_tokens=sampling.values.get("min_tokens", 0),
        reasoning=plan.new_reasoning(),
    )
    calls, index, include_stop = plan.new_calls(), len(generation.choices), sampling.include_stop
    choice = Choice(generation, index, stream, num_prompt, include_stop=include_stop, calls=calls)
    generation.choices.append(choice)
    return choice


def times_left(state: ServerState, deadline: float | None) -> tuple[float | None, float | None]:
    """(seconds that a request has left, seconds for which it may wait in the engine's queue); None: any number."""
    left_s = None if deadline is None else max(LEAST_LEFT_S, deadline - time.monotonic())
    return left_s, min((s for s in (left_s, state.settings.queue_timeout_s) if s is not None), default=None)


def _own_id(id: str | None) -> str:
    """The part of an answer's id that a request may choose. Raises RequestError 400."""
    if id is None:
        return uuid.uuid4().hex
    if not (0 < len(id) <= MAX_ID_CHARS and id.isprintable()):
        raise invalid("request_id", f"must have 1 to {MAX_ID_CHARS} characters, all of them printable")
    return id


def _targets_of(state: ServerState, body: SamplingFields, request: Request) -> tuple[Targets | None, bool]:
    """The targets of the field, of the headers or of the API key, and whether the request is `flex`. Raises
    RequestError 400."""
    asked = body.slo or LatencyTargets()
    given: dict[str, float] = {}
    for name, header in TARGET_HEADERS.items():
        value = _header_number(request, header, "milliseconds")
        if value is not None and not 0 < value <= MOST_TARGET_MS:
            raise invalid(header, f"must be above 0 and at most {MOST_TARGET_MS} milliseconds, got {value:g}")
        value = getattr(asked, name) if getattr(asked, name) is not None else value
        given |= {} if value is None else {name: value}
    if body.service_tier == FLEX:
        if given:
            raise invalid("slo", f"a request of the service tier `{FLEX}` has no targets: leave one of them out")
        return None, True
    if asked.percentile is not None:
        if "itl_ms" not in given:
            raise invalid("slo.percentile", "needs `itl_ms`: it is the share of the times between two tokens")
        given["percentile"] = asked.percentile / 100
    if given:
        return Targets(**given), False
    record = current_record.get()
    key = "" if record is None else record.key or ""
    return state.settings.targets_of_keys.get(key, (None, False))


def deadline_of(timeout_s: float | None, request: Request) -> float | None:
    """The earlier deadline of the field and the header, which are in seconds. Raises RequestError 400."""
    header = _header_number(request, TIMEOUT_HEADER, "seconds")
    given = {} if timeout_s is None else {"timeout_s": timeout_s}
    given |= {} if header is None else {TIMEOUT_HEADER: header}
    for name, value in given.items():
        if not 0 < value <= MOST_SECONDS:
            raise invalid(name, f"must be above 0 and at most {MOST_SECONDS} seconds, got {value:g}")
    return time.monotonic() + min(given.values()) if given else None


def _header_number(request: Request, name: str, unit: str) -> float | None:
    """The number in a header; None: there is no such header. Raises RequestError 400."""
    text = request.headers.get(name)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError as error:
        raise invalid(name, f"must be a number of {unit}, got {text[:40]!r}") from error


def _usage_options(state: ServerState, body: SamplingFields) -> UsageOptions:
    options = body.stream_options
    if options and not body.stream:  # null and absent are the same
        raise invalid("stream_options", "is only allowed when `stream` is true")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "is not available when `stream` is true")
    asked, forced = bool(options and options.include_usage), state.settings.enable_force_include_usage
    return UsageOptions(
        in_stream=asked or forced,
        in_every_chunk=forced or (asked and bool(options and options.continuous_usage_stats)),
        show_cached=state.settings.show_cached_tokens,
        show_drafts=bool(body.return_draft_counts),
    )


def _check_allowed_ids(sampling: Sampling, num_sequences: int) -> None:
    """Raises RequestError 400 for too many allowed token ids. Each sequence sends its own list to the engine."""
    allowed = sampling.values["allowed_token_ids"]
    if allowed is not None and len(allowed) * num_sequences > MAX_ALLOWED_IDS:
        most = MAX_ALLOWED_IDS // num_sequences
        raise invalid("allowed_token_ids", f"at most {most} are allowed for {num_sequences} sequences")


def cache_salt_of(state: ServerState, salt: str | None) -> int:
    """The salt of a request's prefix. Requests with different salts share no cached prefixes, so timing a request
    reveals no other client's prompt. With `prefix_caching_per_key` the API key is part of the salt. Raises RequestError
    400."""
    if salt == "":
        raise invalid("cache_salt", "must not be empty: leave it out to share cached prefixes")
    key = current_key.get() if state.settings.prefix_caching_per_key else b""
    if not salt and not key:
        return 0
    return int.from_bytes(hashlib.blake2b((salt or "").encode(), key=key, digest_size=8).digest()) >> 1
