"""Declares a setting and its flag in one place: a field of a frozen dataclass with `setting`.

The help of a command, the tables of flags in the documents, and the checks of ranges come from these declarations.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from model.inputs.paths import local_path, place_argument

MOST_SECONDS = 10**6
MOST_COUNT = 2**62  # the limit of all counts: a larger number overflows
_FLAG = "flag"


# The converter of a flag's text, and its placeholder in the help, by the type of the field.
_TYPES: dict[str, dict[str, Any]] = {
    "int": {"type": int, "metavar": "N"},
    "float": {"type": float},
    "Path": {"type": local_path},
    "Place": {"type": place_argument},
}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """The flag of a field, and the values that the field may have.

    A field that is False or True by default has a flag without a value, `--name` or `--no-name`.
    """

    help: str  # without the default
    group: str
    unset: str | None = None  # the default in words, if it has no value
    type: Callable[[str], Any] | None = None  # converts the flag's text; by default the field's type does
    metavar: str | None = None
    nargs: str | None = None  # for a list, to which each use of the flag adds
    action: Any = None  # of argparse
    choices: Collection[Any] = ()
    least: float | None = None
    most: float = MOST_COUNT
    above: float | None = None  # in place of `least`: values must be larger than this one
    name: str = ""  # the flag's name; by default the field's
    also: Sequence[str] = ()  # other names of the flag

    @property
    def dest(self) -> str:
        """The name of its value in a namespace."""
        return self.name.removeprefix("--").replace("-", "_")


class EachCounts(argparse.Action):
    """Collects the values of a list flag that is given several times. They replace the default."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: Any = None
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*values] if before is self.default else [*before, *values])


class Once(argparse.Action):
    """Refuses a flag that is given twice, such as one with a secret. Otherwise the first value would silently be
    dropped."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: Any = None
    ) -> None:
        if getattr(namespace, self.dest) is not self.default:
            parser.error(f"{flag}: it is given twice, and there can be one only")
        setattr(namespace, self.dest, values)


def setting(default: Any, help: str, **of_flag: Any) -> Any:
    """A field of a dataclass with a flag. The arguments are those of `Flag`."""
    return dataclasses.field(default=default, metadata={_FLAG: Flag(help=help, **of_flag)})


def flags_of(settings: type[Any]) -> dict[str, tuple[Flag, Any]]:
    """The flags of a class of settings and their defaults, by the names of the fields."""
    found = {}
    for field in dataclasses.fields(settings):
        if _FLAG in field.metadata:
            flag: Flag = field.metadata[_FLAG]
            inferred = _TYPES.get(str(field.type).removesuffix(" | None"), {})
            missing = {name: value for name, value in inferred.items() if getattr(flag, name) is None}
            name = flag.name or "--" + field.name.replace("_", "-")
            found[field.name] = (replace(flag, **missing, name=name), field.default)
    return found


def flag_name(settings: type[Any], field: str) -> str:
    """The flag of a field, for messages."""
    return flags_of(settings)[field][0].name


def values_of(settings: type[Any], args: argparse.Namespace) -> dict[str, Any]:
    """The values of the flags of a class of settings, by the names of the fields."""
    return {field: getattr(args, flag.dest) for field, (flag, _) in flags_of(settings).items()}


def add_flags(parser: argparse.ArgumentParser, settings: type[Any]) -> None:
    """Adds the flags of a class of settings, whose `GROUPS` has the descriptions of the groups that it adds."""
    for name, description in settings.GROUPS.items():
        parser.add_argument_group(name, description)
    there = {group.title: group for group in parser._action_groups}
    for flag, default in flags_of(settings).values():
        _add(there[flag.group], flag, default)


def check_flags(settings: Any) -> None:
    """Raises ValueError for a value that is not allowed. The message has the flag's name, its value and its range."""
    for field, (flag, _) in flags_of(type(settings)).items():
        value, name = getattr(settings, field), flag.name
        if value is None or isinstance(value, bool):
            continue
        if flag.choices and value not in flag.choices:
            raise ValueError(f"{name} {value!r}: it can be one of {', '.join(map(str, flag.choices))}")
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


def _add(group: argparse._ArgumentGroup, flag: Flag, default: Any) -> None:
    name, text = flag.name, flag.help
    if default is True:
        group.add_argument(f"--no-{name[2:]}", dest=flag.dest, action="store_false", help=text + ".")
        group.add_argument(name, dest=flag.dest, action="store_true", default=True, help=argparse.SUPPRESS)
    elif default is False:
        group.add_argument(name, *flag.also, dest=flag.dest, action="store_true", help=text + ".")
    else:
        said = f"{default:g}" if flag.type is float and default is not None else default
        said = flag.unset or ("none" if default in (None, "", ()) else said)
        options: dict[str, Any] = {"action": flag.action or (EachCounts if flag.nargs else "store")}
        options |= {"nargs": flag.nargs} if flag.nargs else {}
        choices = [str(choice) if isinstance(choice, str) else choice for choice in flag.choices]  # not as `Enum.NAME`
        group.add_argument(
            name, *flag.also, dest=flag.dest, type=flag.type or str, metavar=flag.metavar,
            default=list(default) if isinstance(default, tuple) else default, choices=choices or None,
            help=f"{text} (default: {said}).".replace("%", "%%"), **options,
        )  # fmt: skip
