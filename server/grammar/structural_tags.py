"""Structural tags: free text with structured parts, as a tree of formats in the form of XGrammar and vLLM.

    structural_tag_grammar({"type": "structural_tag", "format": {
        "type": "triggered_tags", "triggers": ["<f="],
        "tags": [{"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {...}}, "end": "</f>"}],
    }})

The older form, with `structures` and `triggers`, is a `triggered_tags`. Other formats and fields are refused by name.
Those about tokens are among them, because no grammar contains special tokens.

A format without an end of its own, such as `any_text`, needs what ends it: the `end` of the tag around it, or the end
of the whole text. So each format is written together with the texts that may follow it (`ends`): none of them at the
end of the whole, and `None` where another format follows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from batcher.grammar import GrammarError
from server.grammar.forms import Grammar, lark_grammar, parts_of, regex_grammar, schema_grammar

TEXT = "(.|\\n)*"
Ends = tuple[str, ...] | None


# What a field may be, by its name: it is the same in every format.
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("value", "style", "grammar", "pattern", "begin", "end"), (str,)),
    **dict.fromkeys(("elements", "triggers", "tags"), (list,)),
    **dict.fromkeys(("at_least_one", "stop_after_first"), (bool,)),
    "json_schema": (dict, bool),
    "content": (dict,),
}
_DEFAULTS: dict[str, Any] = {"at_least_one": False, "stop_after_first": False, "style": "json"}
_FIELDS: dict[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema", "style"),
    "grammar": ("grammar",),
    "regex": ("pattern",),
    "any_text": (),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first"),
}


def structural_tag_grammar(tag: Mapping[str, Any]) -> Grammar:
    """The grammar of a structural tag in either form, and the keywords of its JSON schemas that it does not enforce.

    Raises GrammarError, which names the place of a format that is not supported.
    """
    match tag:
        case {"format": dict(format)}:
            place = "format"
        case {"structures": [_, *_] as structures, "triggers": list(triggers)}:
            tags = [_from_structure(structure, f"structures.{i}") for i, structure in enumerate(structures)]
            format, place = {"type": "triggered_tags", "triggers": triggers, "tags": tags}, "structures"
        case _:
            raise GrammarError("a structural tag needs a `format`, or a list of `structures` and a list of `triggers`")
    writer = _Writer()
    try:
        start = writer.write(format, place, ())
    except RecursionError as error:
        raise GrammarError("the formats are nested too deeply") from error
    lark = lark_grammar("\n".join([f"start: {start}", *writer.lines]), foreign=False)
    if not writer.parts:
        return Grammar(lark)
    return Grammar(json.dumps({"grammars": [*parts_of(lark), *writer.parts]}), tuple(writer.unenforced))


def _from_structure(structure: Any, place: str) -> dict[str, Any]:
    match structure:
        case {"begin": begin, "end": end}:
            content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
            return {"begin": begin, "content": content, "end": end}
    raise GrammarError(f"{place}: a structure needs a `begin`, a `schema` and an `end`")


class _Writer:
    """Writes formats as rules of one Lark grammar. `parts` are the grammars to which the rules refer."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.parts: list[dict[str, Any]] = []
        self.unenforced: list[str] = []
        self._num_names = 0

    def write(self, format: Any, place: str, ends: Ends) -> str:
        """The rule of a format and of the text that ends it."""
        kind, fields = _read(format, place)
        match kind:
            case "any_text":
                return self._text_until(self._text(), place, ends)
            case "triggered_tags":
                return self._triggered(fields, place, ends)
            case "sequence":
                return self._sequence(fields["elements"], place, ends)
            case "or":
                branches = [self.write(f, f"{place}.elements.{i}", ends) for i, f in enumerate(fields["elements"])]
                if not branches:
                    raise GrammarError(f"{place}: `or` must have at least one of `elements`")
                return self._rule(" | ".join(branches))
            case "tag":
                return self._rule(f"{json.dumps(fields['begin'])} {self._after_begin(fields, place, ends)}")
        return self._rule(f"{self._closed(kind, fields, place)} {_one_of(ends)}")

    def _closed(self, kind: str, fields: dict[str, Any], place: str) -> str:
        """A format that ends by itself."""
        match kind:
            case "json_schema":
                return self._part(schema_grammar(fields["json_schema"]), place)
            case "regex":
                return self._part(Grammar(regex_grammar(fields["pattern"])), place)
            case "grammar":
                return self._part(Grammar(lark_grammar(fields["grammar"])), place)
        return json.dumps(fields["value"])

    def _sequence(self, elements: list[Any], place: str, ends: Ends) -> str:
        last = len(elements) - 1
        rules = [self.write(e, f"{place}.elements.{i}", ends if i == last else None) for i, e in enumerate(elements)]
        return self._rule(" ".join(rules) or _one_of(ends))

    def _after_begin(self, fields: dict[str, Any], place: str, ends: Ends) -> str:
        if not fields["end"]:
            return self.write(fields["content"], f"{place}.content", ends)
        return self._rule(f"{self.write(fields['content'], f'{place}.content', (fields['end'],))} {_one_of(ends)}")

    def _triggered(self, fields: dict[str, Any], place: str, ends: Ends) -> str:
        """The rule of tags in free text. The shortest of several triggers of a tag counts, because it is complete
        first."""
        at_least_one, stops = fields["at_least_one"], fields["stop_after_first"]
        triggers = fields["triggers"]
        if not all(isinstance(trigger, str) for trigger in triggers):
            raise GrammarError(f"{place}.triggers: must be a list of texts")
        if not fields["tags"]:
            raise GrammarError(f"{place}.tags: there must be at least one")
        text = self._text()
        opened = {trigger: self._rule(f"{text} {json.dumps(trigger)}", is_lazy=True) for trigger in triggers if trigger}
        whole, triggered = [], []
        for i, tag in enumerate(fields["tags"]):
            _, tag_fields = _read(tag, f"{place}.tags.{i}", "tag")
            begin = tag_fields["begin"]
            trigger = min((t for t in opened if begin.startswith(t)), key=len, default=None)
            if trigger is None:
                raise GrammarError(f"{place}.tags.{i}: its `begin` must start with one of the triggers")
            rest = self._after_begin(tag_fields, f"{place}.tags.{i}", ends if stops else None)
            whole.append(f"{json.dumps(begin)} {rest}")
            triggered.append(f"{opened[trigger]} {json.dumps(begin.removeprefix(trigger))} {rest}")
        if at_least_one and stops:
            return self._rule(" | ".join(whole))
        some, tail = self._rule(" | ".join(triggered)), self._text_until(text, place, ends)
        if stops:
            return self._rule(f"{some} | {tail}")
        return self._rule(f"{f'({" | ".join(whole)})' if at_least_one else ''} {some}* {tail}")

    def _text(self) -> str:
        """The terminal of free text."""
        name = self._name().upper()
        self.lines.append(f"{name}: /{TEXT}/")
        return name

    def _text_until(self, text: str, place: str, ends: Ends) -> str:
        """The rule of free text that ends with the first of the ends."""
        if ends is None:
            raise GrammarError(f"{place}: free text must be the last of a sequence, or in a tag with an `end`")
        return self._rule(f"{text} {_one_of(ends)}", is_lazy=bool(ends))

    def _part(self, grammar: Grammar, place: str) -> str:
        name = self._name()
        first, *_ = parts_of(grammar.text)
        self.parts.append({**first, "name": name})
        self.unenforced += [f"{place}: {keyword}" for keyword in grammar.unenforced]
        return f"@{name}"

    def _rule(self, body: str, *, is_lazy: bool = False) -> str:
        name = self._name()
        self.lines.append(f"{name}{'[lazy]' if is_lazy else ''}: {body}")
        return name

    def _name(self) -> str:
        self._num_names += 1
        return f"part_{self._num_names}"


