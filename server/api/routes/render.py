"""vLLM's routes that render: the token ids and sampling parameters that a request becomes, without an answer.

What they return is a request for `/inference/v1/generate`, of this server or of another one. A completion becomes a
list, with one request for each prompt.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.api.answers.answer import JsonAnswer
from server.api.record import UNENFORCED, note
from server.api.request.chat import check_chat, complete
from server.api.request.generation_plan import GenerationPlan
from server.api.request.grammars import Constraint, asked_constraint, make_grammar
from server.api.request.schemas import ChatRequest, CompletionRequest, SamplingFields
from server.api.routes.completions import Completions
from server.api.routes.endpoints import Routes, route
from server.api.routes.generate import GenerateParams
from server.http.encoding import NestedList, list_of


class Render(Routes):
    """Answers the routes that render."""

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
        plan, _ = await Completions(self._state).plan(body, request, id_prefix="cmpl")
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
