"""Makes the grammar of an output: structured output in OpenAI's or vLLM's fields, tool calls, or both.

A required call is JSON in the model's own format (`JsonCallParser.written`), or in Llama 3's if that is not JSON. A
model that may choose whether to call writes calls in its own format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from batcher.grammar import GrammarError
from server.api.request.body import read_raw
from server.api.request.schemas import FunctionSpec, SamplingFields
from server.api.request.tools import ToolChoice, Tools
from server.api.state import ServerState
from server.grammar import forms
from server.grammar.forms import JSON_OPTIONS, Grammar, ThinkingBudget, lark_grammar, parts_of, reasoned_grammar
from server.grammar.schemas import MAX_GRAMMAR_CHARS, EnforceableSchema, enforceable_schema
from server.grammar.structural_tags import structural_tag_grammar
from server.http.request_error import RequestError, invalid, unsupported
from server.text.reasoning import ReasoningFormat
from server.text.tool_calls.json_calls import JsonCallParser, WrittenForm
from server.text.tool_calls.parser import CallParser

MAX_BYTES = 4 * MAX_GRAMMAR_CHARS  # the size limit of a field
FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")  # of `structured_outputs`
ONE_LINE = JSON_OPTIONS | {"whitespace_pattern": " ?"}
ANY_TEXT = r"(.|\n)*"
SPACE = r"[ \t\r\n]"  # JSON's

Made = Callable[[], Grammar]
_json_object: Made = partial(forms.schema_grammar, {"type": "object"})

_decode_any: msgspec.json.Decoder[Any | None] = msgspec.json.Decoder(Any)


class Constraint(NamedTuple):
    """The field that asks for a form of the output, and the function that makes its grammar."""

    field: str
    make: Made
    asked: dict[str, Any]  # as `structured_outputs` has it


def asked_constraint(body: SamplingFields) -> Constraint | None:
    """The constraint that a body asks for; None: the output is free. Raises RequestError 400 if there are several
    constraints, or one is invalid."""
    asked = _constraints(body)
    if len(asked) > 1:
        message = f"{asked[1].field}: there is {asked[0].field} already; one constraint on the output is allowed."
        raise RequestError(400, message, param=asked[1].field)
    return asked[0] if asked else None


async def make_grammar(state: ServerState, constraint: Constraint | None) -> Grammar | None:
    """The constraint's grammar, which is not checked yet. Raises RequestError 400 with the field."""
    return None if constraint is None else await state.grammars.make(constraint.make, param=constraint.field)


async def compiled(state: ServerState, constraint: Constraint | None) -> Grammar | None:
    """The constraint's grammar, after it was compiled once in a thread to check it. Raises RequestError 400 with the
    field. The compiler's message has the place in the schema."""
    grammar = await make_grammar(state, constraint)
    if grammar is not None and constraint is not None:
        await state.grammars.check(grammar.text, param=constraint.field)
    return grammar


async def with_calls(
    state: ServerState, own: type[CallParser], tools: Tools | None, answer: Grammar | None
) -> Grammar | None:
    """The unchecked grammar of an answer that may contain, or must be, tool calls. `own` is the model's format of
    calls, and `answer` the grammar of an answer without calls.

    Raises RequestError 400 for a schema that is not supported.
    """
    if tools is None:
        return answer
    is_free = tools.choice is ToolChoice.AUTO and answer is None
    if is_free and not any(spec.strict for spec in tools.specs):
        return None  # the arguments of a strict tool must match its schema, even if the model need not call it
    form = tools.call_format(own, is_free=answer is None)
    if is_free and not issubclass(form, JsonCallParser):
        return Grammar("", tuple(f"{spec.name}: strict" for spec in tools.specs if spec.strict))

    def make() -> Grammar:
        before = Grammar("") if answer is None else answer
        calls = tool_grammar(tools, before.text or None, form)
        return calls._replace(unenforced=(*before.unenforced, *calls.unenforced))

    return await state.grammars.make(make, param="tools")


