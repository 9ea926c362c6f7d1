"""POST /inference/v1/generate: vLLM's route from token ids to token ids, for training and for clients that render and
decode themselves. vLLM's other routes here make its requests of chats and completions, without answering them.

As in vLLM, a sampling parameter that is not given has vLLM's default and not the model's, and without `max_tokens` the
output may fill the context. Each choice always has `weight_versions`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.answers.answer import GenerationAnswer, JsonAnswer
from server.api.answers.choices_writer import ChoicesWriter, Fields
from server.api.answers.logprobs import by_id, finite, prompt_logprobs
from server.api.answers.writer import AnswerHead
from server.api.record import UNENFORCED, note
from server.api.request.chat import check_chat, complete
from server.api.request.generation_plan import GenerationPlan, submit
from server.api.request.grammars import Constraint, asked_constraint, make_grammar
from server.api.request.sampling import check_ids, num_logprobs
from server.api.request.schemas import (
    ASKED,
    TOKENS,
    ChatRequest,
    CompletionRequest,
    Generates,
    LatencyTargets,
    Priority,
    SamplingFields,
    SamplingParameters,
    StreamOptions,
)
from server.api.route import EVENTS, JSON
from server.api.routes.completions import Completions
from server.api.routes.endpoints import route
from server.api.state import ServerState
from server.engine.generation import Choice, ChoiceDelta, Generation, ScoredToken
from server.http.encoding import NestedList, list_of
from server.http.request_error import RequestError
from server.settings import GenerationDefaults
from server.text.tokenizer import ByteLevelTokenizer

_DEFAULTS = GenerationDefaults()


class GenerateParams(SamplingParameters, kw_only=True):
    """vLLM's sampling parameters. The defaults are vLLM's (`GenerationDefaults`), not the model's."""

    n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Annotated[list[int], ASKED] | None = None
    sampled_logprobs: bool | None = None  # beyond vLLM's


class GenerateRequest(Generates, kw_only=True):
    """The body of a request from token ids to token ids."""

    token_ids: Annotated[list[int], TOKENS]
    sampling_params: GenerateParams = msgspec.field(default_factory=GenerateParams)
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | msgspec.UnsetType | None = msgspec.UNSET
    cache_salt: str | None = None
    priority: Priority | None = None
    service_tier: str | None = None
    slo: LatencyTargets | None = None
    timeout_s: float | None = None
    return_token_ids: bool | None = None  # those of the prompt
    return_weight_versions: bool | None = None  # without effect: each choice has them


