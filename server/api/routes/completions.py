"""POST /v1/completions.

The text of a special token in a prompt becomes that token. The tokenizer's begin-of-text is added unless
`add_special_tokens` is false or the prompt begins with it: a prompt that a template has rendered has one already. (In
chats no text of a user becomes a special token.)

`echo` shows a text as it was given, and token ids as their text with special tokens. Each token of the prompt stands in
the text at its `text_offset`, except an added begin-of-text: it is not shown, and stands for no characters.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.api.answers.completion_writer import CompletionOptions, CompletionWriter, Prompt
from server.api.request.beam_search import answer_of
from server.api.request.generation_plan import GenerationPlan, check_generation
from server.api.request.grammars import asked_constraint, compiled
from server.api.request.limits import (
    check_kinds,
    check_min_tokens,
    check_text_length,
    kept_part,
    limit_scores,
    listed,
    output_limit,
)
from server.api.request.prompts import read_prompts
from server.api.request.sampling import check_counts, check_num_choices, check_top_logprobs, num_logprobs
from server.api.request.schemas import CompletionRequest
from server.api.route import EVENTS, JSON
from server.api.routes.endpoints import Routes, route
from server.api.served_model import ServedModel
from server.engine.generation import Generation
from server.http.request_error import invalid

DEFAULT_MAX_TOKENS = 16


class Completions(Routes):
    """Answers `/v1/completions`."""

    @route("POST /v1/completions", CompletionRequest, generates=True, media_types=(JSON, EVENTS))
    async def create(self, request: Request, body: CompletionRequest) -> Response:
        """Continues a text."""
        state = self._state
        plan, prompts = await self.plan(body, request, id_prefix="cmpl")
        options = CompletionOptions(
            prompts=prompts,
            echo=bool(body.echo),
            discard_output=body.max_tokens == 0,
            logprobs=num_logprobs("logprobs", body.logprobs, body.logprob_token_ids),
            num_prompt_logprobs=body.prompt_logprobs,
        )

        def new_writer(generation: Generation) -> CompletionWriter:
            return CompletionWriter(generation, plan.head, plan.model.tokenizer, options)

        return await answer_of(state, body, plan, new_writer)

    async def plan(
        self, body: CompletionRequest, request: Request, *, id_prefix: str
    ) -> tuple[GenerationPlan, list[Prompt]]:
        """Makes the checks and encodes the prompts. Raises RequestError."""
        state = self._state
        plan = await check_generation(state, body, request, id_prefix=id_prefix)
        head = plan.head
        plan.logprobs = num_logprobs("logprobs", body.logprobs, body.logprob_token_ids)
        if body.prompt_logprobs is not None:
            check_top_logprobs("prompt_logprobs", body.prompt_logprobs)
        echo = bool(body.echo)
        if echo and head.asked_ids:
            raise invalid("logprob_token_ids", "is for tokens of the output: leave out `echo`")
        check_counts(body.max_tokens, body.min_tokens, param="max_tokens", least=0 if echo else 1)

        constraint = asked_constraint(body)
        plan.grammar = await compiled(state, constraint)
        plan.grammar_field = "" if constraint is None else constraint.field
        given, max_model_len = listed("prompt", body.prompt), plan.model.max_model_len
        check_num_choices(len(given), body.n, most=state.settings.max_choices)
        for prompt in given:  # before they are read, which takes long for a prompt that is too long
            if isinstance(prompt, str):
                check_text_length(len(prompt), plan.model.tokenizer, max_model_len)
            elif isinstance(prompt, list) and body.truncate_prompt_tokens is None:
                _limit(plan.model, body, len(prompt))
        check_kinds("prompt", body.prompt)
        wanted, side = body.truncate_prompt_tokens, body.truncation_side
        kept = kept_part(wanted, side, max_model_len, least_output=body.max_tokens or 1)
        affixes = body.add_special_tokens is not False
        prompts = await read_prompts(plan.model, "prompt", given, kept, affixes=affixes, decodes=echo)
        # max_tokens 0 (with echo): one hidden step computes the prompt's log-probabilities
        limits = [_limit(plan.model, body, len(prompt.ids)) for prompt in prompts]
        wants_scores = [value for value in (body.logprobs if echo else None, body.prompt_logprobs) if value is not None]
        num_prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        limits = limit_scores(
            limits,
            n=head.n,
            logprobs=plan.logprobs,
            sampled_logprobs=head.sampled_logprobs,
            num_prompt_scores=head.n * sum(value + 1 for value in wants_scores) * num_prompt_tokens,
            fixed=not body.fills_context or body.max_tokens is not None,
            most=state.settings.max_request_logprobs,
        )
        for limit in limits:
            check_min_tokens(body.min_tokens, limit)
        plan.shows_text = body.detokenize is not False  # otherwise tokens are decoded only if there are stop strings
        plan.prompts, plan.limits = [prompt.ids for prompt in prompts], limits
        plan.prompt_logprobs = max(wants_scores, default=None)
        return plan, prompts


def _limit(model: ServedModel, body: CompletionRequest, num_prompt: int) -> int:
    asked, most = body.max_tokens, model.generation_defaults.max_new_tokens
    limit = output_limit(num_prompt, asked, model.max_model_len, param="max_tokens", most=most)
    return min(limit, DEFAULT_MAX_TOKENS) if asked is None and not body.fills_context else limit
