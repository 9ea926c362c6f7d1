"""The fields that request types do not declare: other names of declared fields, refused, or ignored. `fields.toml` has
their table.

A field is refused if the answer would be wrong without it. It is accepted with a value that changes nothing: null,
false, 0, an empty text or list, or a value of HARMLESS. A field that only tunes an answer, such as a level of effort,
is accepted with any value and has no effect. The same applies to a field that is not in the table. The log names both
kinds once, and a server with `--strict-fields` refuses them.

The name of an inner object's field in the table is its path, without positions in lists.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from server.api.request.schemas import ChatRequest, CompletionRequest, Generates

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SYNONYMS = {name: tuple(names.split()) for names in _TABLE["synonyms"] for name in names.split()}
BEAM_SEARCH = {kind: names.split() for kind, names in _TABLE["beam_search"].items()}
_COUNTERPARTS: dict[str, str] = _TABLE["counterparts"]
_IGNORED, _IGNORED_INSIDE = (frozenset(_TABLE[kind].split()) for kind in ("ignored", "ignored_inside"))
HARMLESS = {name: tuple(row["values"]) for row in _TABLE["harmless"] for name in row["names"].split()}

_PLACE = re.compile(r"(?:^|(?<=\.))\d+\.")  # in a list


class Refusal(NamedTuple):
    """Why a field is not served."""

    why: str  # the rest of the sentence "FIELD: ..."
    harmless: tuple[Any, ...]
    tunes: bool = False  # whether an answer without it is not wrong: only a strict server refuses the field

    def concerns(self, value: Any) -> bool:
        """Whether the value changes the answer. An empty object does, because it may be a schema."""
        if isinstance(value, dict):
            value = {name: inner for name, inner in value.items() if inner is not None}
        if value is None or value in self.harmless:
            return False
        return bool(value) or value == {} or any(harmless is True for harmless in self.harmless)


def _by_name(rows: dict[str, str]) -> dict[str, str]:
    return {name: why for why, names in rows.items() for name in names.split()}


_WHY_GENERATING, _WHY_ANYWHERE, _WHY_TUNES = (_by_name(_TABLE[kind]) for kind in ("generating", "anywhere", "tunes"))
NO_BEST_OF = _WHY_GENERATING["best_of"]
_OF_OTHER_ROUTES = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *SYNONYMS}


def served_name(kind: type[msgspec.Struct], name: str) -> str | None:
    """The declared field for which `name` is another name; None: there is none."""
    return next((other for other in SYNONYMS.get(name, ()) if other in kind.__struct_fields__), None)


def is_ignored(path: str, name: str) -> bool:
    """Whether the field has no effect on any answer. `path` is that of the object: empty, or with a dot at its end."""
    return _PLACE.sub("", path) + name in _IGNORED or (path != "" and name in _IGNORED_INSIDE)


def refusal(kind: type[msgspec.Struct], path: str, name: str) -> Refusal | None:
    """The refusal of an undeclared field in an object of the type `kind`; None: the field is unknown."""
    full = _PLACE.sub("", path) + name
    generates = issubclass(kind, Generates)
    names = (full, name) if generates or not path else (full,)
    harmless = next((HARMLESS[each] for each in names if each in HARMLESS), ())
    why = next((_WHY_TUNES[each] for each in names if each in _WHY_TUNES), None)
    if why is not None and (generates or path):
        return Refusal(why, harmless, tunes=True)
    counterparts = () if path else _COUNTERPARTS.get(name, "").split()
    why = next((f"this route has `{own}` for it" for own in counterparts if own in kind.__struct_fields__), None)
    tables = (_WHY_GENERATING, _WHY_ANYWHERE) if generates or path else (_WHY_ANYWHERE,)
    why = why or next((table[each] for table in tables for each in names if each in table), None)
    if why is None and generates and (name in _OF_OTHER_ROUTES or name in _COUNTERPARTS):
        why = "this field of other routes is not supported yet here"
    return None if why is None else Refusal(why, harmless)
