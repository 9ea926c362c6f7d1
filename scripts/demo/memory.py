"""Turns whose answers stand in the chat: repeating what was said, and remembering a name.

They are short, and teach to look back for a word: stories need the same to keep to their heroes.
"""

from __future__ import annotations

import random

from scripts.demo.phrasing import Turn, fill, typed
from scripts.demo.story_text import ANIMALS, BOYS, COLORS, FANTASTIC, FOODS, GIRLS, THINGS, TRAITS

REPEAT = (
    "Repeat: {x}.", "Repeat after me: {x}.", "Say: {x}.", "Please repeat: {x}.", "Repeat these words: {x}.",
    "Write: {x}.", "Say this again: {x}.", "Can you repeat this? {x}.",
)  # fmt: skip
INTRODUCTIONS = (
    "My name is {x}.", "My name is {x}.", "I am {x}.", "Hello, I am {x}.", "Hi, my name is {x}.", "Call me {x}.",
    "Hello! My name is {x}.", "You can call me {x}.",
)  # fmt: skip
NAME_QUESTIONS = ("What is my name?", "What is my name?", "Do you know my name?", "Who am I?", "What's my name?")
NO_NAME_ANSWER = "You have not told me your name."
WORDS = (*ANIMALS, *FANTASTIC, *THINGS, *COLORS, *FOODS, *TRAITS, *GIRLS, *BOYS)


def repeat(rng: random.Random) -> Turn:
    words = [rng.choice(WORDS) for _ in range(rng.randrange(1, 6))]
    said = rng.choice((" ", ", ")).join(words)
    return Turn(fill(rng, REPEAT, x=said), said + ".", tuple(dict.fromkeys(words)))


def introduction(rng: random.Random, name: str) -> Turn:
    return Turn(typed(rng, fill(rng, INTRODUCTIONS, x=name)), f"Hello, {name}! What can I do for you?", (name,))


def name_question(rng: random.Random, name: str | None) -> Turn:
    question = typed(rng, rng.choice(NAME_QUESTIONS))
    return Turn(question, NO_NAME_ANSWER) if name is None else Turn(question, f"Your name is {name}.", (name,))


def some_name(rng: random.Random) -> str:
    return rng.choice(GIRLS + BOYS)
