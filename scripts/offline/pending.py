"""Requests that are being answered, while the caller does something else."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from tqdm import tqdm

from scripts.offline.in_process import InProcessEngine, LoopThread
from scripts.offline.results import CompletionOutput, Logprobs, RequestOutput, request_output
from server.engine.embedding import Embeddings
from server.engine.generation import Choice, Generation, ScoredToken
from server.engine.protocol import Engine

Request = tuple[str, dict[str, Any]]
OnAnswer = Callable[[int, int, dict[str, Any]], None]  # of the index, the status and the answer of a request
ABORT = "abort"  # the finish reason of what was given up


class RefusedError(ValueError):
    """A request was refused or failed; `status` is the HTTP status of its answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestsInFlight:
    """Requests that are being answered.

    Args:
        client: tells the news of answers, too.
        post_all: sends the requests and passes on their answers. It runs on the thread's loop.
        requests: (path, JSON body) of each request.
    """

    def __init__(
        self,
        thread: LoopThread,
        client: InProcessEngine,
        post_all: Callable[[Iterable[Request], OnAnswer], Coroutine[Any, Any, None]],
        requests: Sequence[Request],
        *,
        use_tqdm: bool,
    ) -> None:
        self.answers: dict[int, dict[str, Any]] = {}  # by index
        self.is_stopped = False  # no request is posted any more
        self._requests = requests
        self._refused: dict[int, RefusedError] = {}
        self._client = client
        self._thread = thread
        self._bar = tqdm(total=len(requests), unit="prompt", disable=not use_tqdm)
        self._task = thread.run(_begun(self._post(post_all)))

    async def _post(self, post_all: Callable[[Iterable[Request], OnAnswer], Coroutine[Any, Any, None]]) -> None:
        try:
            await post_all(takewhile(lambda _: not self.is_stopped, self._requests), self._take)
        finally:
            self._bar.close()
            self._client.tell_news()

    def _take(self, index: int, status: int, answer: dict[str, Any]) -> None:
        self._bar.update()
        if status == 200:
            self.answers[index] = answer
        else:
            self._refused[index] = RefusedError(status, f"request {index}: {answer['error']['message']}")
        self._client.tell_news()

    def is_open(self, index: int) -> bool:
        """Whether the request has no answer yet."""
        return index not in self.answers and index not in self._refused

    async def news(self) -> None:
        """Waits for a step of the engine, an answer or the end, on the loop's thread."""
        if not self.is_done:
            await self._client.news.wait()

    @property
    def is_done(self) -> bool:
        return self._task.done()

    def wait(self) -> None:
        """Waits until all are answered.

        Raises:
            RefusedError: a request was refused; the error is that of the first one.
            EngineDeadError: the engine has died.
        """
        if not self.is_done:
            self._thread.run(asyncio.wait([self._task]))  # the task goes on if this is interrupted
        self.check()

    def wait_or_end(self) -> list[dict[str, Any]]:
        """Waits for all answers and returns them, in the order of the requests. An interrupt ends the requests."""
        try:
            self.wait()
        finally:
            if not self.is_done:
                self._thread.run(self.cancel())
        return [answer for _, answer in sorted(self.answers.items())]

    def check(self) -> None:
        """Raises what `wait` raises, if it is known already."""
        if self.is_done and not self._task.cancelled():
            self._task.result()
        if self._refused:
            raise self._refused[min(self._refused)]

    async def cancel(self) -> None:
        """Ends the requests without an answer. Runs on the loop's thread. Their pages are free a step later."""
        self._task.cancel()
        await asyncio.wait([self._task])


@dataclass(frozen=True, kw_only=True)
class EnqueuedPrompt:
    """A prompt that was enqueued."""

    answer_id: str
    prompt: str | None  # None: it was given as ids
    prompt_token_ids: Sequence[int]
    n: int  # choices
    read: Callable[[Sequence[ScoredToken]], list[Logprobs]] | None  # None: no log-probabilities are asked for
    _logprobs: defaultdict[int, list[Logprobs]] = field(default_factory=lambda: defaultdict(list))  # by choice

    def so_far(self, generation: Generation | None, end: str | None, weight_version: str) -> RequestOutput:
        """The result so far.

        Args:
            generation: the running generation; None: it has not begun.
            end: the finish reason of the choices that end here; None: they go on.
            weight_version: the present version of the weights.
        """
        choices: Sequence[Choice | None] = [None] * self.n if generation is None else generation.choices
        outputs = []
        for index, choice in enumerate(choices):
            gain = None if choice is None else choice.so_far()
            runs = [(weight_version, 0)] if choice is None else choice.weight_versions
            output = CompletionOutput(
                index=index,
                text="" if gain is None else gain.text,
                token_ids=[] if gain is None else gain.token_ids,
                finish_reason=(None if choice is None else choice.finish_reason) or end,
                stop_reason=None if choice is None else choice.stop_reason,
                logprobs=self._read(index, () if gain is None else gain.scored),
                sampled_logprobs=gain.sampled_logprobs if gain and gain.sampled_logprobs else None,
                tool_calls=[],
                weight_versions=[run for run in runs if run[1]] or [runs[-1]],
            )
            outputs.append(output)
        return RequestOutput(
            request_id=self.answer_id,
            prompt=self.prompt,
            prompt_token_ids=[*self.prompt_token_ids],
            prompt_logprobs=None,
            outputs=outputs,
            num_cached_tokens=max((choice.num_cached_tokens for choice in choices if choice), default=0),
            finished=end is not None,
        )

    def _read(self, choice: int, scored: Sequence[ScoredToken]) -> list[Logprobs] | None:
        if self.read is None:
            return None
        known = self._logprobs[choice]
        known += self.read(scored[len(known) :])
        return known[: len(scored)]


