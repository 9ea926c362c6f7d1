"""The routes of embeddings and of scores from them: /v1/embeddings, /pooling, /score and /rerank.

A vector has the length 1 and is pooled from the model's hidden states. The name of a special token in a text stays
text. The tokenizer's begin-of-text is added before a text, unless `add_special_tokens` is false. Token ids are used
unchanged. The score of two texts is the cosine of their vectors, as in vLLM for embedding models.
"""

from __future__ import annotations

import base64
import math
import sys
import time
import uuid
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.answers.answer import AsgiResponse, JsonAnswer, while_connected
from server.api.record import begun
from server.api.request.generation_plan import cache_salt_of, deadline_of, times_left
from server.api.request.limits import Given, check_kinds, check_text_length, kept_part, listed
from server.api.request.prompts import read_prompts
from server.api.request.schemas import Document, EmbeddingRequest, EmbedFields, RerankRequest, ScoreRequest
from server.api.routes.endpoints import Routes, route
from server.api.served_model import ServedModel
from server.api.worker_threads import in_thread
from server.engine import wire
from server.engine.embedding import ONE_TOKEN, Embeddings
from server.http.auth import current_client
from server.http.encoding import NestedList, list_of
from server.http.request_error import NOT_FOUND, RequestError, invalid, too_long

Fields = dict[str, Any]


class Started(NamedTuple):
    """The embeddings of a request, which the engine computes."""

    embeddings: Embeddings
    id: str
    model: str
    prompts: list[list[int]]


