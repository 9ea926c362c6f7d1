"""The Starlette application: routes, middleware and error handlers around one ServerState."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from model.inputs.private_folders import PRIVATE, check_closed
from server.api.gate import Gate
from server.api.metrics import ServerMetrics
from server.api.named_folder import NamedFolder
from server.api.record import NOTES
from server.api.route import Refusals
from server.api.routes.admin import Admin
from server.api.routes.batches.routes import Batches
from server.api.routes.batches.runner import BatchRunner
from server.api.routes.chat import Chat
from server.api.routes.completions import Completions
from server.api.routes.embeddings import EmbeddingRoutes
from server.api.routes.endpoints import routes_of
from server.api.routes.generate import Generate
from server.api.routes.info import info_routes
from server.api.routes.invocations import invocation_route
from server.api.routes.messages.routes import Messages
from server.api.routes.openapi import docs_routes
from server.api.routes.responses.routes import responses_routes
from server.api.routes.ui import ui_routes
from server.api.routes.weights import Weights
from server.api.served_model import ServedModel, ServedModels
from server.api.state import ServerState
from server.batches.batch_file import URLS
from server.batches.store import BatchStore
from server.database import Database, FullError
from server.engine.group import EngineGroup
from server.engine.protocol import Engine
from server.engine.wire import LoadAdapter, LoadModel
from server.http.auth import clients_of
from server.http.request_error import BAD_REQUEST, NOT_FOUND, RequestError
from server.settings import Settings
from server.text.template_runner import TemplateRunner
from server.text.tokenizer import ByteLevelTokenizer


def create_state(
    settings: Settings, engine: Engine, tokenizer: ByteLevelTokenizer, scratch: Path | None = None
) -> ServerState:
    """The state that all routes share. The caller must close it. Without --batch-folder the database is in the folder
    `scratch`, or in memory.

    Raises TemplateError if a chat template is not valid Jinja, and ValueError or OSError if the folder of batches
    cannot be used.
    """
    engines: Sequence[Engine] = engine.replicas if isinstance(engine, EngineGroup) else [engine]
    folder = settings.batch_folder
    if folder is not None:
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        check_closed(folder, "--batch-folder")
    database = Database(folder or scratch)
    name, root, defaults = settings.model_names[0], settings.model_root, settings.generation_defaults
    model = ServedModel(settings, engine, tokenizer, name=name, root=root, defaults=defaults)
    state = ServerState(
        settings=settings,
        database=database,
        batches=None if folder is None else BatchStore(database, folder, round(settings.batch_folder_gib * 2**30)),
        engine=engine,
        engines=engines,
        model=model,
        models=ServedModels(settings, engine, model),
        templates=TemplateRunner(timeout_s=settings.template_timeout_s),
        metrics=ServerMetrics(
            engines,
            prefix=settings.metrics_prefix,
            model_name=settings.model_names[0],
            key_names=settings.key_names,
            clients=clients_of((*settings.api_keys, *settings.admin_api_keys)),
        ),
    )
    folders = ((settings.models_folder, LoadModel), (settings.lora_folder, LoadAdapter))
    state.folders = [NamedFolder(place, kind, state.ask) for place, kind in folders if place is not None]
    return state


def create_app(state: ServerState) -> Starlette:
    """The application with all routes, behind the CORS middleware and the gate (API keys, metrics)."""
    chats, completions = routes_of(Chat(state), state), routes_of(Completions(state), state)
    embeddings = routes_of(EmbeddingRoutes(state), state)
    by_field = {"messages": chats[0].endpoint, "prompt": completions[0].endpoint, "input": embeddings[0].endpoint}
    routes = [
        *chats,
        *completions,
        *routes_of(Generate(state), state),
        *responses_routes(state),
        *routes_of(Messages(state), state),
        *embeddings,
        invocation_route(state, by_field),
        *routes_of(Batches(state), state),
        *routes_of(Admin(state), state),  # before /v1/models/{name}
        *info_routes(state),
        *routes_of(Weights(state), state),
    ]
    routes += [] if state.settings.disable_fastapi_docs else docs_routes(routes, state.settings)
    routes += ui_routes(state)
    if state.settings.is_follower:
        routes = [route for route in routes if route.path in ("/health", "/live")]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(state.settings.allowed_origins),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", *NOTES],
    )
    app = Starlette(
        routes=[route.starlette_route() for route in routes],
        middleware=[cors, Middleware(Gate, state=state, routes=routes)],
        exception_handlers=_exception_handlers(Refusals(routes)),
    )
    if state.batches is not None:
        served = [route for route in routes if route.path in URLS and route.method == "POST"]
        own = Starlette(
            routes=[route.starlette_route() for route in served], exception_handlers=_exception_handlers(Refusals(()))
        )
        state.run_batches = BatchRunner(state, state.batches, own).run
    app.router.redirect_slashes = False  # a redirect's address would contain the client's own Host header
    return app


def _exception_handlers(refusals: Refusals) -> dict[Any, Callable[[Request, Any], Awaitable[Response]]]:
    async def on_request_error(request: Request, error: RequestError) -> Response:
        return refusals.response(request.scope, error)

    async def on_http_exception(request: Request, error: HTTPException) -> Response:
        """Starlette's own errors: unknown route, wrong method."""
        message = f"{error.detail}: {request.method} {request.url.path}"
        kind = BAD_REQUEST
        if error.status_code == 404:
            kind, near = NOT_FOUND, get_close_matches(request.url.path, [route.path for route in request.app.routes])
            message += f". Routes with such a name: {', '.join(near)}" if near else ""
            message += ". /openapi.json lists all routes."
        response = refusals.response(request.scope, RequestError(error.status_code, message, type=kind))
        if error.status_code == 405:  # the exception names the methods of one route, and the path may have several
            response.headers["Allow"] = ", ".join(_methods(request))
        return response

    async def on_full(request: Request, error: FullError) -> Response:
        refusal = RequestError(507, str(error), type="InsufficientStorageError", code="storage_full")
        return refusals.response(request.scope, refusal)

    return {RequestError: on_request_error, FullError: on_full, HTTPException: on_http_exception}


def _methods(request: Request) -> list[str]:
    """The methods of all routes whose path is that of the first route that matches the request. `/x/tokens` is another
    resource than `/x/{id}`."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in routes if route.path == routes[0].path for method in route.methods})
