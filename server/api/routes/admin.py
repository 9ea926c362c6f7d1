"""The routes for administrators of a running server. Each needs an admin key (`--admin-api-key`)."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.answers.answer import json_response
from server.api.peers import Peers
from server.api.request.body import BodyReader
from server.api.request.fields import FieldTable
from server.api.request.schemas import ITEMS
from server.api.route import Access, ApiRoute
from server.api.state import ServerState
from server.engine.client import ProcessEngineClient, WeightsError
from server.engine.group import OwnEngines
from server.engine.wire import WeightsChange
from server.http.request_error import RequestError, invalid, unavailable, unsupported

logger = logging.getLogger("pallas_serve")


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to abort others."""

    request_ids: Annotated[list[str], ITEMS] | None = None  # those of answers, such as `chatcmpl-...`; None: all


class LogLevelRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to change the log level."""

    level: Literal["debug", "info", "warning", "error"]


class ReloadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to load other weights."""

    model: str | None = None  # a folder or file on the server's machine, or on each host; None: the start's


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
        ApiRoute(
            path="/admin/reload",
            endpoint=admin.reload,
            method="POST",
            access=Access.ADMIN,
            body=ReloadRequest,
            summary="Loads other weights of the same shapes.",
        ),
        ApiRoute(
            path="/sleep",
            endpoint=admin.sleep,
            method="POST",
            access=Access.ADMIN,
            summary="Moves the weights to the host's memory and frees the K/V; requests wait.",
        ),
        ApiRoute(
            path="/wake_up",
            endpoint=admin.wake_up,
            method="POST",
            access=Access.ADMIN,
            summary="Moves the weights back to the device.",
        ),
        ApiRoute(
            path="/is_sleeping", endpoint=admin.is_sleeping, access=Access.ADMIN, summary="Whether the engine sleeps."
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


def aborted_by_administrator() -> RequestError:
    """The error of a request that `/abort_requests` has ended."""
    return unavailable("The request was aborted by the server's administrator.")


class Admin:
    """Answers the admin routes."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        strict = state.settings.strict_fields
        self._abort = BodyReader(AbortRequest, FieldTable(kind=AbortRequest), strict=strict)
        self._reload = BodyReader(ReloadRequest, FieldTable(kind=ReloadRequest), strict=strict)
        self._level = BodyReader(LogLevelRequest, FieldTable(kind=LogLevelRequest), strict=strict)

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Running requests keep their pages; later requests do not find them."""
        self._state.client.reset_prefix_cache()
        return json_response({"status": "ok"})

    async def abort_requests(self, request: Request) -> Response:
        """Ends requests with an error, and answers with their ids."""
        state = self._state
        body = await self._abort.read(request, state.body_limits, state.threads)
        ended = state.abort(body.request_ids, aborted_by_administrator())
        if state.peers is not None:
            ended += await state.peers.abort(body.request_ids)
        logger.info("%d requests were aborted by the administrator", len(ended))
        return json_response({"aborted": ended})

    async def reload(self, request: Request) -> Response:
        """Running requests go on with the new weights."""
        state = self._state
        body = await self._reload.read(request, state.body_limits, state.threads)
        return await self._change(WeightsChange.RELOAD, body.model)

    async def sleep(self, request: Request) -> Response:
        """vLLM's level 1."""
        level = request.query_params.get("level", "1")
        if level != "1":
            raise invalid("level", f"it can be 1 only, not {level[:20]!r}")
        return await self._change(WeightsChange.SLEEP)

    async def wake_up(self, request: Request) -> Response:
        """Moves the weights back to the device."""
        if "tags" in request.query_params:
            raise unsupported("tags", "waking up in parts is")
        return await self._change(WeightsChange.WAKE_UP)

    async def is_sleeping(self, request: Request) -> Response:
        """Whether the engine sleeps."""
        weights = self._weights()
        is_sleeping = await weights.is_sleeping() if isinstance(weights, Peers) else weights.is_sleeping
        return json_response({"is_sleeping": is_sleeping})

    async def _change(self, change: WeightsChange, model: str | None = None) -> Response:
        try:
            await self._weights().change_weights(change, model)
        except WeightsError as error:
            raise RequestError(400, f"The weights were not changed: {error}") from error
        logger.info("weights: %s%s", change.value, "" if model is None else f" from {model}")
        return json_response({"status": "ok"})

    def _weights(self) -> ProcessEngineClient | OwnEngines | Peers:
        """Who can change the weights: this process's engines, or with several HTTP processes the parent's."""
        client, peers = self._state.client, self._state.peers
        if peers is not None:
            return peers
        if not isinstance(client, ProcessEngineClient | OwnEngines):
            raise RequestError(501, "The weights of an engine in this process cannot be changed while it serves.")
        return client

    async def log_level(self, request: Request) -> Response:
        """The level of the log."""
        return self._current_level()

    async def set_log_level(self, request: Request) -> Response:
        state = self._state
        body = await self._level.read(request, state.body_limits, state.threads)
        logger.setLevel(body.level.upper())
        if state.peers is not None:
            await state.peers.set_log_level(body.level.upper())
        return self._current_level()

    def _current_level(self) -> Response:
        level: dict[str, Any] = {"level": logging.getLevelName(logger.getEffectiveLevel()).lower()}
        return json_response(level)
