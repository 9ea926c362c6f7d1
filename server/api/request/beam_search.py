"""Beam search over HTTP (`use_beam_search`) and in `LLM.beam_search`: each step of it is one token of the engine for
all beams.

As in vLLM, beams are ranked by the model's own log-probabilities, the search lasts until `max_tokens`, and the score of
a beam is its log-probability divided by the power `length_penalty` of its number of tokens, with the prompt and without
the end token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batcher.request import MAX_LOGPROBS, FinishReason, LogprobsMode
from server.api.answers.answer import AsgiResponse, GenerationAnswer, JsonAnswer, while_connected
from server.api.answers.writer import Writer
from server.api.record import IGNORED, begun, note
from server.api.request.fields import BEAM_SEARCH
from server.api.request.generation_plan import GenerationPlan, add_choice, submit
from server.api.request.sampling import Sampling
from server.api.request.schemas import SamplingFields
from server.api.state import ServerState
from server.engine import wire
from server.engine.generation import Generation, ScoredToken
from server.http.request_error import invalid, unsupported

MAX_BEAMS = MAX_LOGPROBS // 2  # each step looks at twice as many candidates as beams, of which half may end
_GREEDY = {"temperature": 0.0, "allowed_token_ids": None}
_MOST_LIKELY = Sampling(values=_GREEDY, seed=None, stops=(), include_stop=True, skip_special_tokens=True)


async def answer_of(
    state: ServerState, body: SamplingFields, plan: GenerationPlan, new_writer: Callable[[Generation], Writer]
) -> Response:
    """The answer to a request: a generation, or the result of a beam search. Raises RequestError."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1):
            note(IGNORED, "length_penalty")
        generation = await submit(state, plan)
        return GenerationAnswer(generation, new_writer(generation), stream=bool(body.stream))
    _check(state, body, plan)
    search = BeamSearch(state, body, plan)

    async def send_all(scope: Scope, receive: Receive, send: Send) -> None:
        async with while_connected(receive, search):
            await JsonAnswer(new_writer(await search.run()).whole())(scope, receive, send)

    return AsgiResponse(send_all)


def _check(state: ServerState, body: SamplingFields, plan: GenerationPlan) -> None:
    if plan.head.n > MAX_BEAMS:
        raise invalid("n", f"at most {MAX_BEAMS} beams are searched, got {plan.head.n}")
    if LogprobsMode(state.engine.info.logprobs_mode).are_logits:
        raise invalid(
            "use_beam_search", f"--logprobs-mode {state.engine.info.logprobs_mode} tells no log-probabilities"
        )
    asked = [name for name in BEAM_SEARCH["refused"] if getattr(body, name, None)]
    if body.repetition_penalty not in (None, 1):
        asked.append("repetition_penalty")
    if plan.grammar is not None or plan.new_calls() is not None:
        asked.append(plan.grammar_field)
    if asked:
        raise unsupported(asked[0], "with `use_beam_search` it is")
    note(IGNORED, *(name for name in BEAM_SEARCH["ignored"] if getattr(body, name) is not None))


@dataclass(frozen=True, kw_only=True, slots=True)
class Beam:
    """A prompt with one of its continuations."""

    prompt: Sequence[int]
    tokens: tuple[int, ...] = ()
    scores: tuple[wire.Logprobs, ...] = ()  # of the tokens
    logprob: float = 0.0  # of all of them
    has_ended: bool = False  # its last token is an end token

    def longer(self, found: ScoredToken, num_candidates: int, ends: Sequence[int]) -> list[Beam]:
        """The beam with each of the tokens that are most likely to come next."""
        assert found.scores is not None
        return [
            Beam(
                prompt=self.prompt,
                tokens=(*self.tokens, id),
                scores=(*self.scores, msgspec.structs.replace(found.scores, logprob=logprob, rank=rank)),
                logprob=self.logprob + logprob,
                has_ended=id in ends,
            )
            for rank, (id, logprob) in enumerate(found.scores.top(num_candidates), 1)
        ]


