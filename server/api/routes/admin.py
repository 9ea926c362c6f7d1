"""The routes for administrators of a running server. Each needs an admin key (`--admin-api-key`)."""

from __future__ import annotations

import logging
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.answers.answer import json_response
from server.api.request.body_reader import BodyReader
from server.api.request.fields import FieldTable
from server.api.route import Access, ApiRoute
from server.api.state import ServerState
from server.http.errors import unavailable

logger = logging.getLogger("pallas_serve")


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to abort others."""

    request_ids: list[str] | None = None  # those of answers, such as `chatcmpl-...`; None: all


class LogLevelRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to change the log level."""

    level: Literal["debug", "info", "warning", "error"]


def admin_routes(state: ServerState) -> list[ApiRoute]:
    """The routes that need an admin key."""
    admin = Admin(state)
    return [
        ApiRoute(
            path="/reset_prefix_cache",
            endpoint=admin.reset_prefix_cache,
            method="POST",
            access=Access.ADMIN,
            summary="Forgets the K/V of earlier prompts.",
        ),
        ApiRoute(
            path="/abort_requests",
            endpoint=admin.abort_requests,
            method="POST",
            access=Access.ADMIN,
            body=AbortRequest,
            summary="Ends running requests with an error.",
        ),
        ApiRoute(path="/log_level", endpoint=admin.log_level, access=Access.ADMIN, summary="The level of the log."),
        ApiRoute(
            path="/log_level",
            endpoint=admin.set_log_level,
            method="POST",
            access=Access.ADMIN,
            body=LogLevelRequest,
            summary="Sets the level of the log.",
        ),
    ]


class Admin:
    """Answers the admin routes."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        strict = state.settings.strict_fields
        self._abort = BodyReader(AbortRequest, FieldTable(kind=AbortRequest), strict=strict)
        self._level = BodyReader(LogLevelRequest, FieldTable(kind=LogLevelRequest), strict=strict)

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Running requests keep their pages; later requests do not find them."""
        self._state.client.reset_prefix_cache()
        return json_response({"status": "ok"})

    async def abort_requests(self, request: Request) -> Response:
        state = self._state
        body = await self._abort.read(request, state.body_limits, state.aside)
        ids = list(state.generations) if body.request_ids is None else body.request_ids
        ended = [id for id in ids if (generation := state.generations.get(id)) is not None and not generation.finished]
        for id in ended:
            state.generations[id].fail(unavailable("The request was aborted by the server's administrator."))
        logger.info("%d requests were aborted by the administrator", len(ended))
        return json_response({"aborted": ended})

    async def log_level(self, request: Request) -> Response:
        return self._current_level()

    async def set_log_level(self, request: Request) -> Response:
        state = self._state
        body = await self._level.read(request, state.body_limits, state.aside)
        logger.setLevel(body.level.upper())
        return self._current_level()

    def _current_level(self) -> Response:
        level: dict[str, Any] = {"level": logging.getLevelName(logger.getEffectiveLevel()).lower()}
        return json_response(level)
