"""POST /v1/embeddings: vectors of length 1, pooled from the model's hidden states.

A text is only text: the name of a special token in it is no token. The tokenizer's begin-of-text is put before it,
unless `add_special_tokens` is false. Token ids are taken as they are.
"""

from __future__ import annotations

import base64
import sys
import time
import uuid
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batcher.request import SamplingParams
from server.api.answers.answer import ClientGone, LongJson, watched
from server.api.request.body import BodyReader
from server.api.request.fields import EMBEDDING_FIELDS
from server.api.request.limits import Truncation, check_kinds, check_text_length, listed
from server.api.request.plan import LEAST_LEFT_S, TIMEOUT_HEADER, cache_salt_of, deadline_of
from server.api.request.sampling import check_ids, check_priority
from server.api.request.schemas import EmbeddingRequest
from server.api.route import ApiRoute
from server.api.state import ServerState
from server.engine import wire
from server.engine.embedding import Embeddings
from server.http.auth import current_client
from server.http.encoding import NestedList, json_pieces, list_of
from server.http.request_error import NOT_FOUND, RequestError, invalid, too_long

PATH = "/v1/embeddings"
FORMATS = ("float", "base64")
_NOTHING_DRAWN = SamplingParams(max_tokens=1, temperature=0)


def embedding_routes(state: ServerState) -> list[ApiRoute]:
    """The route of embeddings. An engine without them answers 404 there, in words."""
    return [
        ApiRoute(
            path=PATH,
            endpoint=EmbeddingRoute(state).__call__,
            method="POST",
            generates=True,
            body=EmbeddingRequest,
            summary="Turns texts into vectors (--enable-embeddings).",
        )
    ]


class EmbeddingRoute:
    """Answers `/v1/embeddings`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._reader = BodyReader(EmbeddingRequest, EMBEDDING_FIELDS, strict=state.settings.strict_fields)

    async def __call__(self, request: Request) -> Response:
        state = self._state
        size = state.client.info.embedding_size
        if size is None:
            message = "This server makes no embeddings: start it with --enable-embeddings."
            raise RequestError(404, message, type=NOT_FOUND)
        body = await self._reader.read(request, state.body_limits, state.threads)
        model = state.check_model(body.model)
        deadline = deadline_of(body.timeout_s, request.headers.get(TIMEOUT_HEADER))
        _check(body, size)
        prompts = await self._prompts(body)
        num_tokens = sum(map(len, prompts))
        packed = await state.threads.in_thread(num_tokens, wire.packed_prompts, prompts)
        left_s = None if deadline is None else max(LEAST_LEFT_S, deadline - time.monotonic())
        embeddings = Embeddings(state.client, on_limit=state.metrics.observe_limit)
        id = f"embd-{uuid.uuid4().hex}"
        embeddings.submit(self._requests(id, body, packed, left_s), timeout_s=left_s)
        state.generations[id] = embeddings
        return EmbeddingsAnswer(
            state, embeddings, model=model, num_tokens=num_tokens, as_base64=body.encoding_format == "base64"
        )

    async def _prompts(self, body: EmbeddingRequest) -> list[list[int]]:
        state, most = self._state, self._state.settings.max_embedding_inputs
        given = listed("input", body.input)
        if len(given) > most:
            raise invalid("input", f"at most {most} inputs per request are allowed, got {len(given)}")
        check_kinds("input", body.input)
        max_model_len = state.client.info.max_model_len
        for prompt in given:
            if isinstance(prompt, str):
                check_text_length(len(prompt), state.tokenizer, max_model_len)
        wanted, side = body.truncate_prompt_tokens, body.truncation_side
        kept = Truncation.of(wanted, side, max_model_len, default="right").kept(least_output=1)
        return await state.threads.in_thread(sum(map(len, given)), self._encode, body, given, kept)

    def _encode(self, body: EmbeddingRequest, given: Sequence[str | list[int]], kept: slice) -> list[list[int]]:
        tokenizer, info = self._state.tokenizer, self._state.client.info
        encoded = iter(tokenizer.encode_plain([prompt for prompt in given if isinstance(prompt, str)]))
        prompts = []
        for number, prompt in enumerate(given):
            if isinstance(prompt, str):
                ids = next(encoded)
                ids = ids if body.add_special_tokens is False else tokenizer.with_affixes(ids)
            else:
                check_ids("input", prompt, info.vocab_size)
                ids = prompt
            ids = ids[kept]
            if not ids:
                raise invalid("input", f"input number {number} is empty")
            if len(ids) >= info.max_model_len:
                raise too_long(
                    f"This model embeds at most {info.max_model_len - 1} tokens at once, and input number {number} has "
                    f"{len(ids)}. Please shorten it, or give `truncate_prompt_tokens`.",
                    param="input",
                )
            prompts.append(ids)
        return prompts

    def _requests(
        self, id: str, body: EmbeddingRequest, packed: Sequence[bytes], left_s: float | None
    ) -> list[wire.WireRequest]:
        salt = cache_salt_of(self._state, body.cache_salt)
        waits_s = min((s for s in (left_s, self._state.settings.queue_timeout_s) if s is not None), default=None)
        return [
            wire.WireRequest(
                f"{id}-{number}",
                prompt,
                _NOTHING_DRAWN,
                body.priority or 0,
                salt,
                waits_s,
                embeds=True,
                client=current_client(),
                group=id,
            )
            for number, prompt in enumerate(packed)
        ]


class EmbeddingsAnswer(Response):
    """An ASGI response that waits for all vectors, or for its client to go away."""

    def __init__(
        self, state: ServerState, embeddings: Embeddings, *, model: str, num_tokens: int, as_base64: bool
    ) -> None:
        self._state = state
        self._embeddings = embeddings
        self._model = model
        self._num_tokens = num_tokens
        self._as_base64 = as_base64
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with watched(self._embeddings, receive):
            vectors = await self._embeddings.wait()
            await LongJson(self._state.turns, self._pieces(vectors), self._check_client)(scope, receive, send)

    def _check_client(self) -> None:
        if isinstance(self._embeddings.error, ClientGone):
            raise self._embeddings.error

    def _pieces(self, vectors: Sequence[bytes]) -> Iterator[bytes]:
        usage: dict[str, Any] = {"prompt_tokens": self._num_tokens, "total_tokens": self._num_tokens}
        if self._state.settings.show_cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": self._embeddings.num_cached_tokens}
        data = NestedList(
            {"object": "embedding", "index": index, "embedding": self._embedding(vector)}
            for index, vector in enumerate(vectors)
        )
        return json_pieces({"object": "list", "data": data, "model": self._model, "usage": usage})

    def _embedding(self, vector: bytes) -> Any:
        if self._as_base64:
            return base64.b64encode(vector).decode()
        numbers = array("f", vector)
        if sys.byteorder == "big":
            numbers.byteswap()
        return list_of(numbers, len(numbers))


def _check(body: EmbeddingRequest, size: int) -> None:
    """Raises RequestError 400 for vectors that cannot be had."""
    if body.encoding_format not in (None, *FORMATS):
        raise invalid("encoding_format", f"must be one of {', '.join(FORMATS)}, got {body.encoding_format[:40]!r}")
    if body.dimensions not in (None, size):
        message = f"this model's vectors have {size} numbers, and it was not trained for fewer"
        raise invalid("dimensions", message)
    for param, value in (("normalize", body.normalize), ("use_activation", body.use_activation)):
        if value is False:
            raise invalid(param, "vectors always have the length 1")
    check_priority(body.priority)
