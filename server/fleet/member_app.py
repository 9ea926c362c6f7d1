"""What an HTTP process answers to the parent and to the other HTTP processes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.peers import FORWARDED, KEY_FIELD, Aborting, EngineDied, Keeping, Level
from server.api.routes.admin import aborted_by_administrator
from server.api.routes.responses.routes import PATH
from server.api.state import ServerState
from server.engine.door import DoorClient
from server.fleet.messages import packed, unpacked
from server.http.auth import current_key
from server.http.signals import Ending

logger = logging.getLogger("pallas_serve")


def member_app(state: ServerState, public: Starlette, engines: Sequence[DoorClient], ending: Ending) -> Starlette:
    """The private application. Besides the routes for the parent it has those of `public` that are about responses
    which this process keeps: their requests have passed another process's gate."""
    member = _Member(state, engines, ending)
    own = ("end", "engine_died", "abort", "keeps", "log_level")
    routes = [Route(f"/{name}", getattr(member, name), methods=["POST"]) for name in own]
    kept = [route for route in public.routes if isinstance(route, Route) and route.path.startswith(PATH)]
    app = Starlette(
        routes=[*routes, *kept],
        middleware=[Middleware(_Forwarded, state=state)],
        exception_handlers=dict(public.exception_handlers),
    )
    app.router.redirect_slashes = False
    return app


class _Forwarded:
    """Marks requests that another process has sent on, with their API keys, and counts them: this process does not end
    before them."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_forwarded = scope["path"].startswith(PATH)
        scope[FORWARDED] = True
        current_key.set(bytes.fromhex(dict(scope["headers"]).get(KEY_FIELD, b"").decode()))
        self._state.num_forwarded += is_forwarded
        try:
            await self._app(scope, receive, send)
        finally:
            self._state.num_forwarded -= is_forwarded


class _Member:
    def __init__(self, state: ServerState, engines: Sequence[DoorClient], ending: Ending) -> None:
        self._state = state
        self._engines = engines
        self._ending = ending

    async def end(self, request: Request) -> Response:
        """The first call lets running requests finish, the second ends them."""
        self._ending.ask()
        return packed(None)

    async def engine_died(self, request: Request) -> Response:
        message = await unpacked(request, EngineDied)
        self._engines[message.engine].die(message.reason)
        return packed(None)

    async def abort(self, request: Request) -> Response:
        message = await unpacked(request, Aborting)
        return packed(self._state.abort(message.request_ids, aborted_by_administrator()))

    async def keeps(self, request: Request) -> Response:
        return packed(self._state.keeps_response((await unpacked(request, Keeping)).response_id))

    async def log_level(self, request: Request) -> Response:
        logger.setLevel((await unpacked(request, Level)).level)
        return packed(None)
