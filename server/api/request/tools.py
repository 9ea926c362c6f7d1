"""The tools of a request, which the model may or must call, and their form in the template."""

from __future__ import annotations

import enum
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from server.api.request.body import RawField, is_deeper_than, read_raw
from server.api.request.schemas import ChatRequest, FunctionSpec, ToolSpec
from server.api.state import ServerState
from server.http.request_error import RequestError, given, invalid, unsupported
from server.logs import ThrottledLog
from server.text.tool_calls.json_calls import JsonCallParser
from server.text.tool_calls.parser import CallParser

_log = ThrottledLog(logging.getLogger("pallas_serve"))

MAX_TOOLS = 128  # as in OpenAI's API
MAX_TOOLS_BYTES = 256 * 1024  # the template reads every string of them, several times
MAX_DEPTH = 32  # of a tool's JSON schema and of a call's arguments, because templates indent them
_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}", re.ASCII)


class ToolChoice(enum.Enum):
    """Whether a tool may or must be called."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"  # one function, which must be called


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """The checked tools of one request. `specs` are the tools that may be called."""

    specs: tuple[FunctionSpec, ...]
    choice: ToolChoice
    parallel: bool  # whether an answer may have several calls

    @property
    def names(self) -> frozenset[str]:
        """The names of the tools."""
        return frozenset(spec.name for spec in self.specs)

    def call_format(self, own: type[CallParser], *, is_free: bool) -> type[CallParser]:
        """The format of calls. It is the model's `own` if it may choose between calls and free text, or if that is
        JSON. Otherwise it is Llama 3's JSON. `is_free`: no grammar constrains an answer without calls."""
        chooses = self.choice is ToolChoice.AUTO and is_free
        return own if chooses or issubclass(own, JsonCallParser) else JsonCallParser

    def new_parser(self, own: type[CallParser], *, is_free: bool) -> CallParser:
        """A parser of the calls of one answer."""
        most_calls = None if self.parallel else 1
        must_call = self.choice is not ToolChoice.AUTO
        return self.call_format(own, is_free=is_free)(self.names, most_calls=most_calls, must_call=must_call)

    def for_template(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's form, which templates print, without fields that were not given. `strict` is left out,
        because it only constrains the answer."""
        shown = [{**msgspec.structs.asdict(spec), "strict": None} for spec in self.specs]
        tools = [{name: value for name, value in fields.items() if value is not None} for fields in shown]
        return [{"type": "function", "function": fields} for fields in tools]


_decoder = msgspec.json.Decoder(list[ToolSpec] | None)


def served_tools(
    where: str, tools: Sequence[Any], kinds: Collection[str | None], left_out: set[str], *, strict: bool
) -> list[Any]:
    """The tools of the types `kinds`, in another API's form. Other types are added to `left_out`; a `strict` server
    refuses them.

    Raises RequestError 400 for a refused type and for a tool without a name.
    """
    served = []
    for i, tool in enumerate(tools):
        if tool.type not in kinds:
            kind = (tool.type or "")[:40]
            if strict:
                raise unsupported(f"{where}.{i}.type", f"tools of the type `{kind}` are")
            left_out.add(kind)
        else:
            given(f"{where}.{i}.name", tool.name)
            served.append(tool)
    return served


def log_left_out(types: Collection[str]) -> None:
    """Logs the types of tools that were left out of a request's prompt."""
    if types:
        names = ", ".join(sorted(types)[:MAX_TOOLS])
        _log.warning("tools of these types cannot be served, and are left out of the prompt: %s", names)


def function_tool(name: str | None, description: str | None, parameters: Any, strict: bool | None) -> dict[str, Any]:
    """A tool in the form of chat requests."""
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


def read_tools(raw: RawField, choice: str | Mapping[str, Any] | None, *, parallel: bool | None) -> Tools | None:
    """Reads `tools`, `tool_choice` and `parallel_tool_calls`. None: no tool may be called.

    Raises RequestError 400 if they are invalid.
    """
    specs = _read_specs(raw)
    if specs is None:
        if choice not in (None, "none"):
            raise RequestError(400, "tool_choice: it is only allowed together with `tools`.", param="tool_choice")
        return None
    kind, names = _read_choice(choice)
    if names is not None:
        if missing := sorted(names - {spec.name for spec in specs}):
            raise invalid("tool_choice", f"there is no tool called {missing[0][:64]!r} in `tools`")
        specs = [spec for spec in specs if spec.name in names]
    if kind is ToolChoice.NONE or not specs:
        return None
    return Tools(specs=tuple(specs), choice=kind, parallel=parallel is not False and kind is not ToolChoice.NAMED)


def usable_tools(state: ServerState, body: ChatRequest) -> Tools | None:
    """The tools that the model may call. None: there are none, or no tool may be called.

    Raises RequestError 400 if the fields are invalid or not supported by this server.
    """
    tools = read_tools(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
    if tools is None:
        return None
    if tools.choice is ToolChoice.AUTO and not state.settings.enable_auto_tool_choice:
        message = "tool_choice: `auto` is switched off on this server (--no-enable-auto-tool-choice)."
        raise RequestError(400, message, param="tool_choice")
    return tools


def _read_specs(raw: RawField) -> list[FunctionSpec] | None:
    """The functions of `tools`; None: it was not given. An empty list is valid with every `tool_choice`."""
    tools = read_raw("tools", raw, _decoder, max_bytes=MAX_TOOLS_BYTES)
    if tools is None:
        return None
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"at most {MAX_TOOLS} are allowed, got {len(tools)}")
    specs = [_checked(i, tool) for i, tool in enumerate(tools)]
    seen: set[str] = set()
    for i, spec in enumerate(specs):
        if spec.name in seen:
            raise invalid(f"tools.{i}.function.name", f"{spec.name!r} is the name of another tool, too")
        seen.add(spec.name)
    return specs


def _checked(index: int, tool: ToolSpec) -> FunctionSpec:
    where = f"tools.{index}"
    if tool.type != "function":
        raise unsupported(f"{where}.type", f"tools of the type `{tool.type[:40]}` are")
    where = f"{where}.function"
    function = given(where, tool.function)
    if not _NAME.fullmatch(function.name):
        message = f"must be 1 to 128 letters, digits, `_`, `-`, `.`, `:` or `/`, got {function.name[:140]!r}"
        raise invalid(f"{where}.name", message)
    if is_deeper_than(MAX_DEPTH, function.parameters):
        raise invalid(f"{where}.parameters", f"are nested more than {MAX_DEPTH} deep")
    if (function.parameters or {}).get("type", "object") != "object":
        raise invalid(f"{where}.parameters.type", "must be `object`: arguments have names")
    return function


def _read_choice(choice: str | Mapping[str, Any] | None) -> tuple[ToolChoice, set[str] | None]:
    """(the kind of choice, the names of the functions to which it applies; None: all)"""
    match choice:
        case None:
            return ToolChoice.AUTO, None
        case "none" | "auto" | "required":
            return ToolChoice(choice), None
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice.NAMED, {name}
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]}}:
            return ToolChoice(mode), {_allowed_name(tool) for tool in tools}
        case {"type": str(kind)} if kind not in ("function", "allowed_tools"):
            raise unsupported("tool_choice", f"the type `{kind[:40]}` is")
    raise invalid("tool_choice", 'must be none, auto, required or {"type": "function", "function": {"name": ...}}')


def _allowed_name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise invalid("tool_choice", 'an allowed tool must be {"type": "function", "function": {"name": ...}}')
