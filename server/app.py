"""The Starlette application: routes, layers and error handlers around one ServerState."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.answer import error_response
from server.chat import ChatRoute
from server.chat_template import ChatTemplate
from server.completions import CompletionRoute
from server.engine_client import EngineClient
from server.errors import NOT_FOUND, RequestError
from server.info_routes import InfoRoutes
from server.metrics import ServerMetrics
from server.middleware import Gate
from server.settings import Settings
from server.state import ServerState
from server.tokenizer import Tokenizer


def create_state(settings: Settings, client: EngineClient, tokenizer: Tokenizer) -> ServerState:
    """Raises TemplateError where the chat template is not valid Jinja."""
    source = settings.chat_template or tokenizer.chat_template
    template = None
    if source:
        template = ChatTemplate(source, special_tokens=tokenizer.special_tokens, variables=tokenizer.template_variables)
    return ServerState(
        settings=settings,
        client=client,
        tokenizer=tokenizer,
        chat_template=template,
        metrics=ServerMetrics(client, prefix=settings.metrics_prefix, model_name=settings.model_names[0]),
    )


def create_app(state: ServerState) -> Starlette:
    info = InfoRoutes(state)
    routes = [
        Route("/v1/chat/completions", ChatRoute(state).__call__, methods=["POST"]),
        Route("/v1/completions", CompletionRoute(state).__call__, methods=["POST"]),
        Route("/v1/models", info.models, methods=["GET"]),
        Route("/v1/models/{name:path}", info.model, methods=["GET"]),
        Route("/health", info.health, methods=["GET"]),
        Route("/version", info.version, methods=["GET"]),
        Route("/load", info.load, methods=["GET"]),
        Route("/metrics", info.metrics, methods=["GET"]),
        Route("/tokenize", info.tokenize, methods=["POST"]),
        Route("/detokenize", info.detokenize, methods=["POST"]),
    ]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(state.settings.allowed_origins),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id"],
    )
    app = Starlette(
        routes=routes,
        middleware=[cors, Middleware(Gate, state=state)],
        exception_handlers={
            RequestError: _on_request_error,
            HTTPException: _on_http_exception,
            NotImplementedError: _on_not_implemented,
        },
    )
    app.router.redirect_slashes = False  # the address to go to would be made of the client's own Host header
    return app


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, wrong method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    kind = NOT_FOUND if error.status_code == 404 else "BadRequestError"
    response = error_response(RequestError(error.status_code, message, type=kind))
    response.headers.update(error.headers or {})
    return response


async def _on_not_implemented(request: Request, error: Exception) -> Response:
    return error_response(RequestError(501, str(error) or "Not implemented.", type="NotImplementedError"))
