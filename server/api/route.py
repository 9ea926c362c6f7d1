"""A route with its properties for the gate and for /openapi.json."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from server.http.request_error import Error, RequestError

JSON = "application/json"
FORM = "multipart/form-data"
EVENTS = "text/event-stream"
Endpoint = Callable[[Request], Awaitable[Response]]


class Access(enum.Enum):
    """The key that a route needs."""

    OPEN = "open"  # none, unless `--api-key-all-routes`: probes and Prometheus have no key
    KEY = "key"  # one of the server's keys or an admin key; none if the server has no keys
    ADMIN = "admin"  # an admin key


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorForm:
    """An API's form of errors: the type of the body, and the function that makes it."""

    type: type[msgspec.Struct]
    body: Callable[[RequestError], msgspec.Struct]

    def response(self, error: RequestError) -> Response:
        """The answer to a refused request."""
        return Response(msgspec.json.encode(self.body(error)), error.status, error.headers(), JSON)


OPENAI_ERRORS = ErrorForm(type=Error, body=RequestError.body)


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiRoute:
    """A path and its endpoint.

    `generates` is true if the engine works for the answer. Such requests are counted in `/load`. In a shutdown new ones
    are refused, and the server waits for running ones. `/openapi.json` shows `body`, `media_types` of the answer and
    `summary`.
    """

    path: str
    endpoint: Endpoint
    method: str = "GET"
    access: Access = Access.KEY
    generates: bool = False
    body: type[msgspec.Struct] | None = None
    body_type: str = JSON  # the media type of the body
    media_types: tuple[str, ...] = (JSON,)
    answer_type: str = "object"  # of a JSON answer
    errors: ErrorForm = OPENAI_ERRORS
    summary: str = ""

    def starlette_route(self) -> Route:
        """The Starlette route."""
        return Route(self.path, self.endpoint, methods=[self.method])


class Refusals:
    """Makes the answers to refused requests, in the form of the requested route."""

    def __init__(self, routes: Iterable[ApiRoute]) -> None:
        self._forms = {route.path: route.errors for route in routes}

    def response(self, scope: Scope, error: RequestError) -> Response:
        """The error response to the request of `scope`, whose path or method may be unknown."""
        return self._forms.get(scope["path"], OPENAI_ERRORS).response(error)
