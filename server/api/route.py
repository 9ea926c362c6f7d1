"""One route, and what the gate and the description of the API must know of it."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Endpoint = Callable[[Request], Awaitable[Response]]


class Access(enum.Enum):
    """Who may use a route."""

    OPEN = "open"  # to all, unless `--api-key-all-routes`: probes and Prometheus have no key
    KEY = "key"  # to whoever has one of the server's keys, or an admin key; to all where there are none
    ADMIN = "admin"  # to whoever has an admin key


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiRoute:
    """A path and its endpoint.

    `generates` is true where the engine works for the answer: such requests are counted in `/load`, refused while the
    server drains, and waited for. `body` and `summary` are shown in `/openapi.json`.
    """

    path: str
    endpoint: Endpoint
    method: str = "GET"
    access: Access = Access.KEY
    generates: bool = False
    body: type[msgspec.Struct] | None = None
    summary: str = ""

    def starlette_route(self) -> Route:
        return Route(self.path, self.endpoint, methods=[self.method])
