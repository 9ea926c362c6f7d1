"""The steps from a chat's decoded body to a running generation: check, render, constrain, fit, submit.

Chat completions, the Responses API and Anthropic's Messages API use them. Each step reads the plan and adds its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request

from server.api.answers.chat_writer import ChatOptions
from server.api.record import LOWERED, TRUNCATED, note
from server.api.request.conversation import check_conversation, content_text, encode_conversation
from server.api.request.generation_plan import GenerationPlan, check_generation, submit
from server.api.request.grammars import Constraint, after_reasoning, asked_constraint, make_grammar, with_calls
from server.api.request.limits import check_min_tokens, kept_part, limit_scores, output_limit
from server.api.request.sampling import check_counts, check_num_choices, check_top_logprobs, num_logprobs
from server.api.request.schemas import ChatRequest
from server.api.request.tools import ToolChoice, Tools, usable_tools
from server.api.state import ServerState
from server.engine.generation import Generation
from server.http.request_error import invalid
from server.text.reasoning import ReasoningReader, is_open_after, reasoning_format_asked
from server.text.stream import decode_text

PROMPT_END = 16  # tokens that are read to see whether the prompt opens the reasoning
UNLIMITED_THINKING = -1  # vLLM's value for no budget


@dataclass(kw_only=True, slots=True)
class ChatPlan:
    """The plan of a chat, which the steps fill in."""

    generation: GenerationPlan
    body: ChatRequest  # whose conversation is rendered
    tools: Tools | None  # the tools that the model may call
    constraint: Constraint | None  # on an answer without calls
    kept: slice  # the part of the prompt
    max_tokens: int | None  # None: up to the end of the context
    max_tokens_field: str
    reads_reasoning: bool  # and shows it
    lowers_max_tokens: bool

    def about(self, body: ChatRequest) -> ChatPlan:
        """The plan of a body that differs in its messages only. Raises RequestError."""
        check_conversation(body)
        return replace(self, generation=replace(self.generation), body=body)

    @property
    def options(self) -> ChatOptions:
        """The options with which the answer is written."""
        return ChatOptions(
            prompt=self.generation.prompts[0],
            top_logprobs=self.generation.logprobs,
            num_prompt_logprobs=self.generation.prompt_logprobs,
            echo=_echo(self.body),
            reads_reasoning=self.reads_reasoning,
            is_named_call=self.tools is not None and self.tools.choice is ToolChoice.NAMED,
        )


async def start_chat(
    state: ServerState, body: ChatRequest, request: Request, *, id_prefix: str, lowers_max_tokens: bool = False
) -> tuple[Generation, ChatPlan]:
    """Makes the checks of a chat, renders the prompt and submits it. Raises RequestError.

    With `lowers_max_tokens` a `max_tokens` that does not fit is lowered to the end of the context.
    """
    generation, (plan,) = await start_chats(
        state, [body], request, id_prefix=id_prefix, lowers_max_tokens=lowers_max_tokens
    )
    return generation, plan


async def start_chats(
    state: ServerState,
    bodies: Sequence[ChatRequest],
    request: Request,
    *,
    id_prefix: str,
    lowers_max_tokens: bool = False,
) -> tuple[Generation, list[ChatPlan]]:
    """Starts one generation for several chats whose bodies differ in their messages only. Raises RequestError."""
    first = await check_chat(state, bodies[0], request, id_prefix=id_prefix, lowers_max_tokens=lowers_max_tokens)
    plans = [first, *(first.about(body) for body in bodies[1:])]
    for plan in plans:
        await complete(state, plan, share=len(plans))
    return await submit(state, *(plan.generation for plan in plans)), plans


async def check_chat(
    state: ServerState, body: ChatRequest, request: Request, *, id_prefix: str, lowers_max_tokens: bool = False
) -> ChatPlan:
    """Reads all fields of the body. Raises RequestError for the first that is invalid."""
    generation = await check_generation(state, body, request, id_prefix=id_prefix)
    generation.logprobs = _top_logprobs(body)
    generation.prompt_logprobs = body.prompt_logprobs
    if body.prompt_logprobs is None and body.echo and not (body.stream or body.logprob_token_ids):
        generation.prompt_logprobs = generation.logprobs  # as in vLLM
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    check_counts(max_tokens, body.min_tokens, param=field)
    check_num_choices(1, body.n, most=state.settings.max_choices)
    tools = usable_tools(state, body)
    check_conversation(body)
    wanted, side, max_model_len = body.truncate_prompt_tokens, body.truncation_side, generation.model.max_model_len
    return ChatPlan(
        generation=generation,
        tools=tools,
        body=body,
        constraint=asked_constraint(body),
        kept=kept_part(wanted, side, max_model_len, least_output=max_tokens or 1),
        max_tokens=max_tokens,
        max_tokens_field=field,
        lowers_max_tokens=lowers_max_tokens,
        reads_reasoning=generation.model.reasoning is not None and body.include_reasoning is not False,
    )


async def complete(state: ServerState, plan: ChatPlan, *, share: int = 1) -> None:
    """The steps between the checks and `submit`. Raises RequestError."""
    await render(state, plan)
    await constrain(state, plan)
    fit(state, plan, share=share)


async def count_tokens(state: ServerState, body: ChatRequest) -> int:
    """The number of tokens of the body's prompt. Raises RequestError."""
    model = await state.find_model(body.model)
    return len(await encode_conversation(state, model, body, usable_tools(state, body)))


