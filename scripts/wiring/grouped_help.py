"""`--help` in parts: the flags that most people need and the names of the groups, one group, or everything."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, override

ALL = "all"


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
