"""POST /invocations: the only route that SageMaker calls. The fields of the body select the route that answers."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from server.api.route import ApiRoute, Endpoint
from server.api.state import ServerState
from server.http.body import decode_body, read_body
from server.http.errors import RequestError

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


def invocation_routes(state: ServerState, *, chat: Endpoint, completions: Endpoint) -> list[ApiRoute]:
    """SageMaker's route. It passes a body with `messages` to chat, one with `prompt` to completions."""

    async def invoke(request: Request) -> Response:
        body = await read_body(request, state.body_limits)
        fields = decode_body(_decode_object, body)
        for field, endpoint in (("messages", chat), ("prompt", completions)):
            if field in fields:
                return await endpoint(Request(request.scope, _again(body, request.receive)))
        raise RequestError(400, "Give either `messages` or `prompt`.", param="messages")

    summary = "As /v1/chat/completions or /v1/completions, whichever the body is for."
    return [ApiRoute(path="/invocations", endpoint=invoke, method="POST", generates=True, summary=summary)]


def _again(body: bytes, receive: Receive) -> Receive:
    """Returns the body again, which has already been read, and then the messages after it."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return first.pop() if first else await receive()

    return receive_again
