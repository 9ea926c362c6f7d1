"""Declares a setting and its flag in one place: a field of a frozen dataclass with `setting`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

MOST_SECONDS = 10**6
MOST_COUNT = 2**62  # the limit of all counts: a larger number overflows
_FLAG = "flag"


@dataclass(frozen=True, kw_only=True)
class Flag:
    """The flag of a field, and the values that the field may have.

    A field that is False or True by default has a flag without a value, `--name` or `--no-name`.
    """

    help: str  # without the default
    group: str
    unset: str | None = None  # the default in words, if it has no value
    type: Callable[[str], Any] | None = None  # converts the flag's text
    metavar: str | None = None
    nargs: str | None = None  # for a list, to which each use of the flag adds
    choices: Collection[str] = ()
    least: float | None = None
    most: float = MOST_COUNT
    above: float | None = None  # in place of `least`: values must be larger than this one
    name: str | None = None  # the flag's name; by default the field's
    also: Sequence[str] = ()  # other names of the flag


def setting(default: Any, help: str, **of_flag: Any) -> Any:
    """A field of a dataclass with a flag. The arguments are those of `Flag`."""
    return dataclasses.field(default=default, metadata={_FLAG: Flag(help=help, **of_flag)})


def flags_of(settings: type[Any]) -> dict[str, tuple[Flag, Any]]:
    """The flags of a class of settings and their defaults, by the names of the fields."""
    fields = dataclasses.fields(settings)
    return {field.name: (field.metadata[_FLAG], field.default) for field in fields if _FLAG in field.metadata}


def flag_name(settings: type[Any], field: str) -> str:
    """The flag of a field, for messages."""
    return _name(field, flags_of(settings)[field][0])


def add_flags(
    parser: argparse.ArgumentParser,
    settings: type[Any],
    groups: Mapping[str, str],
    choices: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> dict[str, argparse._ArgumentGroup]:
    """Adds the flags of a class of settings, and returns their groups by name.

    Args:
        groups: the names of its groups with their descriptions, in the order of the help.
        choices: the choices of fields whose declaration does not have them.
    """
    added = {name: parser.add_argument_group(name, description) for name, description in groups.items()}
    for field, (flag, default) in flags_of(settings).items():
        _add(added[flag.group], field, replace(flag, choices=choices.get(field, flag.choices)), default)
    return added


def check_flags(settings: Any) -> None:
    """Raises ValueError for a value that is not allowed. The message has the flag's name, its value and its range."""
    for field, (flag, _) in flags_of(type(settings)).items():
        value, name = getattr(settings, field), _name(field, flag)
        if value is None or isinstance(value, bool):
            continue
        if flag.choices and value not in flag.choices:
            raise ValueError(f"{name} {value!r}: it can be one of {', '.join(flag.choices)}")
        if flag.above is not None and not flag.above < value <= flag.most:
            raise ValueError(f"{name} must be above {flag.above:g} and at most {flag.most:g}, not {value:g}")
        if flag.least is not None:
            check_range(name, value, flag.least, flag.most)


def check_range(name: str, value: float | None, least: float, most: float) -> None:
    """Raises ValueError, which names the flag or field, for a number that is out of range. None is allowed."""
    if value is None or least <= value <= most:
        return
    limit = f"at most {most}" if value > most else f"at least {least}"
    raise ValueError(f"{name} must be {limit}, not {value}")


def _name(field: str, flag: Flag) -> str:
    return flag.name or "--" + field.replace("_", "-")


def _add(group: argparse._ArgumentGroup, field: str, flag: Flag, default: Any) -> None:
    name, text = _name(field, flag), flag.help
    if default is True:
        group.add_argument(f"--no-{name[2:]}", dest=field, action="store_false", help=text + ".")
        group.add_argument(name, dest=field, action="store_true", default=True, help=argparse.SUPPRESS)
    elif default is False:
        group.add_argument(name, *flag.also, dest=field, action="store_true", help=text + ".")
    else:
        said = flag.unset if default is None or default == "" else f"{default:g}" if flag.type is float else default
        text += f" (default: {'none' if said is None else said})."
        several: dict[str, Any] = {"nargs": flag.nargs, "action": "extend"} if flag.nargs else {}
        group.add_argument(
            name, *flag.also, dest=field, type=flag.type or str, default=default, metavar=flag.metavar,
            choices=flag.choices or None, help=text.replace("%", "%%"), **several,
        )  # fmt: skip
