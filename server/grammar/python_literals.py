"""Lark rules for Python's literals, each valid by a JSON schema: for calls such as `f(a=True, b='x')`.

Booleans, null, choices, numbers, strings, lists and dicts are spelt as in Python. A value whose schema has other
keywords (`pattern`, `minimum`, ...) is spelt as in JSON, which the parser of calls reads, too. Arguments and the keys
of a dict come in the order of the schema's `properties`, as in llguidance's JSON. There are no others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from batcher.grammar import GrammarError
from server.grammar.forms import JSON_OPTIONS, MAX_GRAMMAR_CHARS
from server.grammar.references import contains_reference, moved, resolved

_ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly $comment $schema $defs definitions".split()
)
_OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties"})
_OF_LISTS = frozenset({"type", "items", "minItems", "maxItems"})
_PLAIN = {
    "string": "PY_STRING",
    "integer": "PY_INTEGER",
    "number": "PY_NUMBER",
    "boolean": '("True" | "False")',
    "null": '"None"',
}
_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": int | float,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
MAX_REPEATS = 1000  # of a list's items, as rules
MAX_CHARS = 2 * MAX_GRAMMAR_CHARS  # of all expressions: types that are alternatives multiply them

_ESCAPE = r"""\\["'\\abfnrtv]|\\x[0-9a-fA-F]{2}|\\u([0-9a-ce-fA-CE-F][0-9a-fA-F]|[dD][0-7])[0-9a-fA-F]{2}"""

# The rules that those of all schemas share. Escapes are Python's, without octal digits and without half surrogates.
SHARED_RULES = rf"""
py_arguments: (py_argument (PY_SEP py_argument)*)?
py_argument: PY_NAME "=" py_value
py_value: PY_STRING | PY_NUMBER | "True" | "False" | "None" | py_list | py_dict
py_list: "[" (py_value (PY_SEP py_value)*)? "]"
py_dict: "{{" (PY_STRING PY_COLON py_value (PY_SEP PY_STRING PY_COLON py_value)*)? "}}"
PY_SEP: /, ?/
PY_COLON: /: ?/
PY_NAME: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/
PY_INTEGER: /-?(0|[1-9][0-9]{{0,30}})/
PY_NUMBER: /-?(0|[1-9][0-9]{{0,30}})(\.[0-9]{{1,30}})?([eE][+-]?[0-9]{{1,2}})?/
PY_STRING: /"([^"\\\n]|{_ESCAPE})*"|'([^'\\\n]|{_ESCAPE})*'/
"""


class PythonArguments:
    """The rules of one function's arguments. `rule` is what stands between the parentheses; `lines` has all the rules.

    The names of the rules begin with `prefix`. Raises GrammarError for arguments that have no form in Python.
    """

    def __init__(self, schema: Mapping[str, Any], *, prefix: str) -> None:
        self.lines: list[str] = []
        self._root = schema
        self._prefix = prefix
        self._references: dict[str, str] = {}  # the rules of schemas that are referred to
        self._num_chars = 0
        try:
            self.rule = self._arguments(self._target(schema))
        except RecursionError as error:
            raise GrammarError("the schema is nested too deeply") from error

    def _arguments(self, schema: Any) -> str:
        given = _given(schema) if isinstance(schema, Mapping) else {}
        if others := sorted(given.keys() - _OF_OBJECTS):
            raise GrammarError(f"the keyword `{others[0][:40]}` around all arguments is not supported in Python's form")
        if not _has_members(given):
            raise GrammarError("`properties` must be an object, and `required` a list of names in it")
        return self._members(given, _keyword)

    def _value(self, schema: Any) -> str:
        expression = self._expression(schema)
        self._num_chars += len(expression) + 1
        if self._num_chars > MAX_CHARS:
            raise GrammarError("the grammar of the arguments in Python's form is too large")
        return expression

    def _expression(self, schema: Any) -> str:
        if schema is False:
            raise GrammarError("nothing is valid by the schema `false`")
        if schema is True:
            return "py_value"
        if not isinstance(schema, Mapping):
            raise GrammarError("a schema must be an object or a boolean")
        given = _given(schema)
        kind = given.get("type")
        match given:
            case {"$ref": str(reference)} if len(given) == 1 and reference.startswith("#"):
                return self._reference(reference)
            case {"anyOf": [_, *_] as options} if len(given) == 1:
                return self._either(options)
            case {"enum": [*choices]} if given.keys() <= {"enum", "type"} and (valid := _of_type(choices, kind)):
                return _choices(valid)
            case {"const": value} if given.keys() <= {"const", "type"} and _of_type([value], kind):
                return _choices([value])
            case {"type": [_, *_] as kinds}:
                return self._either([{**given, "type": each} for each in kinds])
            case {"type": str()} if len(given) == 1 and kind in _PLAIN:
                return _PLAIN[kind]
            case {"type": "array"} if given.keys() <= _OF_LISTS:
                return self._list(given)
            case {"type": "object", "properties": _} if given.keys() <= _OF_OBJECTS and _has_members(given):
                return f'"{{" {self._members(given, _dict_key)} "}}"'
        return "py_value" if not given else self._json(schema)

    def _either(self, options: list[Any]) -> str:
        return "(" + " | ".join(map(self._value, options)) + ")"

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            name = f"{self._prefix}_ref_{len(self._references)}"
            self._references[reference] = name
            self._add(name, self._value(self._target({"$ref": reference})))
        return self._references[reference]

    def _target(self, schema: Any) -> Any:
        """The schema itself, or the one at the end of its references."""
        seen: set[str] = set()
        while isinstance(schema, Mapping) and _given(schema).keys() == {"$ref"}:
            reference = schema["$ref"]
            if reference in seen or not isinstance(reference, str) or not reference.startswith("#"):
                raise GrammarError(f"the reference {str(reference)[:100]!r} leads to no schema here")
            seen.add(reference)
            schema = resolved(self._root, reference)
        return schema

    def _list(self, given: Mapping[str, Any]) -> str:
        least, most = given.get("minItems", 0), given.get("maxItems")
        if not all(isinstance(bound, int) and 0 <= bound <= MAX_REPEATS for bound in (least, most or 0)):
            return self._json(given)
        item = self._new("item", self._value(given.get("items", True)))
        if most is not None and most < least:
            raise GrammarError(f"no list has at least {least} and at most {most} items")
        if most == 0:
            return '"[" "]"'
        more = f"(PY_SEP {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = f"{item} {more}"
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _members(self, given: Mapping[str, Any], key: Callable[[str], str]) -> str:
        """The rule of arguments, or of what is in a dict. `key` spells a member's name and the mark after it."""
        rest = first = ""  # the rules of the members from one on: after another member, and as the first
        for name, schema in reversed(given.get("properties", {}).items()):
            member = f"{key(name)} {self._new('value', self._value(schema))} {rest}"
            is_required = name in given.get("required", ())
            rest, first = (
                self._new("member", whole if is_required else f"{whole} | {without}" if without else f"({whole})?")
                for whole, without in ((f"PY_SEP {member}", rest), (member, first))
            )
        return first

    def _json(self, schema: Mapping[str, Any]) -> str:
        place = "#/$defs/root"
        if contains_reference(schema):
            schema = {**moved(schema, place), "$defs": {"root": moved(self._root, place)}}
        one_line = JSON_OPTIONS | {"whitespace_pattern": " ?"}
        return "%json " + json.dumps({**schema, "x-guidance": one_line})

    def _new(self, kind: str, expression: str) -> str:
        name = f"{self._prefix}_{kind}_{len(self.lines)}"
        self._add(name, expression)
        return name

    def _add(self, name: str, expression: str) -> None:
        self.lines.append(f"{name}: {expression}")


def _given(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that say which values are valid."""
    return {key: value for key, value in schema.items() if key not in _ANNOTATIONS}


def _has_members(given: Mapping[str, Any]) -> bool:
    """Whether `properties` and `required` can be read, and the required ones are declared."""
    properties, required = given.get("properties", {}), given.get("required", [])
    if not (isinstance(properties, Mapping) and isinstance(required, list)):
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _of_type(values: list[Any], kind: Any) -> list[Any]:
    """The values that are of a type of JSON schema, or of one of a list of types; None: of any type."""
    kinds = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []
    types = [_TYPES[each] for each in kinds if isinstance(each, str) and each in _TYPES]
    return values if kind is None else [v for v in values if any(_is_of(v, of) for of in types)]


def _is_of(value: Any, of: Any) -> bool:
    return isinstance(value, of) and (of is bool or not isinstance(value, bool))


def _keyword(name: str) -> str:
    if not name.isidentifier():
        raise GrammarError(f"{name[:64]!r} cannot be the name of an argument in Python's form")
    return json.dumps(f"{name}=")


def _dict_key(name: str) -> str:
    return f"({_either_quotes(name)}) PY_COLON"


def _choices(values: list[Any]) -> str:
    return "(" + " | ".join(_either_quotes(v) if isinstance(v, str) else json.dumps(_spelt(v)) for v in values) + ")"


def _either_quotes(text: str) -> str:
    double = json.dumps(text, ensure_ascii=False)
    single = f"'{text}'" if double == f'"{text}"' and "'" not in text else None
    return json.dumps(double) if single is None else f"{json.dumps(double)} | {json.dumps(single)}"


def _spelt(value: Any) -> str:
    match value:
        case True | False | None:
            return str(value)
        case list():
            return "[" + ", ".join(map(_spelt, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{_spelt(key)}: {_spelt(each)}" for key, each in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
