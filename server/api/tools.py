"""The tools of a request: which there are, which the model may or must call, and what the template shows of them."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from server.http.errors import INVALID_BODY, RequestError, invalid, unsupported

MAX_TOOLS = 128  # as many as OpenAI takes
MAX_TOOLS_BYTES = 256 * 1024  # the template walks through every string of them, several times
MAX_DEPTH = 32  # of a tool's JSON schema, and of the arguments of a call: templates indent what they print
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}", re.ASCII)


class FunctionSpec(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(msgspec.Struct):
    type: str
    function: FunctionSpec | None = None


class ToolChoice(enum.Enum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"  # one function, which must be called


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """The tools of one request, as it was checked. `specs` are those that may be called."""

    specs: tuple[FunctionSpec, ...]
    choice: ToolChoice
    parallel: bool  # whether an answer may have several calls

    @property
    def names(self) -> frozenset[str]:
        return frozenset(spec.name for spec in self.specs)

    def for_template(self) -> list[dict[str, Any]]:
        """In the form that templates print: OpenAI's, fields that were not given left out."""
        return [{"type": "function", "function": _given(spec)} for spec in self.specs]


_decode_tools = msgspec.json.Decoder(list[ToolSpec] | None).decode


def read_tools(
    raw: msgspec.Raw | msgspec.UnsetType, choice: str | Mapping[str, Any] | None, *, parallel: bool | None
) -> Tools | None:
    """The request's `tools`, `tool_choice` and `parallel_tool_calls`. None: no tool may be called.

    Raises RequestError 400 for whatever cannot be meant.
    """
    specs = _read_specs(raw)
    if not specs:
        if choice not in (None, "none"):
            raise RequestError(400, "tool_choice: it is only allowed together with `tools`.", param="tool_choice")
        return None
    kind, name = _read_choice(choice)
    if kind is ToolChoice.NONE:
        return None
    if kind is ToolChoice.NAMED:
        chosen = [spec for spec in specs if spec.name == name]
        if not chosen:
            raise invalid("tool_choice", f"there is no tool called {name[:64]!r} in `tools`")
        specs = chosen
    return Tools(specs=tuple(specs), choice=kind, parallel=parallel is not False and kind is not ToolChoice.NAMED)


def _read_specs(raw: msgspec.Raw | msgspec.UnsetType) -> list[FunctionSpec]:
    if raw is msgspec.UNSET:
        return []
    if len(raw) > MAX_TOOLS_BYTES:
        raise invalid("tools", f"are larger than {MAX_TOOLS_BYTES} bytes")
    try:
        tools = _decode_tools(raw) or []
    except RecursionError as error:
        raise invalid("tools", "are nested too deeply") from error
    except ValueError as error:
        raise RequestError(400, f"tools: {error}", type=INVALID_BODY, param="tools") from error
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
    if tool.function is None:
        raise invalid(f"{where}.function", "is missing")
    if not _NAME.fullmatch(tool.function.name):
        message = f"must be 1 to 64 letters, digits, `_`, `-` or `.`, got {tool.function.name[:70]!r}"
        raise invalid(f"{where}.function.name", message)
    if is_deeper_than(MAX_DEPTH, tool.function.parameters):
        raise invalid(f"{where}.function.parameters", f"are nested more than {MAX_DEPTH} deep")
    return tool.function


def _read_choice(choice: str | Mapping[str, Any] | None) -> tuple[ToolChoice, str]:
    """(the kind of choice, the name of the function that must be called)"""
    match choice:
        case None:
            return ToolChoice.AUTO, ""
        case "none" | "auto" | "required":
            return ToolChoice(choice), ""
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice.NAMED, name
        case {"type": str(kind)} if kind != "function":
            raise unsupported("tool_choice", f"the type `{kind[:40]}` is")
    raise invalid("tool_choice", 'must be none, auto, required or {"type": "function", "function": {"name": ...}}')


def is_deeper_than(most: int, value: Any) -> bool:
    """Whether lists and objects lie in each other more than `most` deep."""
    level = [value]
    for _ in range(most + 1):
        level = [inner for item in level for inner in _items(item)]
    return bool(level)


def _items(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _given(spec: FunctionSpec) -> dict[str, Any]:
    fields = msgspec.structs.asdict(spec)
    fields.pop("strict")  # how the answer is checked, nothing that the model is told
    return {name: value for name, value in fields.items() if value is not None}