def _read(format: Any, place: str, kind: str | None = None) -> tuple[str, dict[str, Any]]:
    """The type of a format, and all its fields. `kind`: the type that it must have, and need not name."""
    if not isinstance(format, Mapping) or format.get("type", kind) is None:
        raise GrammarError(f"{place}: must be an object with a `type`")
    given = dict(format)
    named = given.pop("type", kind)
    if not isinstance(named, str) or named not in _FIELDS:
        raise GrammarError(f"{place}: the format `{str(named)[:40]}` is not supported by this server")
    if kind not in (None, named):
        raise GrammarError(f"{place}: must be a `{kind}`, got `{named}`")
    for name in given.keys() - set(_FIELDS[named]):
        raise GrammarError(f"{place}: the field `{name[:40]}` of `{named}` is not supported by this server")
    fields = {name: given.get(name, _DEFAULTS.get(name, ...)) for name in _FIELDS[named]}
    for name, value in fields.items():
        if value is ...:
            raise GrammarError(f"{place}: `{named}` needs the field `{name}`")
        if type(value) not in _TYPES[name]:
            raise GrammarError(f"{place}.{name}: has a value of a wrong type: {json.dumps(value)[:40]}")
    if fields.get("style", "json") != "json":
        raise GrammarError(f"{place}: `style` {json.dumps(fields['style'])[:40]} is not supported by this server")
    return named, fields


def _one_of(ends: Ends) -> str:
    return f"({' | '.join(map(json.dumps, ends))})" if ends else ""
