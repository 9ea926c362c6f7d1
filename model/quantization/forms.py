"""The names of the 8-bit forms. No jax here: configs and options name a form without computing."""

from __future__ import annotations

from enum import StrEnum


class EightBit(StrEnum):
    """The type of an 8-bit kernel."""

    INT8 = "int8"
    FP8 = "fp8"  # e4m3, finite values only

    @property
    def dtype(self) -> str:
        """As numpy and jax name it."""
        return "int8" if self is EightBit.INT8 else "float8_e4m3fn"

    @property
    def largest(self) -> float:
        """The kernel's value for the largest weight of a row."""
        return 127.0 if self is EightBit.INT8 else 448.0
