"""The requests of a bench: prompts and output lengths, from random lengths, a trace or a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scripts.lab.load.lengths import Trace

# Common words: a prompt is ordinary text for any tokenizer.
_WORDS = (
    "the of and to in is was for on that by it with as at from his an be this are which have had not but all one "
    "they you her she there would their we him been has when who will more no if out so said what up its about "
    "into than them can only other new some could time these two may then do first any my now such like our over"
).split()


@dataclass(frozen=True)
class BenchRequest:
    """A request to send: a prompt as text or token ids, and the number of output tokens."""

    prompt: str | list[int]
    max_tokens: int
    arrival_s: float | None = None  # seconds after the start, if the workload has arrivals
    fields: dict[str, Any] = field(default_factory=dict)  # further fields of this body, such as a seed


def random_text(num_tokens: int, random: np.random.Generator) -> str:
    """About `num_tokens` tokens of text: one common word is one token of most vocabularies."""
    return " ".join(_WORDS[i] for i in random.integers(0, len(_WORDS), num_tokens))


def random_prompts(
    input_lens: np.ndarray, *, as_ids: bool, vocab_size: int, shared_prefix: int, random: np.random.Generator
) -> Sequence[str | list[int]]:
    """Prompts of the given lengths, all beginning with the same `shared_prefix` tokens.

    Lengths are exact for ids and approximate for text; the server's usage has the exact ones.
    """
    if as_ids:
        return random_ids(input_lens, vocab_size=vocab_size, shared_prefix=shared_prefix, random=random)
    prefix = random_text(shared_prefix, random) + " " if shared_prefix else ""
    return [prefix + random_text(int(n), random) for n in input_lens]


def random_ids(
    input_lens: np.ndarray, *, vocab_size: int, shared_prefix: int, random: np.random.Generator
) -> list[list[int]]:
    """As `random_prompts`, in token ids."""
    # Special tokens are at the end of Llama 3's vocabulary, so the last tenth is not used.
    top = max(vocab_size * 9 // 10, 1)
    prefix: list[int] = random.integers(0, top, shared_prefix).tolist()
    return [prefix + random.integers(0, top, int(n)).tolist() for n in input_lens]


def from_trace(trace: Trace, prompts: Sequence[str | list[int]]) -> list[BenchRequest]:
    """A request for each request of the trace, with its output length and arrival."""
    return [
        BenchRequest(prompt, int(output_len), float(arrival_s))
        for prompt, output_len, arrival_s in zip(prompts, trace.output_lens, trace.arrival_s, strict=True)
    ]


def from_file(path: Path, default_output_len: int | None) -> list[BenchRequest]:
    """A JSON lines file (or one JSON list) of objects with `prompt` and `max_tokens` (or `output_len`, `olen`).

    The fields of an optional object `fields` go into that request's body.

    Raises:
        ValueError: a line has no prompt, or no length without a default. The message names the line.
    """
    text = path.read_text()
    rows = (
        json.loads(text) if text.lstrip().startswith("[") else [json.loads(s) for s in text.splitlines() if s.strip()]
    )
    requests = []
    for number, row in enumerate(rows, 1):
        lengths = (row.get(key) for key in ("max_tokens", "output_len", "olen"))
        max_tokens = next((n for n in lengths if n is not None), default_output_len)
        if "prompt" not in row or max_tokens is None:
            raise ValueError(f"{path}, request {number}: needs 'prompt' and 'max_tokens' (or give --output-len)")
        requests.append(BenchRequest(row["prompt"], int(max_tokens), fields=row.get("fields", {})))
    return requests
