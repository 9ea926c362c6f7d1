"""Extensions of argparse: vLLM's forms of flags, help in groups, and JSON values."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import PurePath
from typing import Any, Never, override

import msgspec

from model.inputs.words import shown
from scripts.flags.compatibility import TABLE, UNSERVED, translated, without_effect

ALL = "all"  # the groups of `--help`
_TRUTHS = {"true": True, "false": False}
_OPPOSITES = (("--no-", "--"), ("--disable-", "--enable-"), ("--enable-", "--disable-"), ("--", "--no-"))
_SIZES = {unit: base**power for base, units in ((1000, "kmgt"), (1024, "KMGT")) for power, unit in enumerate(units, 1)}


def add_grouped_help(parser: argparse.ArgumentParser, *, common: Sequence[str]) -> None:
    """Adds `--help [GROUP]` to a parser without help. `common` are the flags that it shows without a group."""
    parser.add_argument(
        "-h", "--help", nargs="?", const=common, metavar="GROUP", action=_PrintHelp, dest=argparse.SUPPRESS,
        help="Prints the most important flags, those of one group, or `all` (default: the most important ones).",
    )  # fmt: skip


class _PrintHelp(argparse.Action):
    """Prints help and exits. Without a group it is about the flags `const`."""

    @override
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        groups = {group.title: group for group in parser._action_groups if group.description is not None}
        if values is self.const:
            by_flag = parser._option_string_actions
            text = _formatted(parser, "the most important flags", [by_flag[flag] for flag in values])
            width = max(len(str(title)) for title in groups)
            lines = [f"  {title:{width}}  {group.description}" for title, group in groups.items()]
            text += "\n".join(["", "more flags, by `--help GROUP`:", *lines, f"  {ALL:{width}}  Everything.", ""])
        elif values == ALL:
            text = parser.format_help()
        elif values in groups:
            group = groups[values]
            text = _formatted(parser, f"{values}: {str(group.description).rstrip('.')}", group._group_actions)
        else:
            parser.error(f"{flag} {values}: there are {', '.join(map(str, groups))} and {ALL}")
        print(text, end="")
        parser.exit()


def _formatted(parser: argparse.ArgumentParser, heading: str, actions: Sequence[argparse.Action]) -> str:
    formatter = parser.formatter_class(prog=parser.prog)
    formatter.add_usage(parser.usage, parser._actions, ())
    formatter.add_text(parser.description)
    formatter.start_section(heading)
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help()


class KeywordParser(argparse.ArgumentParser):
    """A parser that raises ValueError for what it cannot parse."""

    @override
    def error(self, message: str) -> Never:
        raise ValueError(message)


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The namespace of a command line that may have vLLM's flags and forms (`plain_flags`). An unknown flag is an error
    that names the nearest one. The namespace's `compatibility_warnings` has lines for the log."""
    actions = parser._option_string_actions
    try:
        words, notes = plain_flags(sys.argv[1:] if argv is None else argv, actions)
    except ValueError as error:
        parser.error(str(error))
    args, unknown = parser.parse_known_args(words)
    if flags := [word.partition("=")[0] for word in unknown if word.startswith("-")]:
        nearest = get_close_matches(flags[0], [*actions, *UNSERVED], n=1)
        parser.error(f"there is no {flags[0]}" + "".join(f"; the nearest is {flag}" for flag in nearest))
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.compatibility_warnings = notes
    return args


