"""Offline generation in Python: a model, its engine and the server's own request handling in one object.

    from scripts.llm import LLM

    with LLM(model="demo") as llm:
        for result in llm.generate(["Once upon a time"], {"max_tokens": 32, "temperature": 0}):
            print(result.outputs[0].text)
        print(llm.chat([[{"role": "user", "content": "What is 47 + 35?"}]], {"temperature": 0})[0].outputs[0].text)

Methods, arguments and results have vLLM's names. Parameters are `SamplingParams`, or a mapping of the fields of an
OpenAI request body (`max_tokens`, `temperature`, `n`, `stop`, `seed`, `logprobs` and so on): one for all prompts, or
one for each. Prompts are batched continuously. Results are in the order of the prompts. With `enable_embeddings=True`,
`llm.embed(["a text"])[0].outputs.embedding` is the embedding of a text. `AsyncLLM` has vLLM's asynchronous methods.

For reinforcement learning, `llm.model()` is the model to train and `llm.update_weights(...)` gives its weights back
(`scripts/offline/training.py`). `llm.enqueue(prompts, params)` returns at once: rollouts go on meanwhile.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, Self, Unpack

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from batcher.errors import EngineDeadError
from batcher.stats import EngineStats
from model.inputs.paths import place
from scripts.building.build import build
from scripts.building.stand_in_tokenizer import tokenizer_folder
from scripts.flags.lora import check_names_differ
from scripts.flags.serve import DECLARED, offline_settings
from scripts.flags.settings import ServedSettings, read_keywords
from scripts.offline.arguments import (
    AllParams,
    ChatOptions,
    LoRARequest,
    LoraRequests,
    Message,
    Options,
    PoolingParams,
    Prompts,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
    adapters_of,
    conversations_of,
    fields_of,
    paired,
    prompts_of,
)
from scripts.offline.async_llm import AsyncEngine, EngineArgs
from scripts.offline.beam_search import BeamSearchOutput, BeamSearchParams, beams_of
from scripts.offline.in_process import LoopThread
from scripts.offline.pending import EnqueuedPrompt, OnAnswer, Pending, RefusedError, RequestsInFlight
from scripts.offline.results import (
    CompletionOutput,
    Logprob,
    Logprobs,
    PoolingRequestOutput,
    RequestOutput,
    logprobs_of,
    pooled,
    scored,
)
from scripts.offline.training import EngineForTraining
from scripts.offline.worker import check_alone, num_chips, worker_class
from server.api.answers.logprobs import scores_by_id
from server.app import create_app, create_state
from server.batches.in_process import post
from server.engine.generation import ScoredToken
from server.engine.scratch_folder import ScratchFolder
from server.engine.wire import IfLoaded, LoadAdapter
from server.http.request_error import RequestError
from server.settings import Settings
from server.text.stream import decode_text
from server.text.tokenizer import ByteLevelTokenizer

if TYPE_CHECKING:
    from server.text.transformers_parts import FastTokenizer

__all__ = ["LLM", "AsyncLLM", "BeamSearchParams", "CompletionOutput", "EngineArgs", "LoRARequest", "Logprob", "Pending"]
__all__ += ["PoolingParams", "RefusedError", "RequestOutput", "RequestOutputKind", "SamplingParams", "TokensPrompt"]
__all__ += ["AsyncEngineArgs", "AsyncLLMEngine", "StructuredOutputsParams", "TextPrompt"]

__version__ = "0.33.0"  # of vLLM, whose names these are
Results = list[RequestOutput]
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
TOKENIZE = "/tokenize"
ID_PREFIXES = {COMPLETIONS: "cmpl", CHAT: "chatcmpl"}  # of answers
NO_LIMIT = 1 << 30


class LLM(EngineForTraining):
    """Loads, compiles and warms up at construction. Close it, or use it as a context manager.

    Args:
        model: the value of the server's `--model`.
        tokenizer: a folder, here or in a bucket, or a hub name, with a tokenizer that replaces the model's own.
        tokenizer_revision: the branch, tag or commit of the tokenizer on the hub.
        served_model_name: the model's name in request bodies, or several; by default `model`.
        report: is called with the lines of the start-up report.
        worker_extension_cls: a class, or its name, whose methods `collective_rpc` calls on the worker. They reach
            `self.model_runner.model.load_weights`.
        settings: the server's other flags by name, such as `max_num_seqs=16` or `generation_config="vllm"`.
            `models={"NAME": PATH}` loads more models; `generate(..., model="NAME")` asks one.

    Raises:
        ValueError: a setting is unknown, or the model is not found or does not fit.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        tokenizer: str | Path | None = None,
        tokenizer_revision: str | None = None,
        served_model_name: str | Sequence[str] | None = None,
        report: Callable[[str], None] = lambda line: None,
        worker_extension_cls: str | type | None = None,
        **settings: Any,
    ) -> None:
        worker = worker_class(worker_extension_cls)
        # The queue has no limit: the engine refuses no request for a full queue.
        keywords = {"model": model, "trust_request_chat_template": True} | settings | {"max_queue": NO_LIMIT}
        self.settings, args = read_keywords(keywords, *DECLARED)
        names = [served_model_name or model] if isinstance(served_model_name, str | None) else served_model_name
        self.model_name, *_ = names
        check_names_differ(self.settings.named_models, self.settings.adapters, names)
        asked = None if tokenizer is None else place(tokenizer, "tokenizer")
        source = self.settings.source()
        of_requests = offline_settings(args, source.path)
        with ScratchFolder() as spare:
            folder = tokenizer_folder(asked, source, spare.path, tokenizer_revision)
            tokens = ByteLevelTokenizer.from_folder(folder, vocab_size=source.config.vocab_size)
            self._tokens = tokens
            served = ServedSettings(engine=self.settings, tokenizer=folder)
            engine, built, adapters = build(served, report, lambda vocab_size: tokens)
        check_alone(worker, num_chips(built))
        self._thread = LoopThread()
        super().__init__(engine, built, adapters, self._thread, worker)
        # Twice the rows: the next request is waiting when one finishes.
        self.max_in_flight = 2 * engine.ladder.config.max_num_seqs
        self._beginning = threading.Lock()
        self._pending: list[Pending] = []  # those that may not have ended
        server = Settings(
            tokenizer_folder=folder,
            model_names=tuple(names),
            lora_folder=None if self.settings.lora_folder is None else Path(self.settings.lora_folder),
            models_folder=None if self.settings.models_folder is None else Path(self.settings.models_folder),
            **of_requests,
        )
        self._state = create_state(server, self._client, tokens)
        self._app = create_app(self._state)
        self._thread.run(self._client.start())

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """An LLM with these keywords."""
        return cls(**vars(engine_args))

    def generate(self, prompts: Prompts, sampling_params: AllParams = None, **options: Unpack[Options]) -> Results:
        """Continues one prompt or several: texts, token ids, or vLLM's dicts with `prompt` or `prompt_token_ids`.

        Args:
            options: see `scripts.offline.arguments.Options`.

        Raises:
            RefusedError: the server refuses a prompt; the first one is named. Or an adapter cannot be loaded.
            ValueError: an argument has another type.
        """
        self._check_awake()
        return self._continue(prompts, sampling_params, options).wait_or_end()

    def enqueue(self, prompts: Prompts, sampling_params: AllParams = None, **options: Unpack[Options]) -> Pending:
        """Starts to continue prompts, and returns at once. The returned object gives the results, also partial ones.

        The arguments are those of `generate`. The engine may be paused or asleep meanwhile, and its weights may change.
        """
        return self._continue(prompts, sampling_params, options, as_ids=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: AllParams = None,
        **options: Unpack[ChatOptions],
    ) -> Results:
        """Answers one conversation, a list of messages, or several. Errors are those of `generate`.

        Args:
            options: see `scripts.offline.arguments.ChatOptions`.
        """
        self._check_awake()
        items = [_TOLD | {"messages": conversation} for conversation in conversations_of(messages)]
        bodies = self._bodies(items, sampling_params, options, is_chat=True)
        return self._begin(CHAT, bodies, [None] * len(bodies), options).wait_or_end()

    def encode(
        self,
        prompts: Prompts,
        pooling_params: AllParams = None,
        *,
        pooling_task: str = "embed",
        **options: Unpack[Options],
    ) -> list[PoolingRequestOutput]:
        """The vectors of one prompt or several, in the forms of `generate`. Needs `enable_embeddings=True`. Errors and
        options are those of `generate`.

        Args:
            pooling_params: `PoolingParams`, or fields of the request bodies.
            pooling_task: "embed". The model has no heads for others.
        """
        self._check_awake()
        told = {"encoding_format": "base64", "return_token_ids": True, "task": pooling_task}
        bodies = self._bodies([prompt | told for prompt in prompts_of(prompts, "input")], pooling_params, options)
        sent = self._send([(EMBEDDINGS, body) for body in bodies], options)
        return [pooled(answer) for answer in sent.wait_or_end()]

    embed = encode

    def score(self, data_1: Prompts, data_2: Prompts, **options: Unpack[Options]) -> list[PoolingRequestOutput]:
        """The similarity of each prompt of `data_2` with the one at its place in `data_1`, or with its only one: the
        cosine of their vectors, as `outputs.score`. Raises ValueError for other numbers of prompts."""
        first, second = (prompts_of(data, "prompt") for data in (data_1, data_2))
        if len(first) not in (1, len(second)):
            raise ValueError(f"data_1: one prompt, or as many as data_2, {len(second)}, not {len(first)}")
        found = self.encode([*first, *second], **options)
        queries, others = found[: len(first)], found[len(first) :]
        return [scored(query, other) for query, other in zip(cycle(queries), others, strict=False)]

    def classify(self, prompts: Prompts, *args: Any, **options: Any) -> Never:
        """Raises ValueError, because the model has no classes."""
        raise ValueError(
            "classify: the model has no classes. generate() tells the probabilities of labels, with SamplingParams("
            "max_tokens=1, logprob_token_ids=[...])"
        )

    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams, lora_request: LoraRequests = None, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of each prompt that a search over `beam_width` beams finds, best first."""
        told = _TOLD | params.fields()
        bodies = self._with_adapters([body | told for body in prompts_of(prompts, "prompt")], lora_request)
        sent = self._send([(COMPLETIONS, body) for body in bodies], {"use_tqdm": use_tqdm})
        decode = partial(decode_text, self._tokens, skip_special_tokens=params.skip_special_tokens)
        adapters = adapters_of(lora_request, len(bodies))
        return [beams_of(*own, decode) for own in zip(sent.wait_or_end(), adapters, strict=True)]

    def get_tokenizer(self) -> FastTokenizer:
        """The tokenizer with its chat template, as a new object of transformers."""
        return self._tokens.to_transformers()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a request that sets none: those of the model's generation_config.json."""
        values = dataclasses.asdict(self._state.model.generation_defaults)
        del values["max_new_tokens"]
        return SamplingParams(**values)

    def get_metrics(self) -> list[Sample]:
        """The server's metrics as they are now: those of its /metrics, each with `name`, `labels` and `value`."""
        families = text_string_to_metric_families(self._state.metrics.render().decode())
        return [sample for family in families for sample in family.samples]

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

    def on_loop[T](self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the loop of the requests."""
        return self._thread.submit(work)

    def stats(self) -> EngineStats:
        """The engine's counters and gauges, as on the server's `/metrics`."""
        return self._client.stats

    def close(self) -> None:
        """Ends pending requests, the engine and its threads. May be called again."""
        if self._thread.is_closed:
            return
        self._end_pending()
        self.engine.shutdown()
        self._thread.run(self._client.close())
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
        if any(adapters) and any("model" in body for body in bodies):
            raise ValueError("model, lora_request: an adapter names its model (base_model_name), so give one of them")
        for request in dict.fromkeys(filter(None, adapters)):
            if request.lora_name == self.model_name:
                raise ValueError(f"lora_request: {request.lora_name!r} is the name of the model")
            loaded = self._client.adapters.get(request.lora_name)
            name, path, base = request.lora_name, request.lora_path, request.base_model_name
            if request.load_inplace or loaded is None or (loaded.path, loaded.base_model) != (path, base):
                change = LoadAdapter(name, path, base, IfLoaded.REPLACE)
                reply = self._thread.run(self._client.ask(change))
                if reply.error is not None:
                    raise RefusedError(reply.status, f"lora_request {name!r}: {reply.error}")
        models = [{} if adapter is None else {"model": adapter.lora_name} for adapter in adapters]
        return [body | model for body, model in zip(bodies, models, strict=True)]

    def _bodies(
        self, items: Sequence[dict[str, Any]], params: AllParams, options: Options, *, is_chat: bool = False
    ) -> list[dict[str, Any]]:
        """The request bodies of these items with their parameters."""
        fields = fields_of(options, ChatOptions if is_chat else Options, len(items))
        pairs = zip(paired(items, params, is_chat=is_chat), fields, strict=True)
        bodies = [own | item | given for (item, own), given in pairs]
        return self._with_adapters(bodies, options.get("lora_request"))

    def _continue(self, prompts: Prompts, params: AllParams, options: Options, *, as_ids: bool = False) -> Pending:
        """Sends completions. With `as_ids` all prompts are sent as ids."""
        bodies = self._bodies([prompt | _TOLD for prompt in prompts_of(prompts, "prompt")], params, options)
        texts = [body["prompt"] if isinstance(body["prompt"], str) else None for body in bodies]
        if as_ids:
            self._tokenize(bodies)
        for body in bodies:
            body["fills_context"] = body.get("max_tokens", 0) is None
        return self._begin(COMPLETIONS, bodies, texts, options)

    def _tokenize(self, bodies: Sequence[dict[str, Any]]) -> None:
        """Replaces texts by token ids."""
        bodies = [body for body in bodies if isinstance(body["prompt"], str)]
        names = ("model", "prompt", "add_special_tokens")
        asked = [(TOKENIZE, {name: body[name] for name in names if name in body}) for body in bodies]
        for body, answer in zip(bodies, self._send(asked).wait_or_end(), strict=True):
            body["prompt"] = answer["tokens"]

    def _begin(
        self, path: str, bodies: Sequence[dict[str, Any]], texts: Sequence[str | None], options: Options
    ) -> Pending:
        """Sends the requests. `texts` has the prompt of each request that was given as a text."""
        asked = []
        for body, text in zip(bodies, texts, strict=True):
            id, ids = body.setdefault("request_id", uuid.uuid4().hex), body.get("prompt")
            own = EnqueuedPrompt(
                answer_id=f"{ID_PREFIXES[path]}-{id}",
                prompt=text,
                prompt_token_ids=() if ids is None or isinstance(ids, str) else ids,
                n=body.get("n") or 1,
                read=self._reader(body),
            )
            asked.append(own)
        sent = self._send([(path, body) for body in bodies], options)
        pending = Pending(sent, asked, self._thread, self._state.generations, self._client)
        with self._beginning:
            self._pending = [*(earlier for earlier in self._pending if not earlier.is_done), pending]
        return pending

    def _reader(self, params: Mapping[str, Any]) -> Callable[[Sequence[ScoredToken]], list[Logprobs]] | None:
        """Reads the log-probabilities of tokens of a request with these fields; None: it asks for none."""
        ids, asked = params.get("logprob_token_ids"), params.get("logprobs")
        if not ids and asked is None:
            return None
        try:
            tokenizer = self._thread.run(self._state.find_model(params.get("model"))).tokenizer
        except RequestError as error:
            raise RefusedError(error.status, f"model: {error}") from error
        num_top, ranked = (len(set(ids)), False) if ids else (int(asked or 0), True)

        def read(scored: Sequence[ScoredToken]) -> list[Logprobs]:
            tokens = ((token.token_id, token.scores) for token in scored if token.scores is not None)
            return logprobs_of([scores_by_id(tokenizer, *token, num_top, ranked=ranked) for token in tokens]) or []

        return read

    def _send(self, requests: Sequence[tuple[str, dict[str, Any]]], options: Options | None = None) -> RequestsInFlight:
        self._check_open()
        self.take_loaded()
        named = [(path, {"model": self.model_name, **body}) for path, body in requests]
        return RequestsInFlight(
            self._thread, self._client, self._post_all, named, use_tqdm=bool((options or {}).get("use_tqdm"))
        )

    def _abort_unsent(self) -> None:
        for pending in self._pending:
            pending.stop()

    def _end_pending(self) -> None:
        for pending in self._pending:
            pending.end()

    def _check_awake(self) -> None:
        if self.is_sleeping:
            raise RuntimeError("this LLM sleeps: wake_up() first, or enqueue() what is to wait")


_TOLD = {"return_token_ids": True, "return_weight_versions": True, "return_logprobs_by_id": True}


def random_uuid() -> str:
    """A new id for a request."""
    return uuid.uuid4().hex


class AsyncLLM(AsyncEngine):
    """An `LLM` for an event loop."""

    make = LLM


AsyncEngineArgs, AsyncLLMEngine = EngineArgs, AsyncLLM  # vLLM's older names
