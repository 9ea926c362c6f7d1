"""The routes for administrators of a running server. Each needs an admin key (`--admin-api-key`)."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from server.api.answers.answer import json_response
from server.api.request.body import BodyReader
from server.api.request.fields import FieldTable
from server.api.request.schemas import ITEMS
from server.api.route import Access, ApiRoute
from server.api.state import ServerState
from server.engine.adapters import AdapterError
from server.engine.wire import IfLoaded, LoadAdapter, UnloadAdapter
from server.http.request_error import BAD_REQUEST, NOT_FOUND, RequestError, invalid, unavailable

logger = logging.getLogger("pallas_serve")


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to abort others."""

    request_ids: Annotated[list[str], ITEMS] | None = None  # those of answers, such as `chatcmpl-...`; None: all


class LogLevelRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to change the log level."""

    level: Literal["debug", "info", "warning", "error"]


class LoadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to load a LoRA adapter."""

    lora_name: str
    lora_path: str  # a folder on the server's machine, or on each host, or in a bucket
    load_inplace: bool | None = False  # also if the name is loaded already


class UnloadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to unload a LoRA adapter."""

    lora_name: str
    lora_int_id: int | None = None  # vLLM's; names are enough here


def admin_routes(state: ServerState) -> list[ApiRoute]:
    """The routes that need an admin key."""
    admin = Admin(state)
    return [
        ApiRoute(
            path="/v1/load_lora_adapter",
            endpoint=admin.load_adapter,
            method="POST",
            access=Access.ADMIN,
            body=LoadAdapterRequest,
            media_types=("text/plain",),
            summary="Loads a LoRA adapter (--enable-lora).",
        ),
        ApiRoute(
            path="/v1/unload_lora_adapter",
            endpoint=admin.unload_adapter,
            method="POST",
            access=Access.ADMIN,
            body=UnloadAdapterRequest,
            media_types=("text/plain",),
            summary="Unloads a LoRA adapter (--enable-lora). Its requests go on.",
        ),
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


def aborted_by_administrator() -> RequestError:
    """The error of a request that `/abort_requests` has ended."""
    return unavailable("The request was aborted by the server's administrator.")


class Admin:
    """Answers the admin routes."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        strict = state.settings.strict_fields
        self._abort = BodyReader(AbortRequest, FieldTable(kind=AbortRequest), strict=strict)
        self._load = BodyReader(LoadAdapterRequest, FieldTable(kind=LoadAdapterRequest), strict=strict)
        self._unload = BodyReader(UnloadAdapterRequest, FieldTable(kind=UnloadAdapterRequest), strict=strict)
        self._level = BodyReader(LogLevelRequest, FieldTable(kind=LogLevelRequest), strict=strict)

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Running requests keep their pages; later requests do not find them."""
        self._state.client.reset_prefix_cache()
        if self._state.prefills is not None:
            self._state.prefills.forget()
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

    async def load_adapter(self, request: Request) -> Response:
        """Later requests may name the adapter. With `load_inplace`, those of the name have its new weights."""
        state = self._state
        body = await self._load.read(request, state.body_limits, state.threads)
        if body.lora_name in state.settings.model_names:
            raise invalid("lora_name", f"{body.lora_name!r} is the name of the model")
        if_loaded = IfLoaded.REPLACE if body.load_inplace else IfLoaded.REFUSE
        await self._change_adapters(LoadAdapter(body.lora_name, body.lora_path, if_loaded=if_loaded))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        """Later requests that name the adapter are answered 404."""
        state = self._state
        body = await self._unload.read(request, state.body_limits, state.threads)
        await self._change_adapters(UnloadAdapter(body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _change_adapters(self, change: LoadAdapter | UnloadAdapter) -> None:
        if not self._state.client.info.max_loras:
            message = "This server has no LoRA adapters: start it with --enable-lora."
            raise RequestError(404, message, type=NOT_FOUND)
        try:
            await self._state.adapter_changer().change_adapters(change)
        except AdapterError as error:
            kind = NOT_FOUND if error.status == 404 else BAD_REQUEST if error.status < 500 else "InternalServerError"
            raise RequestError(error.status, str(error), type=kind) from error
        logger.info("LoRA adapter %r: %s", change.name, "unloaded" if isinstance(change, UnloadAdapter) else "loaded")

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
