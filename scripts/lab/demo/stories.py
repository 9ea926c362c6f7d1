"""Short stories from a small grammar: a hero, a friend, a place, a thing, and one of a dozen plots.

Each plot is a list of beats, and each beat is a choice of sentences. A few hundred lines of text make more stories than
any training run reads. All are grammatical.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lab.demo.arithmetic import Turn
from scripts.lab.demo.phrasing import fill, typed

# Lists of words and sentences by name. `{They}`, `{them}`, `{their}` are the hero's.
TEXT: dict[str, Any] = json.loads((Path(__file__).parent / "story_text.json").read_text())


def _any(rng: random.Random, name: str) -> Any:
    return rng.choice(TEXT[name])


@dataclass(frozen=True)
class Character:
    """A character of a story, with its pronouns."""

    name: str  # "Mia", or "the fox" for a character without a name
    kind: str  # "girl", "boy", "fox", ...
    they: str
    them: str
    their: str


def character(rng: random.Random, kind: str | None = None, other_than: Character | None = None) -> Character:
    """A character of `kind`, or of any kind. Name and kind differ from those of `other_than`."""
    while True:
        chosen = kind or rng.choice(("girl", "boy", _any(rng, "animals"), _any(rng, "animals"), _any(rng, "fantastic")))
        female = chosen in ("girl", "princess") or (chosen not in ("boy", "king") and rng.random() < 0.5)
        name = rng.choice(TEXT["girls"] if female else TEXT["boys"])
        if other_than is None or (name != other_than.name and chosen != other_than.kind):
            pronouns = ("she", "her", "her") if female else ("he", "him", "his")
            return Character(name, chosen, *pronouns)


@dataclass(frozen=True)
class Story:
    """A story, with the parts that questions refer to."""

    text: str
    hero: Character
    friend: Character
    subject: str  # the topic of the plot: "a lost kite"


def _sentence(rng: random.Random, choices: tuple[str, ...], values: dict[str, str]) -> str:
    text = fill(rng, choices, **values)
    return text[0].upper() + text[1:]


def story(rng: random.Random) -> Story:
    """A story with two characters."""
    hero = character(rng)
    friend = character(rng, other_than=hero)
    values = {
        "hero": hero.name, "kind": hero.kind, "trait": _any(rng, "traits"), "place": _any(rng, "places"),
        "they": hero.they, "them": hero.them, "their": hero.their,
        "They": hero.they.capitalize(), "Their": hero.their.capitalize(),
        "friend": friend.name, "friend_kind": friend.kind, "friend_trait": _any(rng, "traits"),
        "thing": _any(rng, "things"), "color": _any(rng, "colors"), "food": _any(rng, "foods"),
        "time": _any(rng, "times"),
        "feeling": _any(rng, "feelings"), "weather": _any(rng, "weathers"), "hiding": _any(rng, "hiding"),
        "seed": _any(rng, "seeds"),
    }  # fmt: skip
    subject, beats = rng.choice(tuple(TEXT["plots"].items()))
    opening = _sentence(rng, TEXT["openings"], values)
    if subject != "a new friend":
        opening += " " + _sentence(rng, TEXT["friends"], values)
    middle = " ".join(_sentence(rng, beat, values) for beat in beats)
    ending = _any(rng, "endings") if rng.random() < 0.7 else ""
    paragraphs = "\n\n" if rng.random() < 0.3 else " "
    text = paragraphs.join(part for part in (opening, middle, ending) if part)
    return Story(text=text, hero=hero, friend=friend, subject=subject.format(**values))


def told(rng: random.Random) -> Turn:
    """A request and its story. Most requests name a topic."""
    made = story(rng)
    if rng.random() < 0.2:
        return typed(rng, _any(rng, "requests")), made.text
    hero, friend = made.hero, made.friend
    subject = rng.choice(
        (
            f"a {hero.kind}",
            f"a {hero.kind}",
            f"a {hero.kind}",
            f"a {hero.kind}",
            f"a {hero.kind} named {hero.name}",
            f"{hero.name}",
            f"{hero.name} the {hero.kind}",
            made.subject,
            f"a {hero.kind} and {made.subject}",
            f"a {hero.kind} and a {friend.kind}",
            f"{hero.name} and {friend.name}",
        )
    )
    return typed(rng, fill(rng, TEXT["about"], x=subject)), made.text


def told_again(rng: random.Random) -> Turn:
    """A request for another story, and the story."""
    return typed(rng, _any(rng, "next_requests")), story(rng).text