async def render(state: ServerState, plan: ChatPlan) -> None:
    """Renders the conversation to the prompt."""
    prompt = await encode_conversation(state, plan.generation.model, plan.body, plan.tools)
    kept = prompt[plan.kept]
    note(TRUNCATED, *filter(None, [len(prompt) - len(kept)]))
    plan.generation.prompts = [kept]


async def constrain(state: ServerState, plan: ChatPlan) -> None:
    """Makes the grammar of the output and the parser of tool calls."""
    generation, tools, model = plan.generation, plan.tools, plan.generation.model
    reasoning = model.reasoning
    if reasoning is None and state.settings.reasoning_parser is None:
        reasoning = reasoning_format_asked(
            content_text(message) for message in plan.body.messages if message.role in ("system", "developer")
        )
    answer = await make_grammar(state, plan.constraint)
    grammar = called = await with_calls(state, model.call_format, tools, answer)
    field = "thinking_token_budget" if tools is None else "tools"
    if plan.constraint is not None:
        field = plan.constraint.field

    if tools is not None:
        generation.new_calls = lambda: tools.new_parser(model.call_format, is_free=answer is None)
    if reasoning is not None:
        prompt_end = decode_text(model.tokenizer, generation.prompts[0][-PROMPT_END:], skip_special_tokens=False)
        is_open, asked = is_open_after(reasoning, prompt_end), plan.body.thinking_token_budget
        budget = None if asked == UNLIMITED_THINKING else asked
        grammar = await after_reasoning(state, grammar, reasoning, is_open=is_open, budget=budget, field=field)
        generation.new_reasoning = lambda: ReasoningReader(
            reasoning, prompt_end=prompt_end, is_shown=plan.body.include_reasoning is not False
        )
    if grammar is not None and grammar.text:
        parts = [(param, part.text) for param, part in ((field, answer), ("tools", called)) if part and part.text]
        await state.grammars.check(grammar.text, param=field, parts=parts)
    generation.grammar, generation.grammar_field = grammar, field


def fit(state: ServerState, plan: ChatPlan, *, share: int = 1) -> None:
    """Checks that prompt and output fit into the context, and the log-probabilities into the chat's share of the
    answer, which is one part in `share`."""
    generation = plan.generation
    num_prompt, max_model_len = len(generation.prompts[0]), generation.model.max_model_len
    asked = plan.max_tokens
    if asked is not None and plan.lowers_max_tokens:
        asked = min(asked, max(1, max_model_len - num_prompt))
    most = generation.model.generation_defaults.max_new_tokens
    limit = output_limit(num_prompt, asked, max_model_len, param=plan.max_tokens_field, most=most)
    (limit,) = generation.limits = limit_scores(
        [limit],
        n=generation.head.n,
        logprobs=generation.logprobs,
        sampled_logprobs=generation.head.sampled_logprobs,
        num_prompt_scores=0 if generation.prompt_logprobs is None else num_prompt * (generation.prompt_logprobs + 1),
        fixed=plan.max_tokens is not None,
        most=state.settings.max_request_logprobs // share,
    )
    if plan.max_tokens is not None and limit < plan.max_tokens:
        note(LOWERED, limit)
    check_min_tokens(generation.sampling.values.get("min_tokens"), limit)


def _echo(body: ChatRequest) -> str:
    """The text before the answer: with `echo`, the text of the last message if it is the assistant's."""
    last = body.messages[-1]
    return content_text(last) if body.echo and last.role == "assistant" else ""


def _top_logprobs(body: ChatRequest) -> int | None:
    asked = num_logprobs("top_logprobs", body.top_logprobs, body.logprob_token_ids)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "is only allowed when `logprobs` is true")
    if body.prompt_logprobs is not None:
        check_top_logprobs("prompt_logprobs", body.prompt_logprobs)
    return (asked or 0) if body.logprobs or body.logprob_token_ids else None
