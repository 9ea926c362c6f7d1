"""A fault that is planted in a kernel that is executed as PTX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scripts.lab.ptx.cases import Shape


@dataclass(frozen=True, kw_only=True)
class Planted:
    shape: str | Shape  # its name among the steps of the laboratory
    expected: str  # is in the report; empty: nothing is reported
    patches: dict[tuple[Any, str], Any] = field(default_factory=dict)
    edit: Callable[[str], str] = str  # of the PTX
