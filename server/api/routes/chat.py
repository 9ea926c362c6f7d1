"""POST /v1/chat/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.api.answers.answer import GenerationAnswer
from server.api.answers.chat_writer import ChatOptions, ChatWriter
from server.api.answers.writer import AnswerHead
from server.api.request.body_reader import BodyReader
from server.api.request.fields import CHAT_FIELDS
from server.api.request.limits import check_counts, output_limit, truncation
from server.api.request.prompt import encode_chat
from server.api.request.sampling import check_top_logprobs
from server.api.request.schemas import ChatRequest
from server.api.request.score_limit import limit_scores
from server.api.request.structured import requested_grammar
from server.api.request.submission import check_min_tokens, check_num_choices, read_generation, start_generation
from server.api.request.template import template_of
from server.api.request.template_input import content_text
from server.api.request.tool_grammar import grammar_with_tools
from server.api.request.tools import ToolChoice, call_parsers, usable_tools
from server.api.route import EVENTS, JSON, ApiRoute
from server.api.state import ServerState
from server.engine.generation import Generation
from server.http.errors import invalid


def chat_routes(state: ServerState) -> list[ApiRoute]:
    """The route of chat completions."""
    return [
        ApiRoute(
            path="/v1/chat/completions",
            endpoint=Chat(state).__call__,
            method="POST",
            generates=True,
            body=ChatRequest,
            media_types=(JSON, EVENTS),
            summary="Answers a conversation.",
        )
    ]


class Chat:
    """Answers `/v1/chat/completions`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._reader = BodyReader(ChatRequest, CHAT_FIELDS, strict=state.settings.strict_fields)

    async def __call__(self, request: Request) -> Response:
        state = self._state
        body, head = await read_generation(state, request, self._reader, id_prefix="chatcmpl")
        generation, options = await start_chat(state, body, head)
        writer = ChatWriter(generation, head, state.tokenizer, options)
        return GenerationAnswer(generation, writer, state.turns, stream=bool(body.stream))


async def start_chat(state: ServerState, body: ChatRequest, head: AnswerHead) -> tuple[Generation, ChatOptions]:
    """Makes the checks of a chat, renders the prompt and submits it. Raises RequestError."""
    top_logprobs = _top_logprobs(body)
    num_prompt_logprobs = body.prompt_logprobs
    if num_prompt_logprobs is None and body.echo and not body.stream:
        num_prompt_logprobs = top_logprobs  # as in vLLM
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    check_counts(asked, body.min_tokens, param=param)
    check_num_choices(state, 1, body.n)

    tools = await usable_tools(state, body)
    template = await template_of(state, body, tools)
    answer = await requested_grammar(state, body)
    grammar = await grammar_with_tools(state, tools, answer)
    prompt = await encode_chat(state, body, template, tools)
    max_model_len = state.client.info.max_model_len
    wanted, side = body.truncate_prompt_tokens, body.truncation_side
    prompt = prompt[truncation(wanted, side, max_model_len=max_model_len, least_output=asked or 1)]
    limit = output_limit(len(prompt), asked, max_model_len, param=param)
    (limit,) = limit_scores(
        [limit],
        n=head.n,
        logprobs=top_logprobs,
        num_prompt_scores=0 if num_prompt_logprobs is None else len(prompt) * (num_prompt_logprobs + 1),
        fixed=asked is not None,
        most=state.settings.max_request_logprobs,
    )
    check_min_tokens(body, limit)
    generation = await start_generation(
        state,
        body,
        head,
        [prompt],
        [limit],
        logprobs=top_logprobs,
        prompt_logprobs=num_prompt_logprobs,
        grammar=grammar,
        new_call_parser=call_parsers(state, tools, answer),
    )
    options = ChatOptions(
        prompt=prompt,
        top_logprobs=top_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        echo=_echo(body),
        is_named_call=tools is not None and tools.choice is ToolChoice.NAMED,
    )
    return generation, options


def _echo(body: ChatRequest) -> str:
    """With `echo`, the text of the last message if it is the assistant's: the answer continues it."""
    last = body.messages[-1]
    return content_text(last) if body.echo and last.role == "assistant" else ""


def _top_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise invalid("top_logprobs", "is only allowed when `logprobs` is true")
        check_top_logprobs("top_logprobs", body.top_logprobs)
    if body.prompt_logprobs is not None:
        check_top_logprobs("prompt_logprobs", body.prompt_logprobs)
    return (body.top_logprobs or 0) if body.logprobs else None
