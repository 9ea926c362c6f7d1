"""Grammars that constrain tool calls: the model must make one, or the arguments must be valid by their schemas.

They use Llama 3's JSON format, `{"name": "f", "parameters": {...}}`, for every model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from server.api.request.tools import FunctionSpec, ToolChoice, Tools
from server.api.state import ServerState
from server.grammar.forms import JSON_OPTIONS, lark_grammar, structural_tag_grammar
from server.text.tool_calls.formats import FORMATS
from server.text.tool_calls.json_calls import JsonCallParser

ONE_LINE = JSON_OPTIONS | {"whitespace_pattern": " ?"}


async def grammar_with_tools(state: ServerState, tools: Tools | None, grammar: str | None) -> str | None:
    """The grammar of an answer that may contain, or must be, tool calls. `grammar` is that of an answer without calls.

    Raises RequestError 400 for a schema that is not supported.
    """
    if tools is None:
        return grammar
    is_strict = tools.are_strict and FORMATS[state.settings.tool_call_parser] is JsonCallParser
    if tools.choice is ToolChoice.AUTO and grammar is None and not is_strict:
        return None
    return await state.grammars.make(partial(tool_grammar, tools, grammar), param="tools")


def tool_grammar(tools: Tools, answer: str | None = None) -> str:
    """If the model must call, the answer consists of calls only, and every tool's schema applies. If it may choose, the
    answer either matches the grammar `answer` or consists of calls. Without `answer`, text is free until a call of a
    strict tool begins.

    Raises GrammarError for an invalid schema.
    """
    if tools.choice is not ToolChoice.AUTO:
        return lark_grammar(f"start: calls\n{_calls(tools, ONE_LINE)}", foreign=False)
    if answer is not None:
        start, *others = _parts(answer)
        either = {"lark_grammar": lark_grammar(f"start: calls | @answer\n{_calls(tools, JSON_OPTIONS)}", foreign=False)}
        return json.dumps({"grammars": [either, {**start, "name": "answer"}, *others]})
    strict = [spec for spec in tools.specs if spec.strict]
    triggers = [f'{{"name": "{spec.name}"' for spec in strict]
    structures = [
        {"begin": f'{trigger}, "parameters": ', "schema": _schema(spec) | {"x-guidance": ONE_LINE}, "end": "}"}
        for trigger, spec in zip(triggers, strict, strict=True)
    ]
    return structural_tag_grammar(structures, triggers)


def _calls(tools: Tools, options: Mapping[str, Any]) -> str:
    """The rules of calls. Each call is one JSON value. `options` of white space must be the same in a grammar of other
    JSON next to it."""
    lines = ["calls: call" + (' ("; " call)*' if tools.parallel else "")]
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools.specs))))
    lines += [f"call_{i}: %json {json.dumps(_call_schema(spec, options))}" for i, spec in enumerate(tools.specs)]
    return "\n".join(lines)


def _call_schema(spec: FunctionSpec, options: Mapping[str, Any]) -> dict[str, Any]:
    properties = {"name": {"const": spec.name}, "parameters": _below(_schema(spec), "#/properties/parameters")}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        "x-guidance": options,
    }


def _below(schema: Any, place: str) -> Any:
    """A schema for use at `place` in another one: its internal references are moved there."""
    if isinstance(schema, Mapping):
        moved = {key: _below(value, place) for key, value in schema.items()}
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            moved["$ref"] = place + reference[1:]
        return moved
    return [_below(item, place) for item in schema] if isinstance(schema, list) else schema


def _parts(grammar: str) -> list[dict[str, Any]]:
    """The parts of a grammar; the first has the start rule. A Lark text is one part."""
    try:
        return list(json.loads(grammar)["grammars"])
    except ValueError:
        return [{"lark_grammar": grammar}]


def _schema(spec: FunctionSpec) -> dict[str, Any]:
    """The schema of the arguments object. A tool without a schema takes no arguments."""
    schema = {"additionalProperties": False} if spec.parameters is None else spec.parameters
    return {**schema, "type": "object"}
