"""Error responses in the form of the requested route: OpenAI's form, or the route's own."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.responses import Response
from starlette.types import Scope

from server.api.route import ApiRoute, ErrorForm
from server.http.request_error import Error, RequestError

OPENAI_ERRORS = ErrorForm(type=Error, body=RequestError.body)


class Refusals:
    """Makes the answers to refused requests."""

    def __init__(self, routes: Iterable[ApiRoute]) -> None:
        self._forms = {route.path: route.errors for route in routes if route.errors is not None}

    def response(self, scope: Scope, error: RequestError) -> Response:
        """The error response to the request of `scope`, whose path or method may be unknown."""
        return self._forms.get(scope["path"], OPENAI_ERRORS).response(error)
