"""vLLM's asynchronous engine: the methods of an `LLM`, for code in an event loop of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Self

from scripts.offline.arguments import LoRARequest, Options, Params, Prompt, RequestOutputKind
from scripts.offline.pending import Pending
from scripts.offline.results import CompletionOutput, RequestOutput


class EngineArgs(SimpleNamespace):
    """The keywords of `LLM`."""


def _of_llm(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """The method of this name of the LLM, in a thread."""

    async def call(self: AsyncEngine, *args: Any, **keywords: Any) -> Any:
        return await asyncio.to_thread(getattr(self.llm, name), *args, **keywords)

    call.__doc__ = f"`LLM.{name}`, without blocking the event loop."
    return call


class AsyncEngine:
    """An LLM for an event loop. Its methods may be called from any loop; only the constructor blocks.

    Args:
        settings: the keywords of `LLM`.
    """

    make: ClassVar[type[Any]]  # `LLM`

    def __init__(self, **settings: Any) -> None:
        self.llm = self.make(**settings)
        self._running: dict[str, Pending] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """An engine with these keywords."""
        return cls(**vars(engine_args))

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Params | None,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the result as it grows, as `SamplingParams.output_kind` says. The last one is `finished`. The request
        ends if the iterator is closed before.

        Raises:
            RefusedError: the server refuses the prompt.
            EngineDeadError: the engine has died.
        """
        kind = getattr(sampling_params, "output_kind", RequestOutputKind.CUMULATIVE)
        options = Options(request_id=request_id, priority=priority, lora_request=lora_request, model=model)
        pending = await asyncio.to_thread(partial(self.llm.enqueue, [prompt], sampling_params, **options))
        self._running[request_id] = pending
        before: list[CompletionOutput] = []
        num_tokens = sys.maxsize if kind is RequestOutputKind.FINAL_ONLY else 0
        try:
            while True:
                grown = self.llm.on_loop(pending.grown(num_tokens))
                found = replace(await asyncio.wrap_future(grown), request_id=request_id)
                num_tokens = max(num_tokens, sum(len(output.token_ids) for output in found.outputs))
                if kind is RequestOutputKind.DELTA:
                    yield replace(found, outputs=[_since(output, before) for output in found.outputs])
                    before = found.outputs
                else:
                    yield found
                if found.finished:
                    return
        finally:
            self._running.pop(request_id, None)
            if not pending.is_done:
                await asyncio.to_thread(pending.end)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends these requests. Their iterators yield what there is, with the finish reason "abort"."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for pending in [self._running[id] for id in ids if id in self._running]:
            await asyncio.to_thread(pending.end)

    sleep, wake_up, resume_generation = _of_llm("sleep"), _of_llm("wake_up"), _of_llm("resume")
    pause_generation, reset_prefix_cache = _of_llm("pause"), _of_llm("reset_prefix_cache")
    update_weights, collective_rpc = _of_llm("update_weights"), _of_llm("collective_rpc")

    async def is_sleeping(self) -> bool:
        """Whether a part is not on the device."""
        return bool(self.llm.is_sleeping)

    async def is_paused(self) -> bool:
        """Whether requests wait for `resume_generation`."""
        return bool(self.llm.is_paused)

    def get_tokenizer(self) -> Any:
        """The tokenizer with its chat template, as a new object of transformers."""
        return self.llm.get_tokenizer()

    def get_num_unfinished_requests(self) -> int:
        """The number of requests that are being answered."""
        return len(self._running)

    @property
    def output_processor(self) -> Self:
        """What counts the unfinished requests."""
        return self

    def shutdown(self) -> None:
        """Ends pending requests, the engine and its threads."""
        self.llm.close()


def _since(output: CompletionOutput, before: list[CompletionOutput]) -> CompletionOutput:
    """The part of an output that was not there before."""
    if not before:
        return output
    old = before[output.index]
    count = len(old.token_ids)
    return replace(
        output,
        text=output.text[len(old.text) :],
        token_ids=output.token_ids[count:],
        logprobs=None if output.logprobs is None else output.logprobs[count:],
        sampled_logprobs=None if output.sampled_logprobs is None else output.sampled_logprobs[count:],
    )
