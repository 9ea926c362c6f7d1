"""vLLM's parameters and results of a beam search. `server/api/request/beam_search.py` searches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.offline.arguments import LoRARequest
from scripts.offline.results import Logprobs, logprobs_of
from server.api.request.beam_search import MAX_BEAMS


@dataclass
class BeamSearchParams:
    """vLLM's parameters of a beam search. `length_penalty` is the power of the number of tokens, prompt included, that
    divides a beam's log-probability."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # without effect, because candidates are ranked by the model's own log-probabilities
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # without effect, because there are no stop strings
    skip_special_tokens: bool = True

    def fields(self) -> dict[str, Any]:
        """The fields of a request body. Raises ValueError if `beam_width` is out of range."""
        if not 1 <= self.beam_width <= MAX_BEAMS:
            raise ValueError(f"beam_width: 1 to {MAX_BEAMS}, not {self.beam_width}")
        same = {name: getattr(self, name) for name in ("max_tokens", "ignore_eos", "length_penalty")}
        beams = {"use_beam_search": True, "n": self.beam_width, "logprobs": 2 * self.beam_width}
        return {**same, **beams, "include_stop_str_in_output": True}


@dataclass(frozen=True, kw_only=True)
class BeamSearchSequence:
    """A prompt with one of its continuations."""

    tokens: list[int]
    logprobs: list[Logprobs] = field(default_factory=list)  # one for each token of the continuation
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str = "length"  # or "stop": it ends in an end-of-sequence token


@dataclass(frozen=True, kw_only=True)
class BeamSearchOutput:
    """The continuations of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def beams_of(
    answer: Mapping[str, Any], adapter: LoRARequest | None, decode: Callable[[Sequence[int]], str]
) -> BeamSearchOutput:
    """Reads the answer to a completion of one prompt. `decode` makes the text of token ids."""
    sequences = []
    for choice in answer["choices"]:
        tokens, logprobs = choice["prompt_token_ids"] + choice["token_ids"], logprobs_of(choice["logprobs_by_id"]) or []
        total = sum(place[id].logprob for id, place in zip(choice["token_ids"], logprobs, strict=True))
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                logprobs=logprobs,
                lora_request=adapter,
                cum_logprob=total,
                text=decode(tokens),
                finish_reason=choice["finish_reason"],
            )
        )
    return BeamSearchOutput(sequences=sequences)