class Pending:
    """Prompts that were enqueued with `LLM.enqueue`. The engine computes them in the background.

    Args:
        asked: the prompt of each request in `sent`.
        generations: the running generations, by the ids of their answers.
    """

    def __init__(
        self,
        sent: RequestsInFlight,
        asked: Sequence[EnqueuedPrompt],
        thread: LoopThread,
        generations: Mapping[str, Generation | Embeddings],
        engine: Engine,
    ) -> None:
        self._sent = sent
        self._asked = asked
        self._thread = thread
        self._generations = generations
        self._engine = engine
        self._last: list[RequestOutput] | None = None  # at the end of those that were aborted

    @property
    def is_done(self) -> bool:
        return self._last is not None or self._sent.is_done

    def outputs(self) -> list[RequestOutput]:
        """The results so far, in the order of the prompts. Results that are not `finished` have the tokens up to now.
        Raises the errors of `wait`."""
        self._sent.check()
        if self._last is not None:
            return self._last
        return self._so_far() if self._sent.is_done else self._thread.run(self._settled())

    async def grown(self, num_tokens: int) -> RequestOutput:
        """The result of the only prompt, once it has more than `num_tokens` tokens or is finished. Called on the loop's
        thread. Raises the errors of `wait`."""
        while not self.is_done:
            running = self._running(self._asked[0])
            has_grown = running is not None and sum(choice.num_tokens for choice in running.choices) > num_tokens
            if has_grown and not self._has_ended(0):
                return self._so_far()[0]
            await self._sent.news()
        self._sent.check()
        return (self._last or self._so_far())[0]

    def wait(self) -> list[RequestOutput]:
        """The results, in the order of the prompts, once all are there. An interrupt leaves the requests as they are.

        Raises:
            RefusedError: the server refuses a prompt; the first one is named.
            EngineDeadError: the engine has died.
        """
        if self._last is None:
            self._sent.wait()
        return self.outputs()

    def wait_or_end(self) -> list[RequestOutput]:
        """Waits for the results, in the order of the prompts. An interrupt ends the requests."""
        try:
            return self.wait()
        finally:
            self.end()

    def stop(self) -> None:
        """Sends no further requests to the engine. Those that it does not have yet end as aborted."""
        self._sent.is_stopped = True

    def abort(self) -> list[RequestOutput]:
        """Ends the prompts that still run, and returns all results. Aborted ones keep their tokens and have the
        `finish_reason` "abort". Later calls of `outputs` and `wait` return the same. Raises the errors of `wait`."""
        self.end()
        return self.outputs()

    def end(self) -> None:
        """Ends the prompts that still run, without returning results or raising errors of requests."""
        if not self.is_done:
            self._thread.run(self._end())

    async def _end(self) -> None:
        self._last = await self._settled(ABORT)
        await self._sent.cancel()

    async def _settled(self, end: str | None = None) -> list[RequestOutput]:
        """The results so far, after the answers of all requests that the engine has ended have arrived. The tokens of
        such a request are no longer in its generation."""
        while not self._sent.is_done and any(map(self._has_ended, range(len(self._asked)))):
            await self._sent.news()
        return self._so_far(end)

    def _has_ended(self, index: int) -> bool:
        """Whether the engine has ended a request whose answer has not come yet."""
        running = self._running(self._asked[index])
        return running is not None and running.finished and self._sent.is_open(index)

    def _so_far(self, end: str | None = None) -> list[RequestOutput]:
        """The results so far. Called on the loop's thread, on which tokens arrive, or after the end."""
        answers = self._sent.answers
        if self._sent.is_done:
            end = ABORT  # of what was stopped before it began
        return [
            request_output(answers[index], asked.prompt)
            if index in answers
            else asked.so_far(self._running(asked), end, self._engine.weight_version)
            for index, asked in enumerate(self._asked)
        ]

    def _running(self, asked: EnqueuedPrompt) -> Generation | None:
        found = self._generations.get(asked.answer_id)
        return found if isinstance(found, Generation) else None


async def _begun[T](coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    return asyncio.create_task(coroutine)
