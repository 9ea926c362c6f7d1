"""The chat template of a request: its own if the server allows it, else the model's."""

from __future__ import annotations

from server.api.aside import LONG_WORK
from server.api.request.schemas import ChatRequest, TokenizeRequest
from server.api.state import ServerState
from server.http.errors import RequestError, invalid
from server.text.chat_template import ChatTemplate, TemplateError
from server.text.time_limit import Overtime, time_limit

PARAM = "chat_template"


async def template_of(state: ServerState, body: ChatRequest | TokenizeRequest) -> ChatTemplate:
    """Raises RequestError 400 if there is no template, or if the request's own is not allowed or not valid."""
    if not body.chat_template:
        if state.chat_template is None:
            raise RequestError(400, "This model has no chat template: use /v1/completions.")
        return state.chat_template
    if not state.settings.trust_request_chat_template:
        message = "is a program, and this server runs those of requests only with --trust-request-chat-template"
        raise invalid(PARAM, message)
    try:
        return await state.aside.run(LONG_WORK, _compiled, state, body.chat_template)
    except TemplateError as error:
        raise RequestError(400, str(error), param=PARAM) from error
    except Overtime as error:
        raise invalid(PARAM, f"took longer than {state.settings.template_timeout_s:g} s to compile") from error


def _compiled(state: ServerState, source: str) -> ChatTemplate:
    tokenizer = state.tokenizer
    with time_limit(state.settings.template_timeout_s):
        return ChatTemplate(source, special_tokens=tokenizer.special_tokens, variables=tokenizer.template_variables)
