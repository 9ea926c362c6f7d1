"""POST /invocations: the only route that SageMaker calls. The fields of the body select the route that answers."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from server.api.route import EVENTS, JSON, ApiRoute, Endpoint
from server.api.state import ServerState
from server.http.body import decode_body, read_body
from server.http.request_error import RequestError


def invocation_route(state: ServerState, endpoints: Mapping[str, Endpoint]) -> ApiRoute:
    """SageMaker's route. `endpoints` are by the field that only their bodies have, such as `messages`."""
    given = [(field, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for field in endpoints]
    decoder = msgspec.json.Decoder(msgspec.defstruct("Given", given))  # skips all other fields

    async def invoke(request: Request) -> Response:
        body = await read_body(request, state.body_limits)
        fields = decode_body(decoder, body)
        for field, endpoint in endpoints.items():
            if getattr(fields, field) is not msgspec.UNSET:
                return await endpoint(Request(request.scope, _again(body, request.receive)))
        *others, last = (f"`{field}`" for field in endpoints)
        raise RequestError(400, f"Give {', '.join(others)} or {last}.", param=next(iter(endpoints)))

    summary = "As /v1/chat/completions, /v1/completions or /v1/embeddings, whichever the body is for."
    kinds = (JSON, EVENTS)
    return ApiRoute(
        path="/invocations", endpoint=invoke, method="POST", generates=True, media_types=kinds, summary=summary
    )


def _again(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns a body again that has already been read, and then the messages after it."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return first.pop() if first else await receive()

    return receive_again
