"""Renders a conversation: checks roles and contents, runs the chat template, and encodes what it writes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any

import msgspec

from server.api.request.body import is_deeper_than, read_raw
from server.api.request.limits import check_num_messages, check_text_length
from server.api.request.schemas import ChatRequest, ContentPart, Message, TokenizeRequest
from server.api.request.tools import MAX_DEPTH, Tools
from server.api.served_model import ServedModel
from server.api.state import ServerState
from server.http.request_error import RequestError, given, invalid, overloaded, too_long, unavailable, unsupported
from server.settings import RESERVED_VARIABLES
from server.text.chat_template import ChatTemplate
from server.text.special_tokens import Part
from server.text.template_environment import TemplateError, TemplateLengthError, TemplateLimitError
from server.text.template_runner import TooManyTemplatesError

# Llama 3 has no role `developer`, which is OpenAI's newer name for `system`. `function` is OpenAI's older name for
# `tool`. All other roles go to the template as they are.
LEFT_OUT_IN_WORDS = "({} was left out: the model reads text only)"  # in the output of a tool
TEMPLATE_NAMES = {"developer": "system", "function": "tool"}
MAX_ROLE_CHARS = 64
MAY_BE_EMPTY = ("assistant", "tool", "ipython")  # roles whose content may be null
MAX_VARIABLES_BYTES = 64 * 1024  # the template reads every string of them, several times
MAX_DOCUMENTS_BYTES = 2 * 2**20

_variables = msgspec.json.Decoder(dict[str, Any] | None)
_documents = msgspec.json.Decoder(list[dict[str, Any]] | None)


def check_conversation(body: ChatRequest | TokenizeRequest) -> None:
    """Raises RequestError 400 if there are no messages, or fields contradict each other."""
    if not body.messages:
        raise invalid("messages", "must not be empty")
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid("continue_final_message", "cannot be combined with `add_generation_prompt`")


async def encode_conversation(
    state: ServerState, model: ServedModel, body: ChatRequest | TokenizeRequest, tools: Tools | None
) -> list[int]:
    """The token ids of the prompt. Raises RequestError 400 for messages or variables that the template cannot
    render."""
    check_conversation(body)
    given_messages = body.messages or ()
    continues, opens = bool(body.continue_final_message), body.add_generation_prompt
    max_model_len = model.max_model_len
    source = body.chat_template
    if source and not state.settings.trust_request_chat_template:
        message = "is a program, and this server runs those of requests only with --trust-request-chat-template"
        raise invalid("chat_template", message)
    check_num_messages(len(given_messages), max_model_len)
    templates, tokenizer = state.templates, model.tokenizer
    shown_tools = {} if tools is None else {"tools": tools.for_template()}

    def call() -> dict[str, Any]:
        """The arguments of `ChatTemplate.render`."""
        messages = [*starmap(template_message, enumerate(given_messages))]
        check_text_length(sum(map(num_characters, messages)), tokenizer, max_model_len)
        return {
            "messages": messages,
            "add_generation_prompt": not continues if opens is None else opens,
            "continue_final_message": continues,
            "extra": {**state.settings.template_variables, **template_variables(body), **shown_tools},
            "max_chars": tokenizer.max_token_chars * max_model_len,
        }

    def encoded(parts: Sequence[Part]) -> list[int]:
        check_text_length(sum(len(part.text) for part in parts), tokenizer, max_model_len)
        ids = tokenizer.encode_parts(parts)
        return tokenizer.with_affixes(ids, again=True) if body.add_special_tokens else ids

    def rendered(template: ChatTemplate) -> list[int]:
        given = call()
        _check_shown(given["extra"], template.variables_read)
        costly = "chat_template_kwargs" if body.chat_template_kwargs else "messages"
        with _template_errors("messages", limits_param=costly):
            parts = template.render(timeout_s=templates.timeout_s, **given)
        return encoded(parts)

    if not source:
        return await templates.run(rendered, _template_of(model, tools))
    given = await templates.run(call)
    with _template_errors("chat_template", limits_param="chat_template"):
        parts, variables_read = await templates.render_source(source, tokenizer, **given)
    _check_shown(given["extra"], variables_read)
    return await templates.run(encoded, parts)


def _template_of(model: ServedModel, tools: Tools | None) -> ChatTemplate:
    template = model.chat_template if tools is None else model.tool_template
    if template is None:
        message = "This model has no chat template: use /v1/completions."
        if model.tool_template is not None:
            message = "This model has a chat template for requests with tools only: give tools, or use /v1/completions."
        raise RequestError(400, message)
    return template


def _check_shown(extra: Mapping[str, Any], variables_read: Collection[str]) -> None:
    """Raises RequestError 400 for tools or documents that the template does not show."""
    if "tools" in extra and "tools" not in variables_read:
        message = "tools: this model's chat template has no place for tools; --chat-template FILE gives it another."
        raise RequestError(400, message, param="tools")
    if "documents" in extra and "documents" not in variables_read:
        raise RequestError(400, "documents: this model's chat template does not show them.", param="documents")


@contextlib.contextmanager
def _template_errors(param: str, limits_param: str) -> Iterator[None]:
    """Raises the errors of running a template as RequestError, which names `param`. An error about too much work names
    `limits_param`."""
    try:
        yield
    except TemplateLengthError as error:
        raise too_long(f"{error} They exceed the model's maximum context length.", param="input_text") from error
    except TemplateLimitError as error:
        raise RequestError(400, str(error), param=limits_param) from error
    except TemplateError as error:
        raise RequestError(400, str(error), param=param) from error
    except RecursionError as error:
        raise invalid(limits_param, "is nested too deeply") from error
    except TooManyTemplatesError as error:
        raise overloaded("Too many conversations wait to be rendered.") from error
    except OSError as error:
        reason = error.strerror or error
        raise unavailable(f"No process can be started to render the conversation: {reason}") from error


def template_variables(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """`chat_template_kwargs` and `documents`. Raises RequestError 400 if they are not valid."""
    variables = read_raw("chat_template_kwargs", body.chat_template_kwargs, _variables, max_bytes=MAX_VARIABLES_BYTES)
    reserved = RESERVED_VARIABLES.intersection(variables or ())
    if reserved:
        raise invalid("chat_template_kwargs", f"must not set {', '.join(sorted(reserved))}")
    documents = read_raw("documents", body.documents, _documents, max_bytes=MAX_DOCUMENTS_BYTES)
    if is_deeper_than(MAX_DEPTH, documents):
        raise invalid("documents", f"are nested more than {MAX_DEPTH} deep")
    return (variables or {}) | ({"documents": documents} if documents else {})


def template_message(index: int, message: Message) -> dict[str, Any]:
    """A message in the form that templates expect. Its content is one string, and the
    arguments of its tool calls are objects.

    Text parts are joined by line feeds. Raises RequestError 400.
    """
    where = f"messages.{index}"
    check_role(f"{where}.role", message.role)
    role = TEMPLATE_NAMES.get(message.role, message.role)
    fields: dict[str, Any] = {"role": role, "content": _content(where, role, message)}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        fields["reasoning_content"] = reasoning
    calls = _tool_calls(message)
    if calls and role != "assistant":
        raise invalid(f"{where}.tool_calls", "are only allowed in messages of the assistant")
    return fields | ({"tool_calls": calls} if calls else {})


def check_role(param: str, role: str) -> None:
    """Raises RequestError 400 for a role that no template has."""
    if not 0 < len(role) <= MAX_ROLE_CHARS:
        raise invalid(param, f"must have 1 to {MAX_ROLE_CHARS} characters, got {len(role)}")


def content_text(message: Message) -> str:
    """The text of a message that `template_message` accepts."""
    return _content("", TEMPLATE_NAMES.get(message.role, message.role), message)


def num_characters(message: dict[str, Any]) -> int:
    """The approximate number of characters that the message adds to a prompt."""
    count = len(message["content"]) + len(message.get("reasoning_content", ""))
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        count += len(name) + len(arguments if isinstance(arguments, str) else msgspec.json.encode(arguments))
    return count


def _content(where: str, role: str, message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if role not in MAY_BE_EMPTY:
            raise invalid(f"{where}.content", "must be a string or a list of text parts")
        return message.refusal or ""
    is_result = role in ("tool", "ipython")
    parts = enumerate(message.content)
    return "\n".join(_part_text(f"{where}.content.{i}", part, is_result=is_result) for i, part in parts)


def _part_text(where: str, part: ContentPart, *, is_result: bool) -> str:
    """The text of a part. A note replaces a part of a tool's result that is not text."""
    if part.type not in ("text", "refusal"):
        if is_result:
            return LEFT_OUT_IN_WORDS.format(part.type[:40])
        raise unsupported(where, f"content of the type `{part.type[:40]}` is")
    return given(f"{where}.{part.type}", part.text if part.type == "text" else part.refusal)


def _tool_calls(message: Message) -> list[dict[str, Any]]:
    calls = [(call.id, call.function) for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls.append((None, message.function_call))
    return [
        {"id": id or "", "type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}
        for id, call in calls
    ]


def _arguments(arguments: str | dict[str, Any] | None) -> Any:
    """The arguments as an object, which templates print as JSON. Text that is not a JSON object stays a string."""
    value: Any = arguments
    if isinstance(arguments, str):
        try:
            value = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            return arguments
    if value is None:
        return {}
    if not isinstance(value, dict) or is_deeper_than(MAX_DEPTH, value):
        return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return value
