"""POST /kv/prefill: computes a prompt for another server, which then fetches its pages (`server.api.prefills`).

Only a server with `--kv-role prefill` has the route.
"""

from __future__ import annotations

import secrets
from array import array

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.answers.answer import AsgiResponse, JsonAnswer, while_connected
from server.api.prefills import PATH, Prefilled, PrefillRequest, differing
from server.api.request.sampling import check_ids
from server.api.route import ApiRoute
from server.api.routes.endpoints import Routes, route, routes_of
from server.api.state import ServerState
from server.engine import wire
from server.engine.embedding import ONE_TOKEN, ComputedPrompt
from server.engine.page_server import TOKEN_BYTES
from server.http.auth import current_client
from server.http.request_error import RequestError, invalid


def prefill_routes(state: ServerState) -> list[ApiRoute]:
    """The routes of prompts for other servers; empty unless this server computes prompts for others."""
    return routes_of(PrefillRoute(state), state) if state.settings.computes_for_others else []


class PrefillRoute(Routes):
    """Answers `/kv/prefill`."""

    @route(f"POST {PATH}", PrefillRequest, generates=True)
    async def create(self, request: Request, asked: PrefillRequest) -> Response:
        """Computes a prompt for another server (--kv-role prefill)."""
        state = self._state
        info = state.engine.info
        if asked.identity != info.page_identity:
            names = differing(asked.identity, info.page_identity)
            raise RequestError(409, f"The pages of the two servers have not the same form or content: {names} differ.")
        if not asked.tokens or len(asked.tokens) % 4:
            raise invalid("tokens", f"must be 32-bit numbers, at least one, not {len(asked.tokens)} bytes")
        ids = array("i", asked.tokens)
        check_ids("tokens", ids, info.vocab_size)
        if (model := await state.find_model(asked.model)).weights != asked.adapter:
            raise RequestError(409, f"The model or LoRA adapter {asked.model!r} has other weights here.")
        token = secrets.token_bytes(TOKEN_BYTES)
        prompt = wire.WireRequest(
            f"prefill-{token.hex()}",
            asked.tokens,
            ONE_TOKEN,
            asked.priority,
            asked.cache_salt,
            state.settings.queue_timeout_s,
            client=current_client(),
            adapter=model.adapter,
            model=model.identity,
            keep_as=token,
        )
        prefill = ComputedPrompt(state.engine)
        prefill.submit([prompt])

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async with while_connected(receive, prefill):
                await prefill.wait()
                done = Prefilled(
                    token=token, port=info.page_port, key=info.page_key, keep_s=state.settings.transfer_timeout_s
                )
                await JsonAnswer(done)(scope, receive, send)

        return AsgiResponse(answer)
