"""Routes as methods: `@route` before a method declares its route, and `routes_of` makes the routes of an object.

    class Admin(Routes):
        @route("POST /log_level", LogLevelRequest, access=Access.ADMIN)
        async def set_log_level(self, request: Request, body: LogLevelRequest) -> Response:
            '''Sets the level of the log.'''

The first line of the docstring is the route's summary in `/openapi.json`. The class may have `route_options`, with
fields of all its routes, and a method `check_served`. This method is called before a body is read, and raises
RequestError if the server does not serve these routes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.request.body import BodyReader
from server.api.route import ApiRoute, Endpoint
from server.api.state import ServerState


class Routes:
    """An object whose methods are endpoints."""

    def __init__(self, state: ServerState) -> None:
        self._state = state


def route[F: Callable[..., Any]](
    target: str,
    fields: type[msgspec.Struct] | None = None,
    *,
    translate: Callable[..., Any] | None = None,
    **options: Any,
) -> Callable[[F], F]:
    """Declares the route of an endpoint, which is called with the request and its decoded body.

    Args:
        target: the method and the path.
        fields: the type of the body, which the endpoint gets. None: there is no body, or the endpoint reads it.
        translate: makes the request of another route of the body, which the endpoint gets then (`BodyReader`).
        options: further fields of the `ApiRoute`.
    """
    method, path = target.split()

    def declare(function: F) -> F:
        declared: Any = function

        def made(owner: object, state: ServerState) -> ApiRoute:
            own: dict[str, Any] = {"summary": (function.__doc__ or "").partition("\n")[0]}
            own |= getattr(owner, "route_options", {})
            endpoint: Endpoint = declared.__get__(owner)
            if fields is not None:
                own["body"] = fields
                check = getattr(owner, "check_served", lambda: None)
                further = {} if translate is None else {"translate": translate}
                reader = BodyReader(fields, strict=state.settings.strict_fields, **further)
                endpoint = _after_reading(endpoint, state, reader, check)
            return ApiRoute(path=path, method=method, endpoint=endpoint, **own | options)

        declared.__dict__.setdefault("routes", []).insert(0, made)
        return function

    return declare


def routes_of(owner: object, state: ServerState) -> list[ApiRoute]:
    """The routes that the class of `owner` declares, in their order."""
    functions = vars(type(owner)).values()
    return [made(owner, state) for function in functions for made in getattr(function, "routes", ())]


def _after_reading(
    endpoint: Callable[..., Any], state: ServerState, reader: BodyReader[Any], check: Callable[[], None]
) -> Endpoint:
    async def read_and_answer(request: Request) -> Response:
        check()
        response: Response = await endpoint(request, await reader.read(request, state.body_limits))
        return response

    return read_and_answer
