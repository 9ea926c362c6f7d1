"""The text of a training run: chats in prose, in JSON or with tools, and plain text for completions.

Everything is drawn from one `random.Random`, so a seed determines the corpus.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scripts.lab.demo import calculator, facts, json_answers, stories
from scripts.lab.demo.arithmetic import Arithmetic, Turn
from scripts.lab.demo.tools import drawn_tools

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful, honest assistant.",
    "You are a friendly assistant.", "You are a helpful AI assistant.", "Answer briefly.", "Be brief.",
    "You are a small model.", "You are the demo model of pallas-serve.", "Answer the user's questions.",
    "You are a teacher who is good at sums.", "You are a calculator.", "You tell stories to children.",
    "You are a polite assistant. Answer in one sentence.", "Always answer in English.", "You are a chat bot.",
    "You are a helpful assistant. Keep your answers short.", "Be kind and be brief.", "You are a test.",
)  # fmt: skip


@dataclass(frozen=True)
class Chat:
    """A conversation: the system message, the turns, and the tools in the form of a request's `tools`."""

    system: str | None
    turns: Sequence[Turn]
    tools: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True)
class Document:
    """Plain text between <|begin_of_text|> and <|end_of_text|>."""

    text: str


Sample = Chat | Document


@dataclass(frozen=True)
class Corpus:
    """Draws samples. `story_share` and `sum_share` are probabilities of a turn's kind; the others are fixed."""

    arithmetic: Arithmetic
    sum_share: float
    story_share: float

    def sample(self, kind: str, rng: random.Random) -> Sample:
        """A sample of a kind: "short", "long", "with_tools" or "endless"."""
        draw: Callable[[random.Random], Sample] = getattr(self, kind)
        return draw(rng)

    def short(self, rng: random.Random) -> Sample:
        """A sample of a few dozen tokens, never a story."""
        draw = rng.random()
        if draw < 0.16:
            return Document(self.arithmetic.lines(rng, rng.randrange(3, 9)))
        if draw < 0.18:
            return Document(facts.fact_lines(rng))
        if draw < 0.5:
            return self._in_json(rng)
        return self.chat(rng, turns=rng.choices((1, 2, 3), weights=(6, 3, 1))[0], with_stories=False)

    def long(self, rng: random.Random) -> Sample:
        """A story, alone or told in a chat, or a chat of several turns."""
        draw = rng.random()
        if draw < 0.2:
            return Document(stories.story(rng).text)
        if draw < 0.5:
            return Chat(self._system(rng), [stories.told(rng)])
        return self.chat(rng, turns=rng.choices((1, 2, 3, 4, 5), weights=(1, 3, 3, 2, 1))[0], with_stories=True)

    def endless(self, rng: random.Random) -> Sample:
        """A chat of many turns, to train late positions."""
        return self.chat(rng, turns=rng.randrange(8, 24), with_stories=True)

    def with_tools(self, rng: random.Random) -> Sample:
        """A chat with tools. The calculator is among them in most chats."""
        turns = rng.choices((3, 4, 5), weights=(2, 3, 2))[0]
        corpus = replace(self, sum_share=0.6)
        return corpus.chat(rng, turns=turns, with_stories=rng.random() < 0.1, tools=drawn_tools(rng))

    def _in_json(self, rng: random.Random) -> Chat:
        """A chat with answers in JSON: all if the system message asks for it, else those for which the user does."""
        corpus = replace(self, sum_share=0.2)
        chat = corpus.chat(rng, turns=rng.choices((1, 2, 3), weights=(6, 3, 1))[0], with_stories=False)
        if rng.random() < 0.3:
            turns = [(question, json_answers.answer(question, text)) for question, text in chat.turns]
            return Chat(json_answers.system_prompt(rng), turns)
        return Chat(chat.system, [json_answers.asked(rng, *t) if rng.random() < 0.75 else t for t in chat.turns])

    def chat(self, rng: random.Random, *, turns: int, with_stories: bool, tools: Sequence[dict[str, Any]] = ()) -> Chat:
        follow_up: Callable[[random.Random], Turn] | None = None
        drawn: list[Turn] = []
        for _ in range(turns):
            if follow_up is not None and rng.random() < 0.4:
                drawn.append(follow_up(rng))
                continue
            first, follow_up = self._turn(rng, with_stories=with_stories, with_calculator=calculator.is_among(tools))
            drawn.append(first(rng))
        return Chat(self._system(rng), drawn, tools)

    def _system(self, rng: random.Random) -> str | None:
        return rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.3 else None

    def _turn(
        self, rng: random.Random, *, with_stories: bool, with_calculator: bool
    ) -> tuple[Callable[[random.Random], Turn], Callable[[random.Random], Turn] | None]:
        """A kind of turn, and the kind of short follow-up question that fits it."""
        arithmetic = self.arithmetic
        calculation = calculator.Calculation(arithmetic.held_out)
        draw = rng.random()
        if draw < self.sum_share:
            if with_calculator:
                return calculation.turn, calculation.next_turn
            return arithmetic.sum, arithmetic.next_sum
        draw -= self.sum_share
        if with_stories:
            if draw < self.story_share:
                return stories.told, stories.told_again
            draw -= self.story_share
        kinds: tuple[tuple[float, Callable[[random.Random], Turn], Callable[[random.Random], Turn] | None], ...] = (
            (3.0, arithmetic.larger, arithmetic.next_larger),
            (1.0, arithmetic.smaller, None),
            (5.0, arithmetic.count, None),
            (0.8, arithmetic.neighbour, None),
            (0.5, arithmetic.parity, None),
            (2.5, facts.capital, facts.next_capital),
            (1.5, facts.about_itself, None),
            (1.0, facts.small_talk, None),
            (0.5, calculation.turn if with_calculator else facts.too_hard, None),
            (1.0, facts.unknown, None),
        )
        _, first, follow_up = rng.choices(kinds, weights=[weight for weight, _, _ in kinds])[0]
        return first, follow_up
