"""Writes the tables of flags in the documents, from the flags' declarations."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from scripts import launch

ROOT = Path(__file__).parents[2]
README, ALL = ROOT / "README.md", ROOT / "scripts/README.md"


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    return argparse.ArgumentParser(prog="python -m scripts.lab flag_table", description=__doc__, allow_abbrev=False)


def documents() -> dict[Path, str]:
    """The documents with their tables made anew: README.md has the most important flags, scripts/README.md all."""
    serve = launch.parser()
    important = [action for action in serve._actions if set(action.option_strings) & set(launch.COMMON_FLAGS)]
    groups = [group for group in serve._action_groups if group.description and group.title]
    tables = [f"**{group.title}**: {group.description}\n\n{table(group._group_actions)}" for group in groups]
    return {README: with_tables(README, table(important)), ALL: with_tables(ALL, "\n\n".join(tables))}


def table(flags: Iterable[argparse.Action]) -> str:
    """The rows of the flags that the help shows."""
    shown = [flag for flag in flags if flag.option_strings and flag.help is not argparse.SUPPRESS]
    return "\n".join(["| flag | meaning |", "|---|---|", *map(row, shown)])


def row(flag: argparse.Action) -> str:
    """The names of a flag and its sentences. Choices are listed in its meaning."""
    names = ", ".join(f"`{name}`" for name in flag.option_strings)
    choices = "" if flag.choices is None else f" One of {', '.join(f'`{choice}`' for choice in flag.choices)}."
    meaning = f"{flag.help}{choices}".replace("%%", "%").replace("|", "\\|")
    return f"| {names} | {meaning} |"


def with_tables(document: Path, tables: str) -> str:
    """The document with these tables between its marks."""
    begin, end = "<!-- flags: made by `python -m scripts.lab flag_table` -->", "<!-- end of flags -->"
    text, count = re.subn(
        f"(?s){re.escape(begin)}.*{re.escape(end)}", lambda _: f"{begin}\n\n{tables}\n\n{end}", document.read_text()
    )
    if count != 1:
        raise ValueError(f"{document} has no place for a table of flags")
    return text


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser().parse_args(argv)
    for document, text in documents().items():
        document.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
