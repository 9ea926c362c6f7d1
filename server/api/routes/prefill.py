"""POST /kv/prefill: computes a prompt for another server, which then fetches its pages (`server.api.prefills`).

Only a server with `--kv-role prefill` has the route.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batcher.request import FinishReason, SamplingParams
from server.api.answers.answer import watched
from server.api.prefills import PATH, Prefilled, PrefillRequest, differing
from server.api.request.sampling import check_priority
from server.api.route import ApiRoute
from server.api.state import ServerState
from server.engine import wire
from server.engine.client import EngineClient
from server.engine.generation import error_of
from server.engine.page_server import TOKEN_BYTES
from server.http.auth import current_client
from server.http.body import decode_body, read_body
from server.http.request_error import RequestError, invalid, unavailable

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)


def prefill_routes(state: ServerState) -> list[ApiRoute]:
    """None, unless this server computes prompts for others."""
    if not state.settings.computes_for_others:
        return []
    return [
        ApiRoute(
            path=PATH,
            endpoint=PrefillRoute(state).__call__,
            method="POST",
            generates=True,
            body=PrefillRequest,
            summary="Computes a prompt for another server (--kv-role prefill).",
        )
    ]


class PrefillRoute:
    """Answers `/kv/prefill`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._decoder = msgspec.json.Decoder(PrefillRequest)

    async def __call__(self, request: Request) -> Response:
        state = self._state
        body = await read_body(request, state.body_limits)
        asked = await state.threads.in_thread(len(body), decode_body, self._decoder, body)
        info = state.client.info
        if asked.identity != info.page_identity:
            names = differing(asked.identity, info.page_identity)
            raise RequestError(409, f"The pages of the two servers have not the same form or content: {names} differ.")
        check_priority(asked.priority)
        if not asked.tokens or len(asked.tokens) % 4:
            raise invalid("tokens", f"must be 32-bit numbers, at least one, not {len(asked.tokens)} bytes")
        if (await state.find_model(asked.model)).adapter != asked.adapter:
            raise RequestError(409, f"The LoRA adapter {asked.model!r} has other weights here.")
        token = secrets.token_bytes(TOKEN_BYTES)
        prompt = wire.WireRequest(
            f"prefill-{token.hex()}",
            asked.tokens,
            _ONE_TOKEN,
            asked.priority,
            asked.cache_salt,
            state.settings.queue_timeout_s,
            client=current_client(),
            adapter=asked.adapter,
            keep_as=token,
        )
        answer = Prefilled(token=token, port=info.page_port, keep_s=state.settings.transfer_timeout_s)
        return _Answer(_Prefill(state.client, prompt), answer)


class _Prefill:
    """A prompt that the engine computes: a `link.Receiver`, and the `answer.Work` of one answer."""

    def __init__(self, client: EngineClient, request: wire.WireRequest) -> None:
        self.error: Exception | None = None
        self._client = client
        self._id = request.request_id
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if client.death is not None:
            raise unavailable(f"The engine has failed: {client.death}")
        client.submit([(request, self)])

    def on_output(self, output: wire.Output) -> None:
        if output.error is not None or output.finish_reason == FinishReason.ABORT:
            self.fail(error_of(output))
        elif not self._done.done():
            self._done.set_result(None)

    def on_tokens(self, token_ids: Sequence[int]) -> None:
        raise RuntimeError("a prompt that is computed for another server has one token")

    def on_weight_version(self, version: str) -> None:
        """The weights of a server that computes prompts for others do not change."""

    def fail(self, error: Exception) -> None:
        self.error = self.error or error
        if not self._done.done():
            self._done.set_exception(error)

    def abort(self) -> None:
        self._client.abort([self._id])  # is ignored if it has ended

    async def wait(self) -> None:
        """Until the prompt has been computed. Raises the error of `fail`."""
        await self._done


class _Answer(Response):
    def __init__(self, prefill: _Prefill, answer: Prefilled) -> None:
        self._prefill, self._prefilled = prefill, answer
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with watched(self._prefill, receive):
            await self._prefill.wait()
            response = Response(msgspec.json.encode(self._prefilled), media_type="application/json")
            await response(scope, receive, send)
