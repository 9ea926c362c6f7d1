"""Offline generation in Python: a model, its engine and the server's own request handling in one object.

    from scripts.llm import LLM

    with LLM(model="demo") as llm:
        for result in llm.generate(["Once upon a time"], {"max_tokens": 32, "temperature": 0}):
            print(result.text)
        print(llm.chat([[{"role": "user", "content": "What is 47 + 35?"}]], {"temperature": 0})[0].text)

`params` are the fields of an OpenAI request body (`max_tokens`, `temperature`, `n`, `stop`, `seed`, `logprobs` and so
on): one mapping for all prompts, or one for each. Prompts are batched continuously. Results are in the order of the
prompts. With `enable_embeddings=True`, `llm.embed(["a text"])[0].vector` is the embedding of a text.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from batcher.errors import EngineDeadError
from batcher.stats import EngineStats
from model.inputs.paths import place
from model.loading.source import resolve
from scripts.offline.in_process import InProcessEngineClient, LoopThread, post
from scripts.wiring.engine import build
from scripts.wiring.settings import EngineSettings
from scripts.wiring.stand_in_tokenizer import tokenizer_folder
from server.app import create_app, create_state
from server.engine.scratch_folder import ScratchFolder
from server.settings import GenerationDefaults, Settings
from server.text.tokenizer import ByteLevelTokenizer

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
NO_LIMIT = 1 << 30
Params = Mapping[str, Any]


class RefusedError(ValueError):
    """A request was refused or failed; `status` is the HTTP status of its answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of the answers to a prompt."""

    text: str
    token_ids: tuple[int, ...]  # including the token that ended it
    finish_reason: str
    stop_reason: str | int | None
    logprobs: dict[str, Any] | None  # in the API's form


@dataclass(frozen=True, kw_only=True)
class Result:
    """The answers to one prompt."""

    choices: tuple[Choice, ...]  # `n` of them
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, from the prefix cache

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of the first choice."""
        return self.choices[0].token_ids


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """The vector of one prompt."""

    vector: array[float]  # f32[D], of length 1
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, from the prefix cache


