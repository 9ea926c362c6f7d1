"""The routes for administrators of a running server. Each needs an admin key (`--admin-api-key`)."""

from __future__ import annotations

import logging
from collections.abc import Container
from types import NoneType
from typing import Annotated, ClassVar, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from server.api.answers.answer import JsonAnswer
from server.api.peers import AbortRequests, SetLogLevel
from server.api.request.schemas import ITEMS
from server.api.route import Access
from server.api.routes.endpoints import Routes, route
from server.engine.wire import IfLoaded, LoadAdapter, LoadModel, UnloadAdapter, UnloadModel
from server.http.body import read_query
from server.http.request_error import NOT_FOUND, RequestError, invalid, unavailable

logger = logging.getLogger("pallas_serve")

SECRET = ("api_keys", "admin_api_keys", "tls", "planner", "otlp_traces_endpoint")


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
    base_model_name: str | None = None  # the model that it changes, of --models; None: --model


class UnloadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to unload a LoRA adapter."""

    lora_name: str
    lora_int_id: int | None = None  # vLLM's; names are enough here


class LoadModelRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to load a model."""

    model: str
    path: str | None = None  # as of --models; None: in --models-folder
    load_inplace: bool | None = False  # also if the name is loaded already


class UnloadModelRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to unload a model."""

    model: str


class _ResetQuery(msgspec.Struct):
    reset_running_requests: bool = False
    reset_external: bool = False


def aborted_by_administrator() -> RequestError:
    """The error of a request that `/abort_requests` has ended."""
    return unavailable("The request was aborted by the server's administrator.")


class Admin(Routes):
    """Answers the admin routes."""

    route_options: ClassVar = {"access": Access.ADMIN}

    @route("POST /v1/load_lora_adapter", LoadAdapterRequest, media_types=("text/plain",))
    async def load_adapter(self, request: Request, body: LoadAdapterRequest) -> Response:
        """Loads a LoRA adapter (--enable-lora).

        With `load_inplace`, requests that name it have its new weights.
        """
        self._check_new("lora_name", body.lora_name, self._state.engine.models)
        if_loaded = IfLoaded.REPLACE if body.load_inplace else IfLoaded.REFUSE
        await self._change_adapters(LoadAdapter(body.lora_name, body.lora_path, body.base_model_name, if_loaded))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @route("POST /v1/unload_lora_adapter", UnloadAdapterRequest, media_types=("text/plain",))
    async def unload_adapter(self, request: Request, body: UnloadAdapterRequest) -> Response:
        """Unloads a LoRA adapter (--enable-lora). Its requests go on."""
        await self._change_adapters(UnloadAdapter(body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _change_adapters(self, change: LoadAdapter | UnloadAdapter) -> None:
        if not self._state.engine.info.max_loras:
            message = "This server has no LoRA adapters: start it with --enable-lora."
            raise RequestError(404, message, type=NOT_FOUND)
        await self._state.change(change)
        logger.info("LoRA adapter %r: %s", change.name, "unloaded" if isinstance(change, UnloadAdapter) else "loaded")

    def _check_new(self, param: str, name: str, others: Container[str]) -> None:
        """Raises RequestError 400 for a name that is the first model's, or one of `others`."""
        if name in self._state.settings.model_names:
            raise invalid(param, f"{name!r} is the name of the model")
        if name in others:
            raise invalid(param, f"{name!r} is the name of {'a model' if param == 'lora_name' else 'an adapter'}")

    @route("POST /v1/models/load", LoadModelRequest)
    @route("POST /models/load", LoadModelRequest)
    async def load_model(self, request: Request, body: LoadModelRequest) -> Response:
        """Loads a model (--models, --models-folder).

        With `load_inplace`, requests that name it have its new weights.
        """
        state = self._state
        self._check_models()
        self._check_new("model", body.model, state.engine.adapters)
        path, before = body.path, state.engine.models.get(body.model)
        if path is None and before is not None and body.load_inplace:
            path = before.path
        if path is not None:
            if_loaded = IfLoaded.REPLACE if body.load_inplace else IfLoaded.REFUSE
            await state.change(LoadModel(body.model, path, if_loaded=if_loaded))
        try:
            await state.find_model(body.model)
        except RequestError:
            if path is not None:  # its tokenizer or template cannot be used
                old = None if before is None else LoadModel(body.model, before.path, if_loaded=IfLoaded.REPLACE)
                await state.change(old or UnloadModel(body.model))
            raise
        logger.info("model %r: loaded", body.model)
        return JsonAnswer({"success": True})

    @route("POST /v1/models/unload", UnloadModelRequest)
    @route("POST /models/unload", UnloadModelRequest)
    async def unload_model(self, request: Request, body: UnloadModelRequest) -> Response:
        """Unloads a model. Its requests go on."""
        self._check_models()
        if body.model in self._state.settings.model_names:
            raise invalid("model", f"{body.model!r} is the model of the start, which stays")
        await self._state.change(UnloadModel(body.model))
        logger.info("model %r: unloaded", body.model)
        return JsonAnswer({"success": True})

    def _check_models(self) -> None:
        if not self._state.engine.info.max_models:
            message = "This server has one model: start it with --models or --models-folder."
            raise RequestError(404, message, type=NOT_FOUND)

    @route("POST /reset_prefix_cache")
    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forgets the K/V of earlier prompts; with reset_external=true also what the host's memory and files have."""
        query = read_query(request.query_params, _ResetQuery)
        if query.reset_running_requests:
            raise invalid("reset_running_requests", "running requests keep their K/V: /abort_requests ends them")
        self._state.engine.reset_prefix_cache(reset_external=query.reset_external)
        return JsonAnswer({"status": "ok"})

    @route("POST /abort_requests", AbortRequest)
    async def abort_requests(self, request: Request, body: AbortRequest) -> Response:
        """Ends running requests with an error."""
        state = self._state
        ended = state.abort(body.request_ids, aborted_by_administrator())
        if state.peers is not None:
            ended += await state.peers.ask(AbortRequests(body.request_ids), list[str])
        logger.info("%d requests were aborted by the administrator", len(ended))
        return JsonAnswer({"aborted": ended})

    @route("POST /drain")
    @route("DELETE /drain", summary="Takes new requests again.")
    async def drain(self, request: Request) -> Response:
        """Refuses new requests with 503, also those of /health. Those that run go on."""
        self._state.drained.value = request.method == "POST"
        return JsonAnswer({"draining": self._state.drained.value, "server_load": self._state.load})

    @route("GET /server_info")
    async def server_info(self, request: Request) -> Response:
        """The server's settings, without secrets, and the engine's properties."""
        settings = msgspec.to_builtins(self._state.settings, enc_hook=str)
        engine = msgspec.to_builtins(self._state.engine.info)
        shown, told = ({k: v for k, v in each.items() if k not in SECRET} for each in (settings, engine))
        return JsonAnswer({"version": settings["version"], "settings": shown, "engine": told})

    @route("GET /log_level")
    async def log_level(self, request: Request) -> Response:
        """The level of the log."""
        return JsonAnswer({"level": logging.getLevelName(logger.getEffectiveLevel()).lower()})

    @route("POST /log_level", LogLevelRequest)
    async def set_log_level(self, request: Request, body: LogLevelRequest) -> Response:
        """Sets the level of the log."""
        logger.setLevel(body.level.upper())
        if self._state.peers is not None:
            await self._state.peers.ask(SetLogLevel(body.level.upper()), NoneType)
        return await self.log_level(request)
