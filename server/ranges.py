"""The ranges of sampling fields: those of a request's own and those of a checkpoint's defaults."""

from __future__ import annotations

TEMPERATURES = (0, 2)
TOP_PS = (0, 1)  # 0 itself is outside
MIN_PS = (0, 1)
LEAST_TOP_K = -1  # -1 and 0: off
REPETITION_PENALTIES = (1e-3, 1e3)  # the device divides float32 logits by it: far from 1 nothing finite is left