class LLM:
    """Loads, compiles and warms up at construction. Close it, or use it as a context manager.

    Args:
        model: as `--model` of the server.
        tokenizer: a folder, here or in a bucket, with a tokenizer that replaces the model's own.
        served_model_name: the model's name in request bodies; by default `model`.
        report: is called with the lines of the start-up report.
        settings: the other engine flags by name, such as `max_num_seqs=16` (`scripts.wiring.settings.EngineSettings`).

    Raises:
        ValueError: a setting is unknown, or the model is not found or does not fit.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        tokenizer: str | Path | None = None,
        served_model_name: str | None = None,
        report: Callable[[str], None] = lambda line: None,
        **settings: Any,
    ) -> None:
        # The queue has no limit: the engine refuses no request for a full queue.
        self.settings = EngineSettings.from_keywords(model=model, **settings | {"max_queue": NO_LIMIT})
        asked = None if tokenizer is None else place(tokenizer, "tokenizer")
        source = resolve(model, weights=self.settings.load_format != "dummy")
        with ScratchFolder() as spare:
            folder = tokenizer_folder(asked, source, spare.path)
            tokens = ByteLevelTokenizer.from_folder(folder, vocab_size=source.config.vocab_size)
        self.engine, info = build(self.settings, report, lambda _vocab_size: tokens)
        self.model_name = served_model_name or model
        self.max_in_flight = (
            2 * self.engine.ladder.config.max_num_seqs
        )  # twice the rows: the next request is waiting when one finishes
        self._thread = LoopThread()
        self._client = InProcessEngineClient(self.engine, info, self._thread.loop)
        defaults = GenerationDefaults.from_folder(source.path) if source.path else GenerationDefaults()
        server = Settings(tokenizer_folder=folder, model_names=(self.model_name,), generation_defaults=defaults)
        self._state = create_state(server, self._client, tokens)
        self._app = create_app(self._state)
        self.engine.start()

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: Params | Sequence[Params] | None = None
    ) -> list[Result]:
        """Continues each prompt, given as text or token ids. Raises RefusedError for the first refused prompt."""
        bodies = [
            {"prompt": prompt if isinstance(prompt, str) else list(prompt), **own}
            for prompt, own in _paired(prompts, params)
        ]
        return [_result(answer) for answer in self._answers(COMPLETIONS, bodies)]

    def chat(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], params: Params | Sequence[Params] | None = None
    ) -> list[Result]:
        """Answers each conversation, a list of messages. Raises RefusedError for the first refused conversation."""
        bodies = [{"messages": list(messages), **own} for messages, own in _paired(conversations, params)]
        return [_result(answer) for answer in self._answers(CHAT, bodies)]

    def embed(
        self, prompts: Sequence[str | Sequence[int]], params: Params | Sequence[Params] | None = None
    ) -> list[Embedding]:
        """The vectors of prompts, given as text or token ids. Needs `enable_embeddings=True`. Raises RefusedError for
        the first refused prompt."""
        bodies = [
            {"input": prompt if isinstance(prompt, str) else list(prompt), **own, "encoding_format": "base64"}
            for prompt, own in _paired(prompts, params)
        ]
        return [_embedding(answer) for answer in self._answers(EMBEDDINGS, bodies)]

    def post_all(
        self, requests: Iterable[tuple[str, Any]], on_answer: Callable[[int, int, dict[str, Any]], None]
    ) -> None:
        """Sends (path, JSON body) pairs through the server's application, as many at once as the engine can use.

        `on_answer(index, status, answer)` is called for each finished request, in no particular order. All calls come
        from one other thread. Requests are taken from the iterable when they are needed.

        Raises:
            EngineDeadError: the engine has died. The remaining requests have no answer.
        """
        if not self._thread.run(self._post_all(requests, on_answer)):
            raise EngineDeadError(f"the engine has died: {self._client.death}")

    def stats(self) -> EngineStats:
        """The engine's counters and gauges, as on the server's `/metrics`."""
        return self.engine.stats()

    def close(self) -> None:
        """Ends the engine and its threads."""
        self.engine.shutdown()
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _post_all(
        self, requests: Iterable[tuple[str, Any]], on_answer: Callable[[int, int, dict[str, Any]], None]
    ) -> bool:
        """Returns whether all requests were answered. Answers from before the engine's death are delivered."""
        remaining = enumerate(requests)
        all_answered = True

        async def work() -> None:
            nonlocal all_answered
            for index, (path, body) in remaining:
                status, raw = await post(self._app, path, json.dumps(body).encode())
                if status >= 500 and self._client.death is not None:
                    all_answered = False
                    return
                answer = json.loads(raw)
                for choice in answer.get("choices", ()):
                    request_id = f"{answer['id']}-{choice['index']}"
                    choice["token_ids"] = self._client.take_token_ids(request_id)
                on_answer(index, status, answer)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.max_in_flight):
                    group.create_task(work())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # an error of the caller's `requests` or `on_answer`
        return all_answered

    def _answers(self, path: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = [{}] * len(bodies)
        refused: list[tuple[int, RefusedError]] = []

        def on_answer(index: int, status: int, answer: dict[str, Any]) -> None:
            if status == 200:
                answers[index] = answer
            else:
                refused.append((index, RefusedError(status, f"request {index}: {answer['error']['message']}")))

        self.post_all([(path, {"model": self.model_name, **body}) for body in bodies], on_answer)
        if refused:
            raise min(refused, key=lambda pair: pair[0])[1]
        return answers


def _paired(items: Sequence[Any], params: Params | Sequence[Params] | None) -> list[tuple[Any, Params]]:
    if isinstance(items, str):
        raise ValueError("give a list of prompts, not one text")
    if params is None or isinstance(params, Mapping):
        params = [params or {}] * len(items)
    if len(params) != len(items):
        raise ValueError(f"one set of params for all, or one for each: {len(items)=} {len(params)=}")
    for own in params:
        if own.get("stream"):
            raise ValueError("offline results come whole: stream=True is for the HTTP server")
    return list(zip(items, params, strict=True))


def _result(answer: dict[str, Any]) -> Result:
    usage = answer["usage"]
    choices = tuple(
        Choice(
            text=choice["text"] if "text" in choice else choice["message"]["content"],
            token_ids=tuple(choice["token_ids"]),
            finish_reason=choice["finish_reason"],
            stop_reason=choice["stop_reason"],
            logprobs=choice["logprobs"],
        )
        for choice in answer["choices"]
    )
    return Result(
        choices=choices, num_prompt_tokens=usage["prompt_tokens"], num_cached_tokens=_num_cached_tokens(usage)
    )


def _embedding(answer: dict[str, Any]) -> Embedding:
    (entry,), usage = answer["data"], answer["usage"]
    vector = array("f", base64.b64decode(entry["embedding"]))
    if sys.byteorder == "big":
        vector.byteswap()
    return Embedding(
        vector=vector, num_prompt_tokens=usage["prompt_tokens"], num_cached_tokens=_num_cached_tokens(usage)
    )


def _num_cached_tokens(usage: Mapping[str, Any]) -> int:
    return usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
