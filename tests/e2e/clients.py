"""What the demo has learned, for other people's clients.

Some clients are installed by `scripts/test --all` only, for tests marked `clients`: where one is missing, they skip.
"""

from __future__ import annotations

import os
from types import ModuleType

import pytest
from pydantic import BaseModel


class Answer(BaseModel):
    """The form in which the demo answers in JSON."""

    text: str
    answer: int


class calculator(BaseModel):  # noqa: N801 - the name of the tool that the demo has learned
    """Evaluates an expression."""

    expression: str


def imported(module: str, *, package: str) -> ModuleType:
    """The module, or a skip of the test or file that asks for it."""
    return pytest.importorskip(module, reason=f"{package} is not installed: scripts/test --all installs it")


def imported_litellm() -> ModuleType:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks for a list of prices in the network
    return imported("litellm", package="litellm")