class EmbeddingRoutes(Routes):
    """Answers the routes of embeddings. Without --enable-embeddings they answer 404, with the reason."""

    @route("POST /v1/embeddings", EmbeddingRequest, generates=True)
    async def embeddings(self, request: Request, body: EmbeddingRequest) -> Response:
        """Turns texts into vectors (--enable-embeddings)."""
        return await self._vectors(request, body, kind="embedding", field="embedding")

    @route("POST /pooling", EmbeddingRequest, generates=True)
    async def pooling(self, request: Request, body: EmbeddingRequest) -> Response:
        """As /v1/embeddings, in vLLM's form (--enable-embeddings)."""
        return await self._vectors(request, body, kind="pooling", field="data")

    async def _vectors(self, request: Request, body: EmbeddingRequest, *, kind: str, field: str) -> Response:
        size = (await self._state.find_model(body.model)).embedding_size
        if body.dimensions not in (None, size):
            message = f"this model's vectors have {size} numbers, and it was not trained for fewer"
            raise invalid("dimensions", message)
        started = await self._start(request, body, {"input": body.input})
        as_base64 = body.encoding_format == "base64"
        shown = {"id": started.id} if body.return_token_ids else {}

        def data(vectors: Sequence[bytes]) -> NestedList:
            return NestedList(
                {"object": kind, "index": index, field: _encoded(vector, as_base64=as_base64)}
                | ({"prompt_token_ids": started.prompts[index]} if body.return_token_ids else {})
                for index, vector in enumerate(vectors)
            )

        return self._answer(started, lambda vectors: {"object": "list", "data": data(vectors)} | shown)

    @route("POST /score", ScoreRequest, generates=True)
    @route("POST /v1/score", ScoreRequest, generates=True)
    async def score(self, request: Request, body: ScoreRequest) -> Response:
        """How similar texts are (--enable-embeddings)."""
        first = body.text_1 if body.queries is None else body.queries
        second = body.text_2 if body.documents is None else body.documents
        queries, documents = (listed(name, texts) for name, texts in (("text_1", first), ("text_2", second)))
        if len(queries) not in (1, len(documents)):
            raise invalid("text_1", f"must be one text or {len(documents)}, as many as text_2, got {len(queries)}")
        started = await self._start(request, body, {"text_1": first, "text_2": second})

        def scores(vectors: Sequence[bytes]) -> Fields:
            own = [_numbers(vector) for vector in vectors[: len(queries)]] * (len(documents) // len(queries))
            pairs = zip(own, map(_numbers, vectors[len(queries) :]), strict=True)
            data = [
                {"index": index, "object": "score", "score": math.sumprod(*pair)} for index, pair in enumerate(pairs)
            ]
            return {"id": started.id, "object": "list", "created": int(time.time()), "data": list_of(data, len(data))}

        return self._answer(started, scores)

    @route("POST /rerank", RerankRequest, generates=True)
    @route("POST /v1/rerank", RerankRequest, generates=True)
    @route("POST /v2/rerank", RerankRequest, generates=True)
    async def rerank(self, request: Request, body: RerankRequest) -> Response:
        """Ranks documents by a query (--enable-embeddings)."""
        texts = [document.text if isinstance(document, Document) else document for document in body.documents]
        started = await self._start(request, body, {"query": body.query, "documents": texts})

        def results(vectors: Sequence[bytes]) -> Fields:
            query, *others = map(_numbers, vectors)
            scores = [math.sumprod(query, other) for other in others]
            order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: body.top_n or None]
            shows = body.return_documents is not False
            documents = {i: {"document": {"text": texts[i]}} if shows else {} for i in order}
            ranked = ({"index": i, **documents[i], "relevance_score": scores[i]} for i in order)
            return {"id": started.id, "results": NestedList(ranked)}

        return self._answer(started, results)

    @route("POST /classify")
    async def classify(self, request: Request) -> Response:
        """Is not supported: it answers 404."""
        message = (
            "The model has no classes. /v1/completions tells the probabilities of labels that a prompt asks for: give "
            "their tokens as `logprob_token_ids`, with `max_tokens` 1. /score and /rerank compare texts "
            "(--enable-embeddings)."
        )
        raise RequestError(404, message, type=NOT_FOUND)

    def check_served(self) -> None:
        """Raises RequestError 404 if the engine makes no embeddings."""
        if self._state.engine.info.embedding_size is None:
            message = "This server makes no embeddings: start it with --enable-embeddings."
            raise RequestError(404, message, type=NOT_FOUND)

    def _answer(self, started: Started, fields: Callable[[Sequence[bytes]], Fields]) -> Response:
        """Waits for all vectors, or until the client disconnects. `fields` makes the answer from them, in a thread if
        there are many."""
        state, embeddings = self._state, started.embeddings

        async def send_all(scope: Scope, receive: Receive, send: Send) -> None:
            async with while_connected(receive, embeddings):
                vectors = await embeddings.wait()
                made = await in_thread(sum(map(len, vectors)) // 4, fields, vectors)
                num_tokens = sum(map(len, started.prompts))
                usage: Fields = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
                if state.settings.show_cached_tokens:
                    usage["prompt_tokens_details"] = {"cached_tokens": embeddings.num_cached_tokens}
                await JsonAnswer({**made, "model": started.model, "usage": usage})(scope, receive, send)

        return AsgiResponse(send_all)

    async def _start(self, request: Request, body: EmbedFields, fields: dict[str, Given]) -> Started:
        """Submits the inputs of the fields, one after the other. Raises RequestError."""
        state = self._state
        model = await state.find_model(body.model)
        deadline = deadline_of(body.timeout_s, request)
        for param, value in (("normalize", body.normalize), ("use_activation", body.use_activation)):
            if value is False:
                raise invalid(param, "vectors always have the length 1")
        prompts = [
            prompt for param, given in fields.items() for prompt in await self._prompts(model, body, param, given)
        ]
        packed = wire.packed_prompts(prompts)
        left_s, queue_s = times_left(state, deadline)
        embeddings = Embeddings(state.engine, on_limit=state.metrics.observe_limit)
        id = f"embd-{uuid.uuid4().hex}"
        salt = cache_salt_of(state, body.cache_salt)
        requests = [
            wire.WireRequest(
                f"{id}-{number}",
                prompt,
                ONE_TOKEN,
                body.priority or 0,
                salt,
                queue_s,
                embeds=True,
                client=current_client(),
                group=id,
                adapter=model.adapter,
                model=model.identity,
            )
            for number, prompt in enumerate(packed)
        ]
        embeddings.submit(requests, timeout_s=left_s)
        state.generations[id] = embeddings
        begun(embeddings, answer_id=id, model=model.name, num_prompt_tokens=sum(map(len, prompts)))
        return Started(embeddings, id, model.name, prompts)

    async def _prompts(self, model: ServedModel, body: EmbedFields, param: str, inputs: Given) -> list[list[int]]:
        most, max_model_len = self._state.settings.max_embedding_inputs, model.max_model_len
        given = listed(param, inputs)
        if len(given) > most:
            raise invalid(param, f"at most {most} inputs per request are allowed, got {len(given)}")
        check_kinds(param, inputs)
        for prompt in given:
            if isinstance(prompt, str):
                check_text_length(len(prompt), model.tokenizer, max_model_len, least_output=0)
        wanted, side = body.truncate_prompt_tokens, body.truncation_side
        kept = kept_part(wanted, side, max_model_len, least_output=0, default="right")
        affixes = body.add_special_tokens is not False
        prompts = await read_prompts(model, param, given, kept, special=False, affixes=affixes)
        for number, ids in enumerate(prompt.ids for prompt in prompts):
            if not ids:
                raise invalid(param, f"input number {number} is empty")
            if len(ids) > max_model_len:
                raise too_long(
                    f"This model embeds at most {max_model_len} tokens at once, and input number {number} has "
                    f"{len(ids)}. Please shorten it, or give `truncate_prompt_tokens`.",
                    param=param,
                )
        return [prompt.ids for prompt in prompts]


def _numbers(vector: bytes) -> array[float]:
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _encoded(vector: bytes, *, as_base64: bool) -> Any:
    if as_base64:
        return base64.b64encode(vector).decode()
    numbers = _numbers(vector)
    return list_of(numbers, len(numbers))
