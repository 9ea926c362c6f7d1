"""Beam search on the host: each step of the search is one token of the engine for all beams."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from batcher.request import MAX_LOGPROBS
from scripts.offline.arguments import LoRARequest, SamplingParams
from scripts.offline.results import Logprobs, RequestOutput


@dataclass
class BeamSearchParams:
    """vLLM's parameters of a beam search. `length_penalty` is the power of an answer's length that divides its
    log-probability."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # without effect, because candidates are ranked by the model's own log-probabilities
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # without effect, because there are no stop strings
    skip_special_tokens: bool = True


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


@dataclass(frozen=True)
class BeamSearch:
    """A beam search for several prompts at once.

    Args:
        generate: continues token ids, as `LLM.generate`.
        decode: the text of token ids.

    Raises:
        ValueError: `beam_width` is out of range.
    """

    generate: Callable[..., list[RequestOutput]]
    decode: Callable[..., str]
    params: BeamSearchParams
    eos_token_ids: Collection[int]

    def __post_init__(self) -> None:
        if not 1 <= self.params.beam_width <= MAX_LOGPROBS // 2:
            raise ValueError(f"beam_width: 1 to {MAX_LOGPROBS // 2}, not {self.params.beam_width}")

    def run(
        self, bodies: Sequence[Mapping[str, Any]], adapters: Sequence[LoRARequest | None]
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of each prompt, given as fields of request bodies with lists of ids. Raises
        RefusedError if one does not fit."""
        # Twice as many candidates as beams: half of them may end.
        one = SamplingParams(max_tokens=1, temperature=0, logprobs=2 * self.params.beam_width, detokenize=False)
        beams = [
            [BeamSearchSequence(tokens=body["prompt"], lora_request=adapter)]
            for body, adapter in zip(bodies, adapters, strict=True)
        ]
        ended: list[list[BeamSearchSequence]] = [[] for _ in bodies]
        for _ in range(self.params.max_tokens):
            asked = [(body, beam) for body, own in zip(bodies, beams, strict=True) for beam in own]
            prompts = [{"prompt_token_ids": beam.tokens, "cache_salt": body.get("cache_salt")} for body, beam in asked]
            results = iter(self.generate(prompts, one, lora_request=[beam.lora_request for _, beam in asked]))
            for place, own in enumerate(beams):
                longer = [after for beam in own for after in _longer(beam, next(results))]
                ended[place] += [replace(beam, finish_reason="stop") for beam in longer if self._ends(beam)]
                beams[place] = self._best([beam for beam in longer if not self._ends(beam)])
        return [self._output([*over, *cut]) for over, cut in zip(ended, beams, strict=True)]

    def _ends(self, beam: BeamSearchSequence) -> bool:
        return not self.params.ignore_eos and beam.tokens[-1] in self.eos_token_ids

    def _best(self, beams: Sequence[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=self._score, reverse=True)[: self.params.beam_width]

    def _score(self, beam: BeamSearchSequence) -> float:
        return beam.cum_logprob / max(1, len(beam.logprobs)) ** self.params.length_penalty

    def _output(self, found: Sequence[BeamSearchSequence]) -> BeamSearchOutput:
        decode = partial(self.decode, skip_special_tokens=self.params.skip_special_tokens)
        return BeamSearchOutput(sequences=[replace(beam, text=decode(beam.tokens)) for beam in self._best(found)])


def _longer(beam: BeamSearchSequence, result: RequestOutput) -> list[BeamSearchSequence]:
    """The beam with each of the tokens that may come next."""
    (found,) = result.outputs[0].logprobs or ({},)
    return [
        replace(
            beam,
            tokens=[*beam.tokens, token],
            logprobs=[*beam.logprobs, found],
            cum_logprob=beam.cum_logprob + own.logprob,
        )
        for token, own in found.items()
    ]