async def after_reasoning(
    state: ServerState, grammar: Grammar | None, form: ReasoningFormat, *, is_open: bool, budget: int | None, field: str
) -> Grammar | None:
    """The unchecked grammar of an answer that follows reasoning. Reasoning is free, up to `budget` tokens if that is
    not None."""
    answer, unenforced = grammar or Grammar("")
    if not answer and budget is None:
        return grammar

    def make() -> Grammar:
        return Grammar(reasoned_grammar(answer or None, start=form.start, end=form.end, is_open=is_open), unenforced)

    reasoned = await state.grammars.make(make, param=field)
    if budget is None:
        return reasoned
    bounded = ThinkingBudget(budget, "" if is_open else form.start, form.end)
    return reasoned._replace(text=bounded.added_to(reasoned.text))


def _constraints(body: SamplingFields) -> list[Constraint]:
    readers: dict[str, Callable[[Any], Constraint | None]]
    readers = {"response_format": _response_format, "structured_outputs": _structured_outputs}
    for form in ("json", "regex", "choice", "grammar"):
        readers[f"guided_{form}"] = partial(_constraint, f"guided_{form}", form)
    asked: list[Constraint] = []
    for field, constraint_of in readers.items():
        value = read_raw(field, getattr(body, field), _decode_any, max_bytes=MAX_BYTES)
        if value is not None and (constraint := constraint_of(value)) is not None:
            asked.append(constraint)
    return asked


def _response_format(value: Any) -> Constraint | None:
    """The constraint of `response_format`; None: the type is `text`, and the output is free."""
    param = "response_format"
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object", "schema": schema} if schema is not None:  # llama.cpp's older form
            return _constraint(param, "json", schema)
        case {"type": "json_object"}:
            return _constraint(param, "json_object", True)
        case {"type": "json_schema", "json_schema": {"schema": schema, **others}} if schema is not None:
            return _constraint(param, "json", schema, strict=bool(others.get("strict")))
        case {"type": "json_schema"}:
            raise invalid(param, "the type `json_schema` needs a `json_schema` with a `schema`")
        case {"type": "structural_tag"}:
            return _constraint(param, "structural_tag", value)
        case {"type": str(kind)}:
            raise unsupported(param, f"the type `{kind[:40]}` is")
    raise invalid(param, "must be an object with a `type`")


def _structured_outputs(value: Any) -> Constraint:
    param = "structured_outputs"
    if not isinstance(value, Mapping):
        raise invalid(param, "must be an object")
    given = {form: content for form, content in value.items() if content not in (None, False)}
    unknown = sorted(given.keys() - set(FORMS))
    if unknown:
        raise unsupported(param, f"the option `{unknown[0][:40]}` is")
    if len(given) != 1:
        raise invalid(param, f"must have exactly one of {', '.join(FORMS)}, got {len(given)}")
    ((form, content),) = given.items()
    return _constraint(param, form, content)


def _constraint(field: str, form: str, content: Any, *, strict: bool = False) -> Constraint:
    return Constraint(field, _made(field, form, content, strict=strict), {form: content})


def _made(param: str, form: str, content: Any, *, strict: bool = False) -> Made:
    match form, content:
        case "json_object", True:
            return _json_object
        case "json", str() | dict() | bool():
            schema = _from_text(param, content)
            return lambda: forms.schema_grammar(schema, strict=strict)
        case "regex", str(pattern):
            return lambda: Grammar(forms.regex_grammar(pattern))
        case "grammar", str(text):
            return lambda: Grammar(forms.lark_grammar(text))
        case "choice", list(choices) if all(isinstance(choice, str) for choice in choices):
            return lambda: Grammar(forms.choice_grammar(choices))
        case "structural_tag", str() | dict():
            tag = _from_text(param, content)
            return lambda: structural_tag_grammar(tag)
    kinds = {"json": "a schema", "choice": "a list of texts", "structural_tag": "an object", "json_object": "true"}
    raise invalid(param, f"`{form}` must be {kinds.get(form, 'a text')}")


def _from_text(param: str, content: Any) -> Any:
    """The content of a field, decoded if it is JSON text."""
    if not isinstance(content, str):
        return content
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise invalid(param, f"is not JSON: {error}") from error


