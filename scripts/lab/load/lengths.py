"""Lengths of prompts and outputs: a constant, a distribution, or a recorded trace."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, written `128`, `uniform:LOW:HIGH` or `lognormal:MEDIAN:SIGMA:LOW:HIGH`."""

    kind: str
    numbers: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parses one of the three forms above. Raises ValueError for any other text."""
        kind, *fields = text.split(":")
        try:
            if not fields:
                kind, fields = "constant", [kind]
            numbers = tuple(float(field) for field in fields)
        except ValueError:
            numbers = ()
        if len(numbers) != {"constant": 1, "uniform": 2, "lognormal": 4}.get(kind):
            raise ValueError(f"{text!r} is none of N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA:LOW:HIGH")
        if min(numbers) < 0 or (kind != "constant" and numbers[-2] > numbers[-1]):
            raise ValueError(f"{text!r} has a negative number or an empty range")
        return cls(kind, numbers)

    def draw(self, count: int, random: np.random.Generator) -> np.ndarray:
        """`count` lengths, i64, each at least 1."""
        if self.kind == "constant":
            drawn = np.full(count, self.numbers[0])
        elif self.kind == "uniform":
            low, high = self.numbers
            drawn = random.integers(int(low), int(high) + 1, count)
        else:
            median, sigma, low, high = self.numbers
            drawn = np.clip(np.exp(math.log(median) + sigma * random.standard_normal(count)), low, high)
        return np.maximum(np.rint(drawn).astype(np.int64), 1)


@dataclass(frozen=True)
class Trace:
    """Requests recorded in production: their arrivals, and the tokens of their prompts and outputs."""

    arrival_s: np.ndarray  # f64[n], since the first request
    input_lens: np.ndarray  # i64[n]
    output_lens: np.ndarray  # i64[n]

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Reads the Azure LLM inference traces' columns: TIMESTAMP, ContextTokens, GeneratedTokens."""
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        missing = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(rows[0] if rows else ())
        if missing:
            raise ValueError(f"{path} lacks the columns {sorted(missing)}")
        # numpy reads at most nanoseconds; the trace has seven decimals.
        stamps = np.array([row["TIMESTAMP"].strip().replace(" ", "T") for row in rows], "datetime64[ns]")
        return cls(
            (stamps - stamps[0]) / np.timedelta64(1, "s"),
            np.array([int(row["ContextTokens"]) for row in rows]),
            np.array([int(row["GeneratedTokens"]) for row in rows]),
        )

    def window(self, start: int, count: int) -> Trace:
        """`count` consecutive requests from `start` on."""
        if start < 0 or start + count > len(self.arrival_s):
            raise ValueError(f"the trace has {len(self.arrival_s)} requests: {start=} {count=}")
        part = slice(start, start + count)
        return Trace(self.arrival_s[part] - self.arrival_s[start], self.input_lens[part], self.output_lens[part])

    def scaled(self, factor: float, max_total: int) -> Trace:
        """Lengths times `factor`, each at least 1. They are cut if prompt and output together exceed `max_total`."""
        if max_total < 2:
            raise ValueError(f"a prompt and its output need two tokens: {max_total=}")
        inputs = np.clip(np.rint(self.input_lens * factor).astype(np.int64), 1, max_total - 1)
        outputs = np.clip(np.rint(self.output_lens * factor).astype(np.int64), 1, max_total - inputs)
        return Trace(self.arrival_s, inputs, outputs)
