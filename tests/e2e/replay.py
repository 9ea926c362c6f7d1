"""Requests of real lengths on the demo's context, and their tokens from an engine driven without threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from batcher.engine import Engine
from batcher.request import Request, RequestOutput, SamplingParams
from scripts.building.runner import Built
from scripts.lab.load.lengths import Lengths

LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512, "seed": 0}
NUM_REQUESTS = 32


def drawn_lengths(count: int, max_total: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts with a long tail, outputs short and long apart, as in recorded traces of chats."""
    random = np.random.default_rng(7)
    inputs = Lengths.parse(f"lognormal:100:0.9:1:{max_total - 70}").draw(count, random)
    short = random.random(count) < 0.6
    outputs = np.where(
        short,
        Lengths.parse("lognormal:9:0.6:1:69").draw(count, random),
        Lengths.parse("uniform:36:48").draw(count, random),
    )
    return inputs, outputs


def make_requests(max_model_len: int, vocab_size: int) -> list[Request]:
    """One in two greedy, one in four drawn, one in four drawn with penalties; some share the head of their prompt."""
    random = np.random.default_rng(11)
    head = random.integers(0, vocab_size * 9 // 10, 48).tolist()
    requests = []
    for i, (input_len, output_len) in enumerate(zip(*drawn_lengths(NUM_REQUESTS, max_model_len), strict=True)):
        own = random.integers(0, vocab_size * 9 // 10, int(input_len)).tolist()
        prompt = (head + own)[: int(input_len)] if i % 3 == 0 else own
        sampling = SamplingParams(
            max_tokens=int(output_len),
            ignore_eos=True,
            seed=i,
            temperature=0.0 if i % 2 == 0 else 0.9,
            top_p=1.0 if i % 2 == 0 else 0.95,
            top_k=0 if i % 4 != 3 else 40,
            presence_penalty=0.5 if i % 4 == 3 else 0.0,
            repetition_penalty=1.1 if i % 4 == 3 else 1.0,
        )
        requests.append(Request(request_id=f"r{i}", prompt=tuple(prompt), sampling=sampling))
    return requests


def drive(engine: Engine, requests: Sequence[Request], *, together: bool) -> dict[str, list[int]]:
    """Each request's tokens. Not together: the next one comes when the one before has ended.

    The engine's books are looked at after every step.
    """
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}

    def on_output(output: RequestOutput) -> None:
        assert output.error is None, output
        tokens[output.request_id] += output.token_ids

    for group in [requests] if together else [[request] for request in requests]:
        for request in group:
            engine.add_request(request, on_output)
        while engine.step():
            engine.core.scheduler.check_integrity()
    return tokens


def replayed(built: Built) -> dict[str, Any]:
    """The outputs of each request alone, without cached prefixes, and those of all requests together."""
    sizes = {"max_model_len": built.info.max_model_len, "vocab_size": built.info.vocab_size}
    requests = make_requests(**sizes)
    alone, engine = drive(built.engine(), requests, together=False), built.engine()
    together = drive(engine, requests, together=True)
    return {"sizes": sizes, "alone": alone, "together": together, "stats": asdict(engine.stats())}
