"""The chat template of a request: its own if the server allows it, else the model's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from server.api.request.schemas import ChatRequest, TokenizeRequest
from server.api.request.tools import Tools
from server.api.state import ServerState
from server.http.errors import RequestError, invalid, overloaded, unavailable
from server.text.template_messages import TemplateError
from server.text.template_runner import Lane, ServedTemplate, TemplateLimitError, TooManyTemplatesError

PARAM = "chat_template"


async def template_of(state: ServerState, body: ChatRequest | TokenizeRequest, tools: Tools | None) -> ServedTemplate:
    """Raises RequestError 400 if there is no template, if it does not show the tools, or if the request's own is not
    allowed or not valid."""
    template = await _own(state, body.chat_template) if body.chat_template else _of_the_model(state, tools)
    if tools is not None and not template.reads("tools"):
        message = "tools: this model's chat template has no place for tools; --chat-template FILE gives it another."
        raise RequestError(400, message, param="tools")
    return template


def _of_the_model(state: ServerState, tools: Tools | None) -> ServedTemplate:
    template = state.chat_template if tools is None else state.tool_template
    if template is None:
        message = "This model has no chat template: use /v1/completions."
        if state.tool_template is not None:
            message = "This model has a chat template for requests with tools only: give tools, or use /v1/completions."
        raise RequestError(400, message)
    return template


async def _own(state: ServerState, source: str) -> ServedTemplate:
    if not state.settings.trust_request_chat_template:
        message = "is a program, and this server runs those of requests only with --trust-request-chat-template"
        raise invalid(PARAM, message)
    timeout_s = state.settings.template_timeout_s
    with template_errors(PARAM):
        return await state.templates.run(
            Lane.SPECIAL, lambda: ServedTemplate(source, state.tokenizer, state.templates, timeout_s=timeout_s)
        )


@contextlib.contextmanager
def template_errors(param: str, limits_param: str | None = None) -> Iterator[None]:
    """Raises the errors of running a template as RequestError. `limits_param`: of too much work; by default `param`."""
    try:
        yield
    except TemplateLimitError as error:
        raise RequestError(400, str(error), param=limits_param or param) from error
    except TemplateError as error:
        raise RequestError(400, str(error), param=param) from error
    except RecursionError as error:
        raise invalid(limits_param or param, "is nested too deeply") from error
    except TooManyTemplatesError as error:
        raise overloaded("Too many conversations wait to be rendered.") from error
    except OSError as error:
        raise unavailable(f"No process can be started to render the conversation: {error}") from error
