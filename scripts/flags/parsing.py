"""Extensions of argparse: help in groups, shell completion, flags that are given more than once, and JSON values."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, override

import msgspec

from model.inputs.words import shown

ALL = "all"  # the groups of `--help`
# zsh reads bash's completions after `bashcompinit`. Words that are no flags are completed as paths.
SCRIPT = """\
[ -z "${{ZSH_VERSION:-}}" ] || {{ autoload -U +X compinit bashcompinit && compinit -u && bashcompinit; }}
_pallas_serve() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    case "$previous" in
{choices}
        *) case "$word" in -*) words="{flags}" ;; esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _pallas_serve {command}
"""


def add_grouped_help(parser: argparse.ArgumentParser, *, common: Sequence[str]) -> None:
    """Adds `--help [GROUP]` to a parser without help. `common` are the flags that it shows without a group."""
    parser.add_argument(
        "-h", "--help", nargs="?", const="", metavar="GROUP", action=_PrintHelp, common=common, dest=argparse.SUPPRESS,
        help="Prints the most important flags, those of one group, or `all` (default: the most important ones).",
    )  # fmt: skip


class _PrintHelp(argparse.Action):
    """Prints help and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, common: Sequence[str], **options: Any) -> None:
        super().__init__(option_strings, dest, **options)
        self._common = common

    @override
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        groups = {group.title: group for group in parser._action_groups if group.description is not None}
        if values == ALL:
            text = parser.format_help()
        elif values in groups:
            group = groups[values]
            text = _formatted(parser, f"{values}: {str(group.description).rstrip('.')}", group._group_actions)
        elif values:
            parser.error(f"{flag} {values}: there are {', '.join(map(str, groups))} and {ALL}")
        else:
            shown = [action for action in parser._actions if set(action.option_strings) & set(self._common)]
            by_place = sorted(shown, key=lambda action: self._common.index(action.option_strings[0]))
            text = _formatted(parser, "the most important flags", by_place)
            width = max(len(str(title)) for title in groups)
            lines = [f"  {title:{width}}  {group.description}" for title, group in groups.items()]
            text += "\n".join(["", "more flags, by `--help GROUP`:", *lines, f"  {ALL:{width}}  Everything.", ""])
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


class PrintCompletion(argparse.Action):
    """A flag that prints the completion of its parser's flags and exits, as `--help` does."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    @override
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(completion(parser), end="")
        parser.exit()


def completion(parser: argparse.ArgumentParser) -> str:
    """The shell code of the completion. Suppressed flags are left out. A flag with choices completes to these."""
    shown = [action for action in parser._actions if action.option_strings and action.help != argparse.SUPPRESS]
    flags = [flag for action in shown for flag in action.option_strings]
    choices = [
        f'        {"|".join(action.option_strings)}) words="{" ".join(map(str, action.choices))}" ;;'
        for action in shown
        if action.choices
    ]
    return SCRIPT.format(flags=" ".join(flags), choices="\n".join(choices), command=parser.prog)


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
