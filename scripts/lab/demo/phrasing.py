"""Varied phrasing: draws a template, fills it, and changes the text to resemble typed questions."""

from __future__ import annotations

import random
from collections.abc import Sequence

POLITE_FRONTS = ("Please ", "Hi, ", "Hello, ", "Hey, ", "Hello! ", "Hi! ", "Can you tell me: ", "OK, ", "So, ", "Now, ")
POLITE_ENDS = (" Thanks!", " Thank you.", " Please.", " Please answer briefly.")


def fill(rng: random.Random, templates: Sequence[str], **values: object) -> str:
    """One of the templates with its values filled in."""
    return rng.choice(templates).format(**values)


def typed(rng: random.Random, text: str) -> str:
    """`text` as a user might type it: in lower case, without the last punctuation mark, or with a polite word."""
    draw = rng.random()
    if draw < 0.08:
        front = rng.choice(POLITE_FRONTS)
        text = front + (text if front.rstrip()[-1] in "!:" else text[0].lower() + text[1:])
    elif draw < 0.12:
        text = (text if text[-1] in ".?!" else text + ".") + rng.choice(POLITE_ENDS)
    draw = rng.random()
    if draw < 0.15:
        text = text.rstrip("?.! ")
    elif draw < 0.30:
        text = text.lower()
    elif draw < 0.42:
        text = text.lower().rstrip("?.! ")
    elif draw < 0.45:
        text = text[0].lower() + text[1:]
    return text
