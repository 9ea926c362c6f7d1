"""Questions whose answers can be checked: sums, comparisons, counting, neighbours, parity.

Sums and comparisons of the held-out pairs are never drawn, in either order. They measure learning, not memorisation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from scripts.lab.demo.phrasing import fill, typed

LIMIT = 100  # operands are 0 .. LIMIT - 1
NUM_HELD_OUT = 200
HELD_OUT_SEED = 20240418  # the split does not depend on the seed of the training run

SUM_QUESTIONS = (
    "What is {a} + {b}?",
    "What is {a} + {b}?",
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "What's {a} + {b}?",
    "What's {a} plus {b}?",
    "What does {a} + {b} make?",
    "How much is {a} + {b}?",
    "How much is {a} plus {b}?",
    "How much do {a} and {b} make?",
    "What is the sum of {a} and {b}?",
    "Give me the sum of {a} and {b}.",
    "Add {a} and {b}.",
    "Add {a} to {b}.",
    "Add up {a} and {b}.",
    "Can you add {a} and {b}?",
    "Could you add {a} and {b} for me?",
    "Can you tell me what {a} + {b} is?",
    "Do you know what {a} plus {b} is?",
    "Calculate {a} + {b}.",
    "Compute {a} + {b}.",
    "Solve {a} + {b}.",
    "Tell me {a} + {b}.",
    "{a} + {b}",
    "{a} + {b} = ?",
    "{a} + {b} =",
    "{a} + {b}?",
    "{a}+{b}",
    "{a}+{b}=?",
    "What is {a}+{b}?",
    "{a} plus {b}?",
)
NEXT_SUMS = ("And {a} + {b}?", "And {a} plus {b}?", "What about {a} + {b}?", "How about {a} + {b}?", "Now {a} + {b}.")
THINGS = ("apples", "books", "coins", "eggs", "pens", "shells", "stones", "cards", "stamps", "nuts", "cups", "balls")
SUM_STORIES = (
    "I have {a} {things} and get {b} more. How many {things} do I have?",
    "I had {a} {things}. Then I found {b} {things}. How many {things} are there now?",
    "There are {a} {things} in a box and {b} {things} in a bag. How many {things} are there?",
    "If I have {a} {things} and you give me {b}, how many {things} do I have?",
)

LARGER_QUESTIONS = (
    "Which is larger, {a} or {b}?",
    "Which is larger, {a} or {b}?",
    "Which is larger: {a} or {b}?",
    "Which number is larger, {a} or {b}?",
    "Which of {a} and {b} is larger?",
    "Which is bigger, {a} or {b}?",
    "Which is greater, {a} or {b}?",
    "Which number is bigger, {a} or {b}?",
    "What is larger, {a} or {b}?",
    "What is bigger, {a} or {b}?",
    "What's bigger: {a} or {b}?",
    "Is {a} or {b} larger?",
    "Is {a} or {b} the larger number?",
    "Is {a} or {b} bigger?",
    "Compare {a} and {b}.",
    "Tell me which is larger, {a} or {b}.",
    "Tell me the larger of {a} and {b}.",
)
NEXT_LARGER = ("And {a} or {b}?", "What about {a} or {b}?", "How about {a} and {b}?", "And of {a} and {b}?")
SMALLER_QUESTIONS = (
    "Which is smaller, {a} or {b}?",
    "Which number is smaller, {a} or {b}?",
    "Which of {a} and {b} is smaller?",
    "Which is less, {a} or {b}?",
    "What is smaller, {a} or {b}?",
    "Is {a} or {b} smaller?",
    "Tell me the smaller of {a} and {b}.",
)

OTHER_OPERATIONS = {
    "-": ("What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b}", "{a}-{b}", "Subtract {b} from {a}."),
    "*": (
        "What is {a} * {b}?", "What is {a} times {b}?", "{a} * {b}", "{a}*{b}", "Multiply {a} by {b}.",
        "What is {a} x {b}?", "What is the product of {a} and {b}?", "How much is {a} times {b}?",
    ),
    "/": ("What is {a} / {b}?", "{a} / {b}", "{a}/{b}", "Divide {a} by {b}.", "What is {a} divided by {b}?"),
}  # fmt: skip

COUNT_UP = (
    "Count from {a} to {b}.",
    "Count from {a} to {b}.",
    "Count from {a} up to {b}.",
    "Can you count from {a} to {b}?",
    "Please count from {a} to {b}.",
    "List the numbers from {a} to {b}.",
    "Write the numbers from {a} to {b}.",
    "Count up from {a} to {b}.",
)
COUNT_TO = ("Count to {b}.", "Count up to {b}.", "Can you count to {b}?")
COUNT_DOWN = ("Count down from {a} to {b}.", "Count backwards from {a} to {b}.", "Count from {a} down to {b}.")
AFTER = (
    "What comes after {a}?",
    "What number comes after {a}?",
    "Which number follows {a}?",
    "What is next after {a}?",
)
BEFORE = ("What comes before {a}?", "What number comes before {a}?", "Which number is just before {a}?")
PARITY = (
    "Is {a} even or odd?",
    "Is {a} odd or even?",
    "Is the number {a} even or odd?",
    "Is {a} an even number?",
    "Is {a} odd?",
    "Is {a} even?",
)

# The user's message and the model's answer. With a call: the user's message, the call, the tool's result, the answer.
Turn = tuple[str, ...]


def held_out_pairs() -> list[tuple[int, int]]:
    """The unordered pairs (smaller first, never equal) that no training text adds or compares."""
    pairs = [(a, b) for a in range(LIMIT) for b in range(a + 1, LIMIT)]
    return random.Random(HELD_OUT_SEED).sample(pairs, NUM_HELD_OUT)


def sum_answer(a: int, b: int) -> str:
    """`47 + 35 = 82.`"""
    return f"{a} + {b} = {a + b}."


def larger_answer(a: int, b: int) -> str:
    """`57 is larger than 31.`"""
    if a == b:
        return f"They are equal: both are {a}."
    return f"{max(a, b)} is larger than {min(a, b)}."


def smaller_answer(a: int, b: int) -> str:
    """`31 is smaller than 57.`"""
    if a == b:
        return f"They are equal: both are {a}."
    return f"{min(a, b)} is smaller than {max(a, b)}."


def count_answer(first: int, last: int) -> str:
    """`4, 5, 6, 7.`, or downwards if `last` is smaller."""
    step = 1 if last >= first else -1
    return ", ".join(str(n) for n in range(first, last + step, step)) + "."


@dataclass(frozen=True)
class Arithmetic:
    """Draws questions and answers, avoiding the held-out pairs."""

    held_out: frozenset[tuple[int, int]] = field(default_factory=lambda: frozenset(held_out_pairs()))

    def pair(self, rng: random.Random) -> tuple[int, int]:
        """Two numbers whose sum is not held out."""
        while True:
            a, b = rng.randrange(LIMIT), rng.randrange(LIMIT)
            if (min(a, b), max(a, b)) not in self.held_out:
                return a, b

    def sum(self, rng: random.Random) -> Turn:
        """A sum, sometimes in a story."""
        a, b = self.pair(rng)
        if rng.random() < 0.04:
            things = rng.choice(THINGS)
            answer = f"{a} + {b} = {a + b}. There are {a + b} {things}."
            return fill(rng, SUM_STORIES, a=a, b=b, things=things), answer
        return typed(rng, fill(rng, SUM_QUESTIONS, a=a, b=b)), sum_answer(a, b)

    def next_sum(self, rng: random.Random) -> Turn:
        """A sum that goes on with a conversation."""
        a, b = self.pair(rng)
        return typed(rng, fill(rng, NEXT_SUMS, a=a, b=b)), sum_answer(a, b)

    def larger(self, rng: random.Random) -> Turn:
        """Which of two numbers is larger."""
        a, b = self._pair_to_compare(rng)
        return typed(rng, fill(rng, LARGER_QUESTIONS, a=a, b=b)), larger_answer(a, b)

    def next_larger(self, rng: random.Random) -> Turn:
        """Which of two numbers is larger, going on with a conversation."""
        a, b = self._pair_to_compare(rng)
        return typed(rng, fill(rng, NEXT_LARGER, a=a, b=b)), larger_answer(a, b)

    def smaller(self, rng: random.Random) -> Turn:
        """Which of two numbers is smaller."""
        a, b = self._pair_to_compare(rng)
        return typed(rng, fill(rng, SMALLER_QUESTIONS, a=a, b=b)), smaller_answer(a, b)

    def _pair_to_compare(self, rng: random.Random) -> tuple[int, int]:
        """A pair. In about half of them the numbers differ by at most 12: these comparisons are the hardest."""
        while rng.random() < 0.5:
            a = rng.randrange(LIMIT)
            b = min(max(a + rng.randrange(-12, 13), 0), LIMIT - 1)
            if (min(a, b), max(a, b)) not in self.held_out and (a != b or rng.random() < 0.3):
                return a, b
        return self.pair(rng)

    def count(self, rng: random.Random) -> Turn:
        # Users mostly count from 1 or another small number.
        first = rng.choices((1, rng.randrange(12), rng.randrange(LIMIT)), weights=(2, 3, 5))[0]
        last = min(first + rng.randrange(2, 14), LIMIT)
        draw = rng.random()
        if draw < 0.2:
            return typed(rng, fill(rng, COUNT_DOWN, a=last, b=first)), count_answer(last, first)
        if draw < 0.3:
            last = rng.randrange(3, 21)
            return typed(rng, fill(rng, COUNT_TO, b=last)), count_answer(1, last)
        return typed(rng, fill(rng, COUNT_UP, a=first, b=last)), count_answer(first, last)

    def neighbour(self, rng: random.Random) -> Turn:
        """The number after or before another."""
        a = rng.randrange(1, LIMIT)
        if rng.random() < 0.5:
            return typed(rng, fill(rng, AFTER, a=a)), f"After {a} comes {a + 1}."
        return typed(rng, fill(rng, BEFORE, a=a)), f"Before {a} comes {a - 1}."

    def parity(self, rng: random.Random) -> Turn:
        """Whether a number is odd or even."""
        a = rng.randrange(LIMIT)
        return typed(rng, fill(rng, PARITY, a=a)), f"{a} is {'odd' if a % 2 else 'even'}."

    def lines(self, rng: random.Random, count: int) -> str:
        """Sums without words, one per line: the densest training text, and the form of completions of `12 + 9 =`."""
        pairs = [self.pair(rng) for _ in range(count)]
        return "".join(f"{a} + {b} = {a + b}\n" for a, b in pairs)