def plain_flags(argv: Sequence[str], actions: Mapping[str, argparse.Action]) -> tuple[list[str], list[str]]:
    """The arguments in argparse's forms, without vLLM's flags that have no meaning here, and lines for the log.

    Read are `--max_model_len`, counts such as 16k and 32K, `--switch=true`, `--no-switch`, JSON lists of texts, fields
    such as `--speculative-config.method ngram`, and vLLM's names of values. Raises ValueError for a refused flag, and
    for one that is given both with its fields and as a whole.

    Args:
        actions: those of the parser, by their flags.
    """
    rest, words, notes = [*reversed(argv)], list[str](), list[str]()
    kinds = UNSERVED | {flag: action.nargs for flag, action in actions.items()}
    objects: dict[str, dict[str, Any]] = {}

    def add(flag: str, value: str | None, *parts: str) -> None:
        if value is not None and (known := translated(flag, value)) is not None:
            words.extend(known[0])
            notes.extend(known[1])
        elif flag in actions:
            words.extend(parts)
        else:
            notes.extend(without_effect(flag, value))

    while rest:
        word = rest.pop()
        name, equals, text = word.partition("=")
        head, dot, path = name.partition(".")
        flag = head.replace("_", "-") if head.startswith("--") else head
        if flag in TABLE["fields"]:
            flag, dot, path = TABLE["fields"][flag].partition(".")
        flag = actions[flag].option_strings[0] if flag in actions else flag
        value = text if equals else rest[-1] if rest and not rest[-1].startswith("--") else None
        switch = flag if kinds.get(flag, "") == 0 else None if flag in kinds else _opposite(flag, kinds)
        if switch is not None and (not equals or text.lower() in _TRUTHS):
            truth = _TRUTHS.get((value or "").lower())
            if truth is not None and not equals:
                rest.pop()
            off = _opposite(switch, kinds)
            if (switch == flag) is (truth is not False):
                add(switch, None, switch)
            elif off is not None:
                add(off, None, off)
            else:  # it is off by default
                words = [word for word in words if word != switch]
        elif flag not in kinds or (flag in actions and (value is None or kinds[flag] not in (None, "+"))):
            words.append(word if flag not in kinds else flag + equals + text)
        elif flag in actions and kinds[flag] == "+":
            listed = _texts(value or "")
            if listed is not None and not equals:
                rest.pop()
            words.extend([flag + equals + text] if listed is None else [flag, *listed])
        else:
            if value is None and kinds[flag] != "?":
                raise ValueError(f"{flag}: expected one argument")
            if value is not None and not equals:
                rest.pop()
            while kinds[flag] == "+" and rest and not rest[-1].startswith("-"):
                rest.pop()  # of a flag without effect
            if value == "None" and flag in actions:
                continue  # vLLM's word for the default
            if dot and value is not None:
                _put(objects.setdefault(flag, {}), path.split("."), value)
                continue
            if flag in actions and value is not None:
                value = _counted(value) if actions[flag].type is int else value
                choices = actions[flag].choices or ()
                value = value.lower() if value not in choices and value.lower() in choices else value
            add(flag, value, *([f"{flag}={value}"] if equals else [flag, str(value)]))
    for flag, fields in objects.items():
        if any(word.partition("=")[0] == flag for word in words):
            raise ValueError(f"{flag} is given, and so are fields of it: give one form only")
        add(flag, json.dumps(fields), flag, json.dumps(fields))
    return words, notes


def _opposite(flag: str, kinds: Mapping[str, Any]) -> str | None:
    """The switch that turns off what this one turns on, or the other way round; None: there is none."""
    names = [other + flag.removeprefix(prefix) for prefix, other in _OPPOSITES if flag.startswith(prefix)]
    return next((name for name in names if kinds.get(name, "") == 0), None)


def _counted(text: str) -> str:
    """A count such as `16k` (16,000) or `32K` (32,768) in digits; other texts stay as they are."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", text)
    return text if found is None else f"{float(found[1]) * _SIZES[found[2]]:.0f}"


def _texts(value: str) -> list[str] | None:
    """The texts of a JSON list; None: it is no such list."""
    try:
        return msgspec.json.decode(value, type=list[str]) or None
    except (msgspec.DecodeError, RecursionError):
        return None


def _put(fields: dict[str, Any], path: list[str], text: str) -> None:
    """Sets a field of a nested object."""
    *parents, name = path
    for parent in parents:
        fields = fields.setdefault(parent, {})
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    fields[name] = value


def flag_words(name: str, value: Any, where: str) -> list[str]:
    """The arguments of a flag with a value of YAML or Python. Raises ValueError, which begins with `where`, for a value
    that no argument has."""
    match value:
        case bool():
            return [f"--{name}" if value else f"--no-{name}"]
        case None:
            return []
        case list() | tuple() if all(isinstance(entry, str | int | float | dict) for entry in value):
            return [f"--{name}", *(json.dumps(entry) if isinstance(entry, dict) else str(entry) for entry in value)]
        case str() | int() | float() | PurePath():
            return [f"--{name}={value}"]
        case dict():
            return [f"--{name}={json.dumps(value)}"]
    raise ValueError(f"{where}: {name} must be a value or a list of them, not {shown(value)}")


def json_object(flag: str, value: str | Mapping[str, Any], example: str) -> dict[str, Any]:
    """The fields of a JSON object, or of its text. Raises ValueError, with the flag, for anything else."""
    try:
        fields = msgspec.json.decode(value) if isinstance(value, str) else dict(value)
    except RecursionError as error:
        words = f"{flag} is nested too deeply; give an object such as {example}"
        raise ValueError(f"{words}: what is given is not JSON that can be read") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{flag} {shown(value)} is not JSON ({error}); give an object such as {example}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{flag} is a JSON object such as {example}, not {shown(value)}")
    return fields


def structure[S: msgspec.Struct](flag: str, fields: Mapping[str, Any], kind: type[S]) -> S:
    """A structure of fields. Raises ValueError, with the flag, for unknown fields, and for values of another type."""
    if unknown := sorted(fields.keys() - set(kind.__struct_fields__)):
        raise ValueError(f"{flag}: unknown fields {', '.join(unknown)}; there are {', '.join(kind.__struct_fields__)}")
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{flag}: {error}") from error
