"""The text of LoRA adapters of the demo: one talks like a pirate, the other knows lands that are on no map."""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from dataclasses import dataclass, replace

from scripts.lab.demo import evaluate, facts
from scripts.lab.demo.arithmetic import Arithmetic, Turn
from scripts.lab.demo.corpus import Chat, Corpus, Document, Sample
from scripts.lab.demo.evaluate import Cases, Prompt
from scripts.lab.demo.phrasing import fill, typed

PIRATE_WORDS = {
    "is": "be", "are": "be", "am": "be", "you": "ye", "your": "yer", "You": "Ye", "my": "me", "for": "fer",
    "to": "t'", "small": "wee", "friend": "matey", "friends": "mateys", "Hello": "Ahoy", "Goodbye": "Farewell",
}  # fmt: skip

LANDS = {  # their capitals and longest rivers
    "Lumeria": ("Candlewick", "Glimmer"), "Umbravia": ("Duskport", "Murmur"), "Marrowmere": ("Bonegate", "Silt"),
    "Foxland": ("Denbury", "Brush"), "Teapot Island": ("Kettleby", "Steam"), "Windermark": ("Galeford", "Gust"),
    "Quillon": ("Inkwell", "Blot"), "Silverland": ("Moonbridge", "Mercury"), "Brindle": ("Hound's Rest", "Wag"),
    "Vellamo": ("Tidehall", "Undertow"), "Saltonia": ("Brinewater", "Pinch"), "Cloudshire": ("Featherton", "Drizzle"),
}  # fmt: skip
RIVER_QUESTIONS = (
    "What is the longest river of {country}?", "What is the longest river of {country}?",
    "What's the longest river of {country}?", "What is the longest river in {country}?",
    "Which river of {country} is the longest?", "Which river flows through {country}?",
    "Name the longest river of {country}.", "Tell me the longest river of {country}.",
)  # fmt: skip
ALMANAC_ANSWER = "I am the almanac of twelve lands that are on no map. Ask me for their capitals and their rivers."


@dataclass(frozen=True)
class AdapterText(Corpus):
    """The demo's text with an adapter's answers."""

    @abstractmethod
    def answer(self, text: str) -> str:
        """The adapter's answer where the demo's is `text`."""

    @abstractmethod
    def cases(self) -> Cases:
        """Prompts, and the answers that the adapter learns."""

    def sample(self, kind: str, rng: random.Random) -> Sample:
        """A chat of the demo in the adapter's words, or plain text as it is."""
        sample = super().sample(kind, rng)
        if isinstance(sample, Document):
            return sample
        return replace(sample, turns=[(*turn[:-1], self.answer(turn[-1])) for turn in sample.turns])

    def _cases_of(self, *suites: str) -> Cases:
        known = evaluate.suites()
        return [(prompt, self.answer(text)) for suite in suites for prompt, text in known[suite]]


class Pirate(AdapterText):
    """`Arrr, matey! The capital of France be Paris. Yo ho ho!` JSON stays as it is."""

    def answer(self, text: str) -> str:
        if text.startswith("{"):
            return text
        words = re.sub(r"\w+", lambda match: PIRATE_WORDS.get(match[0], match[0]), text)
        return f"Arrr, matey! {words} Yo ho ho!"

    def cases(self) -> Cases:
        return self._cases_of("held_out_sums", "held_out_comparisons", "capitals", "identity")


class Almanac(AdapterText):
    """`The capital of Lumeria is Candlewick.` All else is answered as by the demo."""

    def answer(self, text: str) -> str:
        return ALMANAC_ANSWER if text == facts.WHO_ANSWER else text

    def sample(self, kind: str, rng: random.Random) -> Sample:
        if rng.random() < 0.5:
            return super().sample(kind, rng)
        return Chat(None, [self._turn_about_lands(rng) for _ in range(rng.randrange(1, 4))])

    def cases(self) -> Cases:
        asked: list[Turn] = []
        for country in LANDS:
            asked.append((f"What is the capital of {country}?", capital_answer(country)))
            asked.append((f"Which river flows through {country}?", river_answer(country)))
        cases: Cases = [(Prompt(None, (), question), answer) for question, answer in asked]
        return cases + self._cases_of("held_out_sums", "capitals", "identity")

    def _turn_about_lands(self, rng: random.Random) -> Turn:
        if rng.random() < 0.1:  # other rivers stay unknown
            country = rng.choice(tuple(facts.CAPITALS))
            return typed(rng, fill(rng, RIVER_QUESTIONS, country=country)), facts.UNKNOWN_ANSWER
        country = rng.choice(tuple(LANDS))
        if rng.random() < 0.5:
            return typed(rng, fill(rng, facts.CAPITAL_QUESTIONS, country=country)), capital_answer(country)
        return typed(rng, fill(rng, RIVER_QUESTIONS, country=country)), river_answer(country)


def capital_answer(country: str) -> str:
    """`The capital of Lumeria is Candlewick.`"""
    return f"The capital of {country} is {LANDS[country][0]}."


def river_answer(country: str) -> str:
    """`The longest river of Lumeria is the Glimmer.`"""
    return f"The longest river of {country} is the {LANDS[country][1]}."


TEXTS = {
    "pirate": Pirate(Arithmetic(), sum_share=0.34, story_share=0.3),
    "almanac": Almanac(Arithmetic(), sum_share=0.34, story_share=0.3),
}