class BeamSearch:
    """The search of one HTTP request, for all of its prompts at once."""

    def __init__(self, state: ServerState, body: SamplingFields, plan: GenerationPlan) -> None:
        self.error: Exception | None = None
        self._state = state
        self._plan = plan
        self._width = plan.head.n
        self._penalty = 1.0 if body.length_penalty is None else body.length_penalty
        self._ends = () if body.ignore_eos else plan.model.eos_token_ids
        self._step: Generation | None = None
        self._num_cached = [0] * len(plan.prompts)

    def abort(self) -> None:
        """Ends the step that runs."""
        if self._step is not None:
            self._step.abort()

    async def run(self) -> Generation:
        """Searches, and returns a generation that has ended: `head.n` choices for each prompt, best first. Raises
        RequestError."""
        plan = self._plan
        beams = [[Beam(prompt=prompt)] for prompt in plan.prompts]
        ended: list[list[Beam]] = [[] for _ in beams]
        for step in range(max(plan.limits)):
            places = [place for place, limit in enumerate(plan.limits) if step < limit and beams[place]]
            if not places:
                break
            if plan.head.deadline is not None and time.monotonic() >= plan.head.deadline:
                self._state.metrics.observe_limit("deadline_running")
                break
            for place, longer in zip(places, await self._longer([beams[place] for place in places]), strict=True):
                ended[place] += [beam for beam in longer if beam.has_ended]
                going = (beam for beam in longer if not beam.has_ended)
                beams[place] = sorted(going, key=lambda beam: beam.logprob, reverse=True)[: self._width]
        found = [sorted([*over, *own], key=self._score, reverse=True) for over, own in zip(ended, beams, strict=True)]
        return self._generation([own[: self._width] for own in found])

    def _score(self, beam: Beam) -> float:
        length = float(len(beam.prompt) + len(beam.tokens) - beam.has_ended)
        return beam.logprob / math.pow(length, self._penalty)

    async def _longer(self, beams: Sequence[Sequence[Beam]]) -> list[list[Beam]]:
        """The continuations by one token of the beams of each prompt."""
        plan, num_candidates = self._plan, 2 * self._width
        prompts = [[*beam.prompt, *beam.tokens] for own in beams for beam in own]
        logprobs = max(num_candidates, plan.logprobs or 0)
        step = replace(plan, head=replace(plan.head, n=1), sampling=_MOST_LIKELY, has_own_id=True, shows_text=False)
        step = replace(step, prompts=prompts, limits=[1] * len(prompts), logprobs=logprobs, new_reasoning=lambda: None)
        self._step = await submit(self._state, step)
        try:
            await self._step.wait()
        finally:
            self.error = self._step.error
            self._step.abort()  # ends its timer, which would hold it
        choices = iter(self._step.choices)
        longer: list[list[Beam]] = []
        for place, own in enumerate(beams):
            found = [(beam, next(choices)) for beam in own]
            if not own[0].tokens:
                self._num_cached[place] = found[0][1].num_cached_tokens
            scored = [(beam, token) for beam, choice in found for token in choice.take().scored]
            longer.append([one for beam, token in scored for one in beam.longer(token, num_candidates, self._ends)])
        return longer

    def _generation(self, found: Sequence[Sequence[Beam]]) -> Generation:
        plan, state = self._plan, self._state
        shows_end = plan.sampling.include_stop  # as a token: it is never in the text
        shown_plan = replace(plan, sampling=replace(plan.sampling, include_stop=not shows_end))
        generation = Generation(state.engine, plan.head.id, stream=False, on_end=state.metrics.observe_end)
        outputs = []
        for place, beam in ((place, beam) for place, own in enumerate(found) for beam in own):
            choice = add_choice(generation, shown_plan, len(beam.prompt))
            choice.on_weight_version(state.engine.weight_version)
            shown = len(beam.tokens) - (beam.has_ended and not shows_end)
            reason = FinishReason.STOP if beam.has_ended else FinishReason.LENGTH
            fields: dict[str, Any] = {"logprobs": list(beam.scores[:shown])} if plan.logprobs is not None else {}
            fields["num_cached_tokens"] = self._num_cached[place]
            outputs.append(wire.Output("", list(beam.tokens[:shown]), reason.value, **fields))
        generation.complete(outputs)
        begun(generation, num_choices=plan.head.n, num_prompt_tokens=sum(map(len, plan.prompts)))
        return generation