class Generate:
    """Answers `/inference/v1/generate`, and the routes that render its requests."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._completions = Completions(state)

    @route("POST /inference/v1/generate", GenerateRequest, generates=True, media_types=(JSON, EVENTS))
    async def create(self, request: Request, body: GenerateRequest) -> Response:
        """Continues token ids with token ids."""
        state, ids, params = self._state, body.token_ids, body.sampling_params
        if not ids:
            raise RequestError(400, "token_ids: must not be empty", param="token_ids")
        check_ids("token_ids", ids, (await state.find_model(body.model)).vocab_size)
        names = (name for name in GenerateRequest.__struct_fields__ if name in CompletionRequest.__struct_fields__)
        asked = CompletionRequest(
            prompt=list[str | int | list[int]](ids),
            **{name: getattr(body, name) for name in names}
            | {"return_token_ids": True, "return_weight_versions": True, "detokenize": False, "fills_context": True},
            **{name: _value(params, name) for name in GenerateParams.__struct_fields__},
        )
        plan, (prompt,) = await self._completions.plan(asked, request, id_prefix="generate-tokens")
        generation = await submit(state, plan)
        writer = GenerateWriter(
            generation, plan.head, plan.model.tokenizer, prompt.ids, params, shows_prompt=bool(body.return_token_ids)
        )
        return GenerationAnswer(generation, writer, stream=bool(body.stream))

    @route("POST /v1/chat/completions/render", ChatRequest)
    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """The token ids of a conversation, as a request for /inference/v1/generate."""
        plan = await check_chat(self._state, body, request, id_prefix="chatcmpl")
        await complete(self._state, plan)
        (rendered,) = await self._rendered(body, plan.generation)
        return JsonAnswer(rendered)

    @route("POST /v1/completions/render", CompletionRequest, answer_type="array")
    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        """The token ids of prompts, as requests for /inference/v1/generate."""
        plan, _ = await self._completions.plan(body, request, id_prefix="cmpl")
        return JsonAnswer(NestedList(await self._rendered(body, plan)))

    async def _rendered(self, body: SamplingFields, plan: GenerationPlan) -> list[dict[str, Any]]:
        """The request for each prompt. A header names the field of a grammar with calls or reasoning, because there is
        no field for such a grammar."""
        constraint = asked_constraint(body)
        if plan.grammar != await make_grammar(self._state, constraint):
            note(UNENFORCED, plan.grammar_field)
            constraint = None
        return [_request(body, plan, index, constraint) for index in range(len(plan.prompts))]


def _request(body: SamplingFields, plan: GenerationPlan, index: int, constraint: Constraint | None) -> dict[str, Any]:
    head, ids = plan.head, plan.prompts[index]
    given = {name: getattr(body, name, None) for name in GenerateParams.__struct_fields__}
    params = given | {name: value for name, value in plan.sampling.values.items() if isinstance(value, int | float)}
    params |= {
        "n": head.n,
        "max_tokens": plan.limits[index],
        "logprobs": None if head.asked_ids else plan.logprobs,
        "prompt_logprobs": plan.prompt_logprobs,
        "truncate_prompt_tokens": None,  # the prompt is cut already
        "structured_outputs": None if constraint is None else constraint.asked,
    }
    return {
        "request_id": head.id if len(plan.prompts) == 1 else f"{head.id}-{index}",
        "token_ids": list_of(ids, len(ids)),
        "sampling_params": {name: value for name, value in params.items() if value is not None},
        "model": head.model,
        "features": None,
        "stream": plan.stream,
        "stream_options": body.stream_options or None,
        "cache_salt": body.cache_salt,
        "priority": plan.priority,
        "kv_transfer_params": None,
    }


def _value(params: GenerateParams, name: str) -> Any:
    value = getattr(params, name)
    return getattr(_DEFAULTS, name, None) if value is None else value


class GenerateWriter(ChoicesWriter):
    """Writes token ids and their chunks."""

    WHOLE = CHUNK = "tokens"

    def __init__(
        self,
        generation: Generation,
        head: AnswerHead,
        tokenizer: ByteLevelTokenizer,
        prompt: Sequence[int],
        params: GenerateParams,
        *,
        shows_prompt: bool,
    ) -> None:
        super().__init__(
            generation, head, tokenizer, num_top=num_logprobs("logprobs", params.logprobs, params.logprob_token_ids)
        )
        self._prompt = prompt
        self._params = params
        self._shows_prompt = shows_prompt

    def _chunk(self, choice: Choice, fields: Fields, *, opens: bool = False) -> Fields:
        """A chunk with one choice. The first chunk of a stream also has the prompt, if the request asks for it."""
        chunk = super()._chunk(choice, fields, opens=opens) | self._shown_prompt()
        self._shows_prompt = False
        return chunk

    def _whole_choice(self, choice: Choice, choice_delta: ChoiceDelta) -> Fields:
        logprobs = self._scores(choice, choice_delta.scored) if self._scores_shown else None
        return {"index": choice.index, "logprobs": logprobs, **self._ending(choice), **self._ids_fields(choice_delta)}

    def _text_fields(self, text: str) -> Fields:
        return {}

    def _scores(self, choice: Choice, scored: list[ScoredToken]) -> Fields:
        return {"content": list_of(self._entries(scored), len(scored))}

    def _entries(self, scored: Iterable[ScoredToken]) -> Iterator[Fields]:
        """The entries of `logprobs`. A token has its name in vLLM's older form and its id, and is the first of its
        `top_logprobs`."""

        def entry(id: int, logprob: float, rank: int | None) -> Fields:
            return {"token": f"token_id:{id}", "token_id": id, "logprob": finite(logprob), "rank": rank}

        ranked = not self._head.asked_ids
        for token in scored:
            assert token.scores is not None
            own, *others = [entry(*each) for each in by_id(token.token_id, token.scores, self._num_top, ranked=ranked)]
            yield own | {"bytes": None, "top_logprobs": [own, *others]}

    def _whole_fields(self) -> Fields:
        scores, num_top = self._generation.choices[0].prompt_logprobs, self._params.prompt_logprobs
        logprobs = prompt_logprobs(self._tokenizer, self._prompt, scores, num_top)
        return {**logprobs, "kv_transfer_params": None, **self._shown_prompt()}

    def _shown_prompt(self) -> Fields:
        return {"prompt_token_ids": list_of(self._prompt, len(self._prompt))} if self._shows_prompt else {}

    def _object(self, kind: str, choices: Any) -> Fields:
        head = self._head
        return {
            "request_id": head.id,
            "output_mode": kind,
            "created": head.created,
            "model": head.model,
            "choices": choices,
        }
