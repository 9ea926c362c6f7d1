"""Grammars that constrain tool calls: the model must make one, or the arguments must be valid by their schemas.

A call that must be made is JSON: `{"name": "f", "parameters": {...}}` as Llama 3 writes it, or as Hermes does,
`{"name": "f", "arguments": {...}}` between tags. A model that may choose writes calls in its own format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from server.api.request.schemas import FunctionSpec
from server.api.request.tools import ToolChoice, Tools, call_format
from server.api.state import ServerState
from server.grammar.forms import JSON_OPTIONS, lark_grammar
from server.grammar.python_literals import SHARED_RULES, PythonArguments
from server.grammar.references import moved
from server.text.tool_calls.json_calls import CALL_END_TAG, CALL_TAG, HermesCallParser, JsonCallParser
from server.text.tool_calls.parser import CallParser
from server.text.tool_calls.pythonic_calls import PythonicCallParser

ONE_LINE = JSON_OPTIONS | {"whitespace_pattern": " ?"}
ANY_TEXT = r"(.|\n)*"
SPACE = r"[ \t\r\n]"  # JSON's


async def grammar_with_tools(state: ServerState, tools: Tools | None, answer: str | None) -> str | None:
    """The grammar of an answer that may contain, or must be, tool calls. `answer` is that of an answer without calls.

    Raises RequestError 400 for a schema that is not supported.
    """
    if tools is None:
        return answer
    if tools.choice is ToolChoice.AUTO and answer is None and not tools.are_strict:
        return None
    form = call_format(state, tools, answer)
    return await state.grammars.make(partial(tool_grammar, tools, answer, form), param="tools")


def tool_grammar(tools: Tools, answer: str | None = None, form: type[CallParser] = JsonCallParser) -> str:
    """If the model must call, the answer consists of calls only, and every tool's schema applies. If it may choose, the
    answer either matches the grammar `answer` or consists of calls. Without `answer`, text is free until a call in the
    format `form` begins, and the schemas of strict tools apply.

    Raises GrammarError for an invalid schema.
    """
    if tools.choice is not ToolChoice.AUTO:
        return lark_grammar(f"start: calls\n{_calls(tools, ONE_LINE, form)}", foreign=False)
    if answer is not None:
        start, *others = _parts(answer)
        rules = f"start: calls | @answer\n{_calls(tools, JSON_OPTIONS, form)}"
        either = {"lark_grammar": lark_grammar(rules, foreign=False)}
        return json.dumps({"grammars": [either, {**start, "name": "answer"}, *others]})
    begun = _pythonic_calls(tools) if form is PythonicCallParser else _json_calls(tools)
    return lark_grammar(f"start: begun* TEXT\nTEXT: /{ANY_TEXT}/\n{begun}", foreign=False)


def _json_calls(tools: Tools) -> str:
    """The rules of a text up to and with one call of a strict tool. The name comes before the arguments."""
    lines = []
    strict = [spec for spec in tools.specs if spec.strict]
    for i, spec in enumerate(strict):
        name = re.escape(spec.name)
        kind = f'("type"{SPACE}*:{SPACE}*"function"{SPACE}*,{SPACE}*)?'
        lines.append(rf'open_{i}[lazy]: /{ANY_TEXT}\{{{SPACE}*{kind}"name"{SPACE}*:{SPACE}*"{name}"/')
        lines.append(f"arguments_{i}: %json {json.dumps(_schema(spec) | {'x-guidance': ONE_LINE})}")
        lines.append(f"begun_{i}: open_{i} KEY arguments_{i} END")
    lines.append(rf'KEY: /{SPACE}{{0,4}},{SPACE}{{0,4}}"(parameters|arguments)"{SPACE}{{0,4}}:{SPACE}{{0,4}}/')
    lines.append(rf"END: /{SPACE}{{0,4}}\}}/")
    lines.append("begun: " + " | ".join(f"begun_{i}" for i in range(len(strict))))
    return "\n".join(lines)


def _pythonic_calls(tools: Tools) -> str:
    """The rules of a text up to and with one list of calls. Any tool's call may begin the list, so all are read; the
    arguments of a tool that is not strict are any."""
    lines = [SHARED_RULES]
    for i, spec in enumerate(tools.specs):
        arguments = "py_arguments"
        if spec.strict:
            python = PythonArguments(_schema(spec), prefix=f"tool_{i}")
            lines += python.lines
            arguments = python.rule
        lines.append(rf"open_{i}[lazy]: /{ANY_TEXT}\[\s*{re.escape(spec.name)}\(/")
        lines.append(f'rest_{i}: {arguments} ")"')
        lines.append(f"call_{i}: {json.dumps(spec.name + '(')} rest_{i}")
    numbers = range(len(tools.specs))
    lines.append("first: " + " | ".join(f"open_{i} rest_{i}" for i in numbers))
    lines.append("call: " + " | ".join(f"call_{i}" for i in numbers))
    lines.append('begun: first (PY_SEP call)* "]"' if tools.parallel else 'begun: first "]"')
    return "\n".join(lines)


def _calls(tools: Tools, options: Mapping[str, Any], form: type[CallParser]) -> str:
    """The rules of calls. Each call is one JSON value. `options` of white space must be the same in a grammar of other
    JSON next to it."""
    is_hermes = issubclass(form, HermesCallParser)
    before, after, between = (f"{CALL_TAG}\n", f"\n{CALL_END_TAG}", "\n") if is_hermes else ("", "", "; ")
    key = "arguments" if is_hermes else "parameters"
    calls = [f"%json {json.dumps(_call_schema(spec, key, options))}" for spec in tools.specs]
    lines = ["calls: call" + (f" ({json.dumps(between)} call)*" if tools.parallel else "")]
    call = " | ".join(f"call_{i}" for i in range(len(calls)))
    lines.append(f"call: {json.dumps(before)} ({call}) {json.dumps(after)}" if is_hermes else f"call: {call}")
    lines += [f"call_{i}: {call}" for i, call in enumerate(calls)]
    return "\n".join(lines)


def _call_schema(spec: FunctionSpec, key: str, options: Mapping[str, Any]) -> dict[str, Any]:
    properties = {"name": {"const": spec.name}, key: moved(_schema(spec), f"#/properties/{key}")}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        "x-guidance": options,
    }


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