def tool_grammar(tools: Tools, answer: str | None = None, form: type[CallParser] = JsonCallParser) -> Grammar:
    """If the model must call, the answer consists of calls only, and every tool's schema applies. If it may choose, the
    answer either matches the grammar `answer` or consists of calls. Without `answer`, text is free until a call in the
    format `form` begins, which must be JSON, and the schemas of strict tools apply.

    Raises GrammarError for a schema that cannot be compiled, and for a strict tool whose arguments cannot be held to
    all of it. The message has the tool's name.
    """
    written = form.written if issubclass(form, JsonCallParser) else JsonCallParser.written
    is_free = tools.choice is ToolChoice.AUTO and answer is None
    specs = [spec for spec in tools.specs if spec.strict or not is_free]
    options = JSON_OPTIONS if answer is not None else ONE_LINE
    held = [_held(spec, options) for spec in specs]
    unenforced = tuple(
        f"{spec.name}: {name}" for spec, each in zip(specs, held, strict=True) for name in each.unenforced
    )
    lines = [f"arguments_{i}: {each.expression}" for i, each in enumerate(held)]
    if is_free:
        lines += ["start: begun* TEXT", f"TEXT: /{ANY_TEXT}/", *_begun_calls(specs)]
        return Grammar(lark_grammar("\n".join(lines), foreign=False), unenforced)
    lines += _calls(specs, options, written, parallel=tools.parallel)
    if answer is None:
        return Grammar(lark_grammar("\n".join(["start: calls", *lines]), foreign=False), unenforced)
    start, *others = parts_of(answer)
    either = {"lark_grammar": lark_grammar("\n".join(["start: calls | @answer", *lines]), foreign=False)}
    return Grammar(json.dumps({"grammars": [either, {**start, "name": "answer"}, *others]}), unenforced)


def _held(spec: FunctionSpec, options: Mapping[str, Any]) -> EnforceableSchema:
    """The part of the arguments' schema that the grammar enforces. A tool without a schema takes no arguments."""
    schema = {"additionalProperties": False} if spec.parameters is None else spec.parameters
    try:
        return enforceable_schema({**schema, "type": "object"}, options, strict=bool(spec.strict))
    except GrammarError as error:
        raise GrammarError(f"{spec.name}: {error}") from error


def _begun_calls(specs: Sequence[FunctionSpec]) -> list[str]:
    """The rules of a text that ends with one call of a strict tool. The name comes before the arguments."""
    lines = []
    for i, spec in enumerate(specs):
        name = re.escape(spec.name).replace("/", r"\/")  # which would end the expression
        others = rf'("(type|id)"{SPACE}*:{SPACE}*("[^"\\\n]*"|\d+){SPACE}*,{SPACE}*){{0,2}}'
        lines.append(rf'open_{i}[lazy]: /{ANY_TEXT}\{{{SPACE}*{others}"name"{SPACE}*:{SPACE}*"{name}"/')
        lines.append(f"begun_{i}: open_{i} KEY arguments_{i} END")
    lines.append(rf'KEY: /{SPACE}{{0,4}},{SPACE}{{0,4}}"(parameters|arguments)"{SPACE}{{0,4}}:{SPACE}{{0,4}}/')
    lines.append(rf"END: /{SPACE}{{0,4}}\}}/")
    return [*lines, "begun: " + " | ".join(f"begun_{i}" for i in range(len(specs)))]


def _calls(
    specs: Sequence[FunctionSpec], options: Mapping[str, Any], written: WrittenForm, *, parallel: bool
) -> list[str]:
    """The rules of calls. Other JSON in the same grammar must have the same `options` of white space."""
    start, before, between, after, end = (f" {json.dumps(text)} " if text else "" for text in written[1:])
    lines = [
        f"calls:{start} call {f'({between} call)*' if parallel else ''} {end}",
        f"call:{before} ({' | '.join(f'call_{i}' for i in range(len(specs)))}) {after}",
        f"WHITE: /{options['whitespace_pattern']}/",
    ]
    for i, spec in enumerate(specs):
        marks = ("{", '"name"', ":", f'"{spec.name}"', ",", f'"{written.key}"', ":")
        lines.append(f'call_{i}: {" WHITE ".join(map(json.dumps, marks))} WHITE arguments_{i} WHITE "}}"')
    return lines
