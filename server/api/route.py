"""One route, and what the gate must know of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiRoute:
    """A path and its endpoint.

    `needs_key` is false where everybody may ask: load balancers have no key. `generates` is true where the engine works
    for the answer: such requests are counted in `/load`, refused while the server drains, and waited for.
    """

    path: str
    endpoint: Endpoint
    method: str = "GET"
    needs_key: bool = True
    generates: bool = False

    def starlette_route(self) -> Route:
        return Route(self.path, self.endpoint, methods=[self.method])
