"""An engine without a model: it draws a fixed text for every request, the first token at once and then one per step.

Steps come at a fixed pace. Late ones follow at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from batcher.delivery import Tokens
from batcher.request import FinishReason, Request, RequestOutput
from batcher.stats import EngineStats
from server.engine.process import BuiltEngine
from server.engine.wire import EngineInfo

OnOutput = Callable[[RequestOutput], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class InstantConfig:
    """What the engine draws, and how fast."""

    text: tuple[int, ...]  # token ids, over and over
    steps_per_s: float
    max_model_len: int
    vocab_size: int


class InstantEngine:
    """`server.engine.process.ServedEngine`. Every request runs to its `max_tokens`."""

    death: BaseException | None = None

    def __init__(self, config: InstantConfig) -> None:
        self._config = config
        self._on_tokens: Callable[[Tokens], None] | None = None
        self._changed = threading.Condition()
        self._live: dict[str, _Running] = {}
        self._num_requests = 0
        self._stopping = False
        self._stats = EngineStats()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def listen(self, on_tokens: Callable[[Tokens], None]) -> None:
        self._on_tokens = on_tokens

    def add_request(self, request: Request, on_output: OnOutput) -> None:
        with self._changed:
            running = self._live[request.request_id] = _Running(self._num_requests, request, on_output)
            self._num_requests += 1
            self._draw(running)
            self._changed.notify()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        with self._changed:
            running = self._live.pop(request_id, None)
            if running is not None:
                running.tell(finish_reason=reason)

    def reset_prefix_cache(self, *, reset_external: bool) -> None:
        """It keeps no prefixes."""

    def stats(self) -> EngineStats:
        return self._stats

    def shutdown(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()
        for request_id in list(self._live):
            self.abort(request_id)

    def _run(self) -> None:
        due = 0.0
        while True:
            time.sleep(max(0.0, due - time.monotonic()))
            with self._changed:
                if not self._live:
                    self._changed.wait_for(lambda: self._live or self._stopping)
                    due = time.monotonic()
                if self._stopping:
                    return
                self._step()
            due += 1 / self._config.steps_per_s

    def _step(self) -> None:
        assert self._on_tokens is not None
        drawn = [(running.number, self._draw(running)) for running in list(self._live.values())]
        plain = [(number, token) for number, token in drawn if token is not None]
        if plain:
            numbers, tokens = zip(*plain, strict=True)
            self._on_tokens(Tokens(np.array(numbers), np.array(tokens, np.int32)))

    def _draw(self, running: _Running) -> int | None:
        """Draws a request's next token, and returns it if it is a plain one. Tells the first and the last one."""
        text = self._config.text
        token = text[running.num_tokens % len(text)]
        running.num_tokens += 1
        if running.num_tokens == running.request.sampling.max_tokens:
            del self._live[running.request.request_id]
            running.tell(token_ids=(token,), finish_reason=FinishReason.LENGTH)
            return None
        if running.num_tokens == 1:
            running.tell(token_ids=(token,))
            return None
        return token


@dataclass(slots=True)
class _Running:
    number: int
    request: Request
    on_output: OnOutput
    num_tokens: int = 0

    def tell(self, token_ids: tuple[int, ...] = (), finish_reason: FinishReason | None = None) -> None:
        output = RequestOutput(request_id=self.request.request_id, number=self.number, token_ids=token_ids)
        output.finish_reason = finish_reason
        self.on_output(output)


def build(config: InstantConfig, report: Callable[[str], None]) -> BuiltEngine:
    """The engine factory of the server's engine process."""
    info = EngineInfo(max_model_len=config.max_model_len, vocab_size=config.vocab_size)
    return BuiltEngine(engine=InstantEngine(config), info=info)
