"""Clients that only `scripts/test --all` installs, for tests marked `clients`. Where one is missing, its tests skip."""

from __future__ import annotations

import os
from types import ModuleType

import pytest


def imported(module: str, *, package: str) -> ModuleType:
    """The module, or a skip of the test or file that asks for it."""
    return pytest.importorskip(module, reason=f"{package} is not installed: scripts/test --all installs it")


def imported_litellm() -> ModuleType:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks for a list of prices in the network
    return imported("litellm", package="litellm")
