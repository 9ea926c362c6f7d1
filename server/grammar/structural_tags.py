"""Structural tags: free text with structured parts, as a tree of formats in the form of XGrammar and vLLM.

    structural_tag_grammar({"type": "structural_tag", "format": {
        "type": "triggered_tags", "triggers": ["<f="],
        "tags": [{"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {...}}, "end": "</f>"}],
    }})

The older form, with `structures` and `triggers`, is a `triggered_tags`. A format about tokens is refused, because no
grammar contains special tokens, and so is a field of a format that is not known.

A format without an end of its own, such as `any_text`, needs what ends it: the `end` of the tag around it, or the end
of the whole text. So each format is written together with the texts that may follow it (`ends`): none of them at the
end of the whole, and `None` where another format follows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from batcher.grammar import GrammarError
from server.grammar.forms import Grammar, held_schema_grammar, lark_grammar, parts_of, regex_grammar

MAX_TEXT_CHARS = 10_000  # of an `any_text` with `max_chars`
ANY = "(.|\\n)"
Ends = tuple[str, ...] | None


# What a field may be, by its name: it is the same in every format.
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("value", "style", "grammar", "pattern", "begin", "separator"), (str,)),
    **dict.fromkeys(("excludes", "elements", "triggers", "tags", "rules"), (list,)),
    **dict.fromkeys(("any_order", "at_least_one", "stop_after_first", "loop"), (bool,)),
    **dict.fromkeys(("max_chars", "max_tokens"), (int, type(None))),
    **dict.fromkeys(("min", "max"), (int,)),
    "json_schema": (dict, bool),
    "content": (dict,),
    "end": (str, list),
}
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("any_order", "at_least_one", "stop_after_first"), False),
    "style": "json",
    "excludes": [],
    "max_chars": None,
    "max_tokens": None,
    "loop": True,
}
_ONLY_DEFAULT = ("style", "any_order", "max_tokens")  # no other value can be served
_FIELDS: dict[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema", "style", "any_order"),
    "grammar": ("grammar",),
    "regex": ("pattern",),
    "any_text": ("excludes", "max_chars", "max_tokens"),
    "sequence": ("elements",),
    "or": ("elements",),
    "optional": ("content",),
    "plus": ("content",),
    "star": ("content",),
    "repeat": ("content", "min", "max"),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
    "dispatch": ("rules", "loop", "excludes"),
}


def structural_tag_grammar(tag: Mapping[str, Any]) -> Grammar:
    """The texts of a structural tag in either form, and what its JSON schemas ask for beyond that.

    Raises GrammarError, which names the place of a format that cannot be served.
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
        """The rule of a format and of what ends it."""
        kind, fields = _read(format, place)
        match kind:
            case "any_text":
                return self._any_text(fields, place, ends)
            case "triggered_tags" | "dispatch":
                return self._triggered(kind, fields, place, ends)
            case "sequence":
                return self._sequence(fields["elements"], place, ends)
            case "or":
                branches = [self.write(f, f"{place}.elements.{i}", ends) for i, f in enumerate(fields["elements"])]
                if not branches:
                    raise GrammarError(f"{place}: `or` must have at least one of `elements`")
                return self._rule(" | ".join(branches))
            case "optional":
                return self._rule(f"{self.write(fields['content'], f'{place}.content', ends)} | {_one_of(ends)}")
            case "tag":
                return self._rule(self._tag(fields, place, ends))
        return self._rule(f"{self._closed(kind, fields, place)} {_one_of(ends)}")

    def _closed(self, kind: str, fields: dict[str, Any], place: str) -> str:
        """A format that ends by itself."""
        match kind:
            case "const_string":
                return json.dumps(fields["value"])
            case "json_schema":
                return self._part(held_schema_grammar(fields["json_schema"]), place)
            case "regex":
                return self._part(Grammar(regex_grammar(fields["pattern"])), place)
            case "grammar":
                return self._part(Grammar(lark_grammar(fields["grammar"])), place)
            case "tags_with_separator":
                tags = [self._tag(*tag, None) for tag in _read_tags(fields["tags"], place)]
                one = f"({' | '.join(tags)})"
                if not fields["stop_after_first"]:
                    one = f"({one} ({json.dumps(fields['separator'])} {one})*)"
                return one if fields["at_least_one"] else f"{one}?"
        inner = self.write(fields["content"], f"{place}.content", None)
        if kind != "repeat":
            return f"{inner}{'*' if kind == 'star' else '+'}"
        least, most = fields["min"], fields["max"]
        if least < 0 or most < -1 or -1 < most < least:
            raise GrammarError(f"{place}: `min` must be 0 or more, and `max` must be `min` or more, or -1")
        if most == 0:
            return ""
        return f"{inner}{{{least},{'' if most < 0 else most}}}"

    def _sequence(self, elements: list[Any], place: str, ends: Ends) -> str:
        last = len(elements) - 1
        rules = [self.write(e, f"{place}.elements.{i}", ends if i == last else None) for i, e in enumerate(elements)]
        return self._rule(" ".join(rules) or _one_of(ends))

    def _any_text(self, fields: dict[str, Any], place: str, ends: Ends) -> str:
        most = fields["max_chars"]
        if most is not None and not 0 <= most <= MAX_TEXT_CHARS:
            raise GrammarError(f"{place}: `max_chars` must be between 0 and {MAX_TEXT_CHARS}, got {most}")
        return self._text_until(self._text(fields["excludes"], place, most=most), place, ends)

    def _tag(self, fields: dict[str, Any], place: str, ends: Ends) -> str:
        """A tag whose fields have been read."""
        return f"{json.dumps(fields['begin'])} {self._after_begin(fields, place, ends)}"

    def _after_begin(self, fields: dict[str, Any], place: str, ends: Ends) -> str:
        own = [fields["end"]] if isinstance(fields["end"], str) else _texts(fields["end"], f"{place}.end")
        if not own or ("" in own and len(own) > 1):
            raise GrammarError(f"{place}.end: must be one text, or a list of texts that are not empty")
        if own == [""]:
            return self.write(fields["content"], f"{place}.content", ends)
        return self._rule(f"{self.write(fields['content'], f'{place}.content', tuple(own))} {_one_of(ends)}")

    def _triggered(self, kind: str, fields: dict[str, Any], place: str, ends: Ends) -> str:
        """Tags in free text. Of several triggers that begin a tag, the shortest counts: it is complete first."""
        if kind == "dispatch":
            tags, at_least_one, stops = _read_rules(fields["rules"], place), False, not fields["loop"]
            triggers = [tag["begin"] for tag, _ in tags]
        else:
            tags, at_least_one = _read_tags(fields["tags"], place), fields["at_least_one"]
            stops = fields["stop_after_first"]
            triggers = _texts(fields["triggers"], f"{place}.triggers")
        text = self._text(fields["excludes"], place)
        opened = {trigger: self._rule(f"{text} {json.dumps(trigger)}", is_lazy=True) for trigger in triggers if trigger}
        after = ends if stops else None
        whole, triggered = [], []
        for tag, tag_place in tags:
            trigger = min((t for t in opened if tag["begin"].startswith(t)), key=len, default=None)
            if trigger is None:
                raise GrammarError(f"{tag_place}: its `begin` must start with one of the triggers")
            rest = self._after_begin(tag, tag_place, after)
            whole.append(f"{json.dumps(tag['begin'])} {rest}")
            triggered.append(f"{opened[trigger]} {json.dumps(tag['begin'].removeprefix(trigger))} {rest}")
        if at_least_one and stops:
            return self._rule(" | ".join(whole))
        some, tail = self._rule(" | ".join(triggered)), self._text_until(text, place, ends)
        if stops:
            return self._rule(f"{some} | {tail}")
        return self._rule(f"{f'({" | ".join(whole)})' if at_least_one else ''} {some}* {tail}")

    def _text(self, excludes: Sequence[Any], place: str, *, most: int | None = None) -> str:
        """The terminal of free text without the texts `excludes`."""
        name = self._name().upper()
        text = f"{ANY}*" if most is None else f"{ANY}{{0,{most}}}"
        left_out = tuple(each for each in _texts(excludes, f"{place}.excludes") if each)
        self.lines.append(f"{name}: /{text}/" + (f" & ~(/{ANY}*/ {_one_of(left_out)} /{ANY}*/)" if left_out else ""))
        return name

    def _text_until(self, text: str, place: str, ends: Ends) -> str:
        """Free text up to and with the first of the ends."""
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
        if name in _ONLY_DEFAULT and value != _DEFAULTS[name]:
            raise GrammarError(f"{place}: `{name}` {json.dumps(value)[:40]} is not supported by this server")
    return named, fields


def _read_tags(tags: list[Any], place: str) -> list[tuple[dict[str, Any], str]]:
    """The fields of each tag, and its place."""
    if not tags:
        raise GrammarError(f"{place}.tags: there must be at least one")
    return [(_read(tag, f"{place}.tags.{i}", "tag")[1], f"{place}.tags.{i}") for i, tag in enumerate(tags)]


def _read_rules(rules: list[Any], place: str) -> list[tuple[dict[str, Any], str]]:
    """The rules of a `dispatch` as tags without an end."""
    tags = []
    for i, rule in enumerate(rules):
        match rule:
            case [str(pattern), dict(content)] if pattern:
                tags.append(({"begin": pattern, "content": content, "end": ""}, f"{place}.rules.{i}"))
            case _:
                raise GrammarError(f"{place}.rules.{i}: must be a text and a format")
    if not tags:
        raise GrammarError(f"{place}.rules: there must be at least one")
    return tags


def _texts(values: Sequence[Any], place: str) -> list[str]:
    if not all(isinstance(value, str) for value in values):
        raise GrammarError(f"{place}: must be a list of texts")
    return list(values)


def _one_of(ends: Ends) -> str:
    return f"({' | '.join(map(json.dumps, ends))})" if ends else ""
