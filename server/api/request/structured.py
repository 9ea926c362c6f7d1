"""The structured output that a request asks for, in OpenAI's or vLLM's fields, and its grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from server.api.request.raw_json import RawField, read_raw
from server.api.request.schemas import SamplingFields
from server.api.state import ServerState
from server.grammar import forms
from server.http.errors import RequestError, invalid, unsupported

MAX_BYTES = 4 * forms.MAX_GRAMMAR_CHARS  # of one field
FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")  # of `structured_outputs`

Made = Callable[[], str]

_decode_any: msgspec.json.Decoder[Any | None] = msgspec.json.Decoder(Any)


async def requested_grammar(state: ServerState, body: SamplingFields) -> str | None:
    """The grammar of the output; None: the output is free. The grammar is compiled once in a thread to check it.

    Raises RequestError 400 with the field at fault: there is more than one constraint, or one is invalid, or the
    compiler refuses it. The compiler's message has the place in the schema.
    """
    asked = _asked(body)
    if not asked:
        return None
    if len(asked) > 1:
        message = f"{asked[1][0]}: there is {asked[0][0]} already; one constraint on the output is allowed."
        raise RequestError(400, message, param=asked[1][0])
    ((param, made),) = asked
    return await state.grammars.make(made, param=param)


def field_of_grammar(body: SamplingFields) -> str:
    """The field that has given the grammar of a request that has been checked."""
    return next((field for field, _ in _asked(body)), "tools")


def _asked(body: SamplingFields) -> list[tuple[str, Made]]:
    """(field, function that makes its grammar) for every constraint on the output."""
    asked = []
    value = _read("response_format", body.response_format)
    if value is not None and (made := _response_format(value)) is not None:
        asked.append(("response_format", made))
    value = _read("structured_outputs", body.structured_outputs)
    if value is not None:
        asked += [("structured_outputs", made) for made in _structured_outputs(value)]
    for form in ("json", "regex", "choice", "grammar"):
        field = f"guided_{form}"
        value = _read(field, getattr(body, field))
        if value is not None:
            asked.append((field, _made(field, form, value)))
    return asked


def _read(param: str, raw: RawField) -> Any:
    return read_raw(param, raw, _decode_any, max_bytes=MAX_BYTES)


def _response_format(value: Any) -> Made | None:
    """None for the type `text`: the output is free."""
    param = "response_format"
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object", "schema": schema} if schema is not None:  # llama.cpp's older form
            return _made(param, "json", schema)
        case {"type": "json_object"}:
            return forms.json_object_grammar
        case {"type": "json_schema", "json_schema": {"schema": schema}} if schema is not None:
            return _made(param, "json", schema)
        case {"type": "json_schema"}:
            raise invalid(param, "the type `json_schema` needs a `json_schema` with a `schema`")
        case {"type": "structural_tag"}:
            return _made(param, "structural_tag", value)
        case {"type": str(kind)}:
            raise unsupported(param, f"the type `{kind[:40]}` is")
    raise invalid(param, "must be an object with a `type`")


def _structured_outputs(value: Any) -> list[Made]:
    param = "structured_outputs"
    if not isinstance(value, Mapping):
        raise invalid(param, "must be an object")
    given = {form: content for form, content in value.items() if content not in (None, False)}
    unknown = sorted(given.keys() - set(FORMS))
    if unknown:
        raise unsupported(param, f"the option `{unknown[0][:40]}` is")
    if len(given) != 1:
        raise invalid(param, f"must have exactly one of {', '.join(FORMS)}, got {len(given)}")
    return [_made(param, form, content) for form, content in given.items()]


def _made(param: str, form: str, content: Any) -> Made:
    match form, content:
        case "json_object", True:
            return forms.json_object_grammar
        case "json", str() | dict() | bool():
            schema = _from_text(param, content)
            return lambda: forms.json_schema_grammar(schema)
        case "regex", str(pattern):
            return lambda: forms.regex_grammar(pattern)
        case "grammar", str(text):
            return lambda: forms.lark_grammar(text)
        case "choice", list(choices) if all(isinstance(choice, str) for choice in choices):
            return lambda: forms.choice_grammar(choices)
        case "structural_tag", str() | dict():
            tag = _from_text(param, content)
            match tag:
                case {"structures": list(structures), "triggers": list(triggers)}:
                    return lambda: forms.structural_tag_grammar(structures, triggers)
            raise invalid(param, "a structural tag needs a list of `structures` and a list of `triggers`")
    kinds = {"json": "a schema", "choice": "a list of texts", "structural_tag": "an object", "json_object": "true"}
    raise invalid(param, f"`{form}` must be {kinds.get(form, 'a text')}")


def _from_text(param: str, content: Any) -> Any:
    """A schema or tag may be given as JSON text."""
    if not isinstance(content, str):
        return content
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise invalid(param, f"is not JSON: {error}") from error
