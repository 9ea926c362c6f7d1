"""Offline generation in Python: a model, its engine and the server's own request handling in one object.

    from scripts.llm import LLM

    with LLM(model="demo") as llm:
        for result in llm.generate(["Once upon a time"], {"max_tokens": 32, "temperature": 0}):
            print(result.text)
        print(llm.chat([[{"role": "user", "content": "What is 47 + 35?"}]], {"temperature": 0})[0].text)

Methods, arguments and results have vLLM's names. Parameters are `SamplingParams`, or a mapping of the fields of an
OpenAI request body (`max_tokens`, `temperature`, `n`, `stop`, `seed`, `logprobs` and so on): one for all prompts, or
one for each. Prompts are batched continuously. Results are in the order of the prompts. With `enable_embeddings=True`,
`llm.embed(["a text"])[0].vector` is the embedding of a text.

For reinforcement learning, `llm.model()` is the model to train and `llm.update_weights(...)` gives its weights back
(`scripts/offline/training.py`). `llm.enqueue(prompts, params)` returns at once: rollouts go on meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from batcher.errors import EngineDeadError
from batcher.stats import EngineStats
from model.inputs.paths import place
from model.loading.source import resolve
from scripts.building.build import build
from scripts.building.stand_in_tokenizer import tokenizer_folder
from scripts.flags.lora import check_not_of_model
from scripts.flags.settings import EngineSettings
from scripts.offline.arguments import (
    LoRARequest,
    LoraRequests,
    Message,
    Params,
    Prompt,
    SamplingParams,
    adapters_of,
    conversations_of,
    paired,
    prompts_of,
    tokens_body,
)
from scripts.offline.in_process import InProcessEngine, LoopThread
from scripts.offline.pending import EnqueuedPrompt, OnAnswer, Pending, RefusedError, RequestsInFlight
from scripts.offline.results import Embedding, RequestOutput, embedding
from scripts.offline.training import EngineForTraining
from server.app import create_app, create_state
from server.batches.in_process import post
from server.engine.scratch_folder import ScratchFolder
from server.engine.wire import IfLoaded, LoadAdapter
from server.settings import GenerationDefaults, Settings
from server.text.tokenizer import ByteLevelTokenizer

if TYPE_CHECKING:
    from server.text.transformers_parts import FastTokenizer

__all__ = ["LLM", "Embedding", "LoRARequest", "Pending", "RefusedError", "RequestOutput", "SamplingParams"]

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
TOKENIZE, TOKENS = "/tokenize", "/inference/v1/generate"
ID_PREFIXES = {COMPLETIONS: "cmpl", CHAT: "chatcmpl", TOKENS: "generate-tokens"}  # of answers
NO_LIMIT = 1 << 30


class LLM(EngineForTraining):
    """Loads, compiles and warms up at construction. Close it, or use it as a context manager.

    Args:
        model: the value of the server's `--model`.
        tokenizer: a folder, here or in a bucket, with a tokenizer that replaces the model's own.
        served_model_name: the model's name in request bodies; by default `model`.
        report: is called with the lines of the start-up report.
        settings: the other engine flags by name, such as `max_num_seqs=16` (`scripts.flags.settings.EngineSettings`).

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
        self.model_name = served_model_name or model
        check_not_of_model(self.settings.adapters, (self.model_name,))
        asked = None if tokenizer is None else place(tokenizer, "tokenizer")
        source = resolve(model, weights=self.settings.load_format != "dummy")
        with ScratchFolder() as spare:
            folder = tokenizer_folder(asked, source, spare.path)
            tokens = ByteLevelTokenizer.from_folder(folder, vocab_size=source.config.vocab_size)
            self._tokens = tokens
            engine, built, self._adapters = build(
                self.settings, report, lambda _vocab_size: tokens, tokenizer_folder=folder
            )
        self._thread = LoopThread()
        client = InProcessEngine(engine, built.info, self._thread.loop, self._adapters)
        super().__init__(engine, built, client)
        # Twice the rows: the next request is waiting when one finishes.
        self.max_in_flight = 2 * engine.ladder.config.max_num_seqs
        self._beginning = threading.Lock()
        self._pending: list[Pending] = []  # those that may not have ended
        defaults = GenerationDefaults.from_folder(source.path) if source.path else GenerationDefaults()
        server = Settings(
            tokenizer_folder=folder,
            model_names=(self.model_name,),
            generation_defaults=defaults,
            lora_folder=None if self.settings.lora_folder is None else Path(self.settings.lora_folder),
        )
        self._state = create_state(server, self._client, tokens)
        self._app = create_app(self._state)
        self.engine.start()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params | None] | None = None,
        *,
        use_tqdm: bool = False,
        lora_request: LoraRequests = None,
    ) -> list[RequestOutput]:
        """Continues one prompt or several: texts, token ids, or vLLM's dicts with `prompt` or `prompt_token_ids`.

        Args:
            use_tqdm: shows a bar on stderr.
            lora_request: the LoRA adapter of all prompts, or one for each. Needs `enable_lora=True`.

        Raises:
            RefusedError: the server refuses a prompt; the first one is named. Or an adapter cannot be loaded.
            ValueError: an argument has another type.
        """
        self._check_awake()
        return self._continue(prompts, sampling_params, lora_request, use_tqdm=use_tqdm).wait_or_end()

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params | None] | None = None,
        *,
        use_tqdm: bool = False,
        lora_request: LoraRequests = None,
    ) -> Pending:
        """Starts to continue prompts, and returns at once. The returned object gives the results, also partial ones.

        The arguments are those of `generate`. The engine may be paused or asleep meanwhile, and its weights may change.
        """
        return self._continue(prompts, sampling_params, lora_request, use_tqdm=use_tqdm, as_ids=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params | None] | None = None,
        *,
        use_tqdm: bool = False,
        lora_request: LoraRequests = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, a list of messages, or several. Errors are those of `generate`.

        Args:
            use_tqdm: shows a bar on stderr.
            lora_request: the LoRA adapter of all conversations, or one for each. Needs `enable_lora=True`.
            tools: a field of all request bodies, like the arguments after it.
        """
        fields = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        self._check_awake()
        for_all = {name: value for name, value in fields.items() if value is not None} | _TOLD
        given = paired(conversations_of(messages), sampling_params, is_chat=True)
        bodies = [own | for_all | {"messages": conversation} for conversation, own in given]
        bodies = self._with_adapters(bodies, lora_request)
        requests = [(CHAT, body) for body in bodies]
        return self._begin(requests, [None] * len(requests), use_tqdm=use_tqdm).wait_or_end()

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        *,
        use_tqdm: bool = False,
        lora_request: LoraRequests = None,
    ) -> list[Embedding]:
        """The vectors of one prompt or several, in the forms of `generate`. Needs `enable_embeddings=True`. Raises the
        errors of `generate`.

        Args:
            pooling_params: fields of the request bodies.
            lora_request: the LoRA adapter of all prompts, or one for each. Needs `enable_lora=True`.
            use_tqdm: shows a bar on stderr.
        """
        self._check_awake()
        bodies = [
            own | prompt | {"encoding_format": "base64"}
            for prompt, own in paired(prompts_of(prompts, "input"), pooling_params, is_chat=False)
        ]
        bodies = self._with_adapters(bodies, lora_request)
        requests = [(EMBEDDINGS, body) for body in bodies]
        return [embedding(answer) for answer in self._send(requests, use_tqdm=use_tqdm).wait_or_end()]

    def get_tokenizer(self) -> FastTokenizer:
        """The tokenizer with its chat template, as a new object of transformers."""
        return self._tokens.to_transformers()

    def post_all(self, requests: Iterable[tuple[str, Any]], on_answer: OnAnswer) -> None:
        """Sends (path, JSON body) pairs through the server's application, as many at once as the engine can use.

        `on_answer(index, status, answer)` is called for each finished request, in no particular order. All calls come
        from one other thread. Requests are taken from the iterable when they are needed.

        Raises:
            EngineDeadError: the engine has died. The remaining requests have no answer.
            RuntimeError: `close` was called.
        """
        self._check_open()
        self._thread.run(self._post_all(requests, on_answer))

    def stats(self) -> EngineStats:
        """The engine's counters and gauges, as on the server's `/metrics`."""
        return self.engine.stats()

    def close(self) -> None:
        """Ends pending requests, the engine and its threads. May be called again."""
        for pending in self._pending:
            pending.end()
        self.engine.shutdown()
        if self._adapters is not None:
            self._adapters.close()
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _post_all(self, requests: Iterable[tuple[str, Any]], on_answer: OnAnswer) -> None:
        """Sends the requests of `post_all`. Answers from before the engine's death are delivered."""
        remaining = enumerate(requests)
        all_answered = True

        async def work() -> None:
            nonlocal all_answered
            for index, (path, body) in remaining:
                status, raw = await post(self._app, path, json.dumps(body).encode())
                if status >= 500 and self._client.death is not None:
                    all_answered = False
                    return
                on_answer(index, status, json.loads(raw))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.max_in_flight):
                    group.create_task(work())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # an error of the caller's `requests` or `on_answer`
        if not all_answered:
            raise EngineDeadError(f"the engine has died: {self._client.death}")

    def _with_adapters(self, bodies: list[dict[str, Any]], requests: LoraRequests) -> list[dict[str, Any]]:
        """The bodies with their adapters as models. Adapters that are not loaded yet are loaded."""
        adapters = adapters_of(requests, len(bodies))
        for request in dict.fromkeys(filter(None, adapters)):
            if request.lora_name == self.model_name:
                raise ValueError(f"lora_request: {request.lora_name!r} is the name of the model")
            loaded = self._client.adapters.get(request.lora_name)
            if request.load_inplace or loaded is None or loaded.path != request.lora_path:
                name, path, base = request.lora_name, request.lora_path, request.base_model_name
                change = LoadAdapter(name, path, base, IfLoaded.REPLACE)
                reply = self._thread.run(self._client.ask(change))
                if reply.error is not None:
                    raise RefusedError(reply.status, f"lora_request {name!r}: {reply.error}")
        models = [{} if adapter is None else {"model": adapter.lora_name} for adapter in adapters]
        return [body | model for body, model in zip(bodies, models, strict=True)]

    def _continue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params | None] | None,
        lora_request: LoraRequests,
        *,
        use_tqdm: bool,
        as_ids: bool = False,
    ) -> Pending:
        """Sends completions. With `detokenize` false they go to a route that takes ids and makes no text. With `as_ids`
        all prompts are sent as ids."""
        given = paired(prompts_of(prompts, "prompt"), sampling_params, is_chat=False)
        bodies = self._with_adapters([own | prompt | _TOLD for prompt, own in given], lora_request)
        texts = [body["prompt"] if isinstance(body["prompt"], str) else None for body in bodies]
        makes_text = [body.pop("detokenize", True) is not False for body in bodies]
        self._tokenize([body for body, makes in zip(bodies, makes_text, strict=True) if as_ids or not makes])
        self._set_open_limits(bodies)
        requests = [
            (COMPLETIONS, body) if makes else (TOKENS, tokens_body(body))
            for body, makes in zip(bodies, makes_text, strict=True)
        ]
        return self._begin(requests, texts, use_tqdm=use_tqdm)

    def _tokenize(self, bodies: list[dict[str, Any]]) -> None:
        """Replaces texts by token ids."""
        bodies = [body for body in bodies if isinstance(body["prompt"], str)]
        for body, answer in zip(bodies, self._tokenized(bodies), strict=True):
            body["prompt"] = answer["tokens"]

    def _tokenized(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        names = ("prompt", "add_special_tokens")
        asked = [(TOKENIZE, {name: body[name] for name in names if name in body}) for body in bodies]
        return self._send(asked, use_tqdm=False).wait_or_end()

    def _set_open_limits(self, bodies: list[dict[str, Any]]) -> None:
        """Sets a `max_tokens` of None to the number of tokens that fit. In the API it would be 16."""
        bodies = [body for body in bodies if body.get("max_tokens", 0) is None]
        texts = [body for body in bodies if isinstance(body["prompt"], str)]
        counts = iter(answer["count"] for answer in self._tokenized(texts))
        for body in bodies:
            num_prompt = next(counts) if isinstance(body["prompt"], str) else len(body["prompt"])
            kept = body.get("truncate_prompt_tokens") or -1
            num_prompt = num_prompt if kept < 0 else min(num_prompt, kept)
            body["max_tokens"] = max(1, self._client.info.max_model_len - num_prompt)

    def _begin(
        self, requests: list[tuple[str, dict[str, Any]]], texts: Sequence[str | None], *, use_tqdm: bool
    ) -> Pending:
        """Sends the requests. `texts` has the prompt of each request that was given as a text."""
        asked = []
        for (path, body), text in zip(requests, texts, strict=True):
            id = body.setdefault("request_id", uuid.uuid4().hex)
            ids, params = body.get("token_ids", body.get("prompt")), body.get("sampling_params", body)
            own = EnqueuedPrompt(
                answer_id=f"{ID_PREFIXES[path]}-{id}",
                prompt=text,
                prompt_token_ids=() if ids is None or isinstance(ids, str) else ids,
                n=params.get("n") or 1,
            )
            asked.append(own)
        sent = self._send(requests, use_tqdm=use_tqdm)
        pending = Pending(sent, asked, self._thread, self._state.generations, self._client)
        with self._beginning:
            self._pending = [*(earlier for earlier in self._pending if not earlier.is_done), pending]
        return pending

    def _send(self, requests: list[tuple[str, dict[str, Any]]], *, use_tqdm: bool) -> RequestsInFlight:
        self._check_open()
        named = [(path, {"model": self.model_name, **body}) for path, body in requests]
        return RequestsInFlight(self._thread, self._post_all, named, use_tqdm=use_tqdm)

    def _abort_unsent(self) -> None:
        for pending in self._pending:
            pending.stop()

    def _end_pending(self) -> None:
        for pending in self._pending:
            pending.end()

    def _check_awake(self) -> None:
        if self.is_sleeping:
            raise RuntimeError("this LLM sleeps: wake_up() first, or enqueue() what is to wait")

    def _check_open(self) -> None:
        if self._thread.is_closed:
            raise RuntimeError("this LLM is closed: make another")


_TOLD = {"return_token_ids": True, "return_weight_versions": True}
