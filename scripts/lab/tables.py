"""What benches print: a head that says where figures are from, tables in Markdown, and ratios."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "numpy")
_SECRET = re.compile(r"(--[\w-]*api-key[= ])\S+")
_SPEC = re.compile(r"([<>]?)(\d*)(.*)")
_CPU = re.compile(r"^model name\s*: (.*)$", re.MULTILINE)


def say(line: str) -> None:
    """Prints it at once."""
    print(line, flush=True)


def say_head(device: str = "cpu") -> None:
    """Prints date, versions, device and command. `device`: as jax names it."""
    say(f"{head(device)}\n")


def head(device: str = "cpu") -> str:
    """As `say_head` prints it."""
    packages = ", ".join(f"{name} {version}" for name, version in versions(PACKAGES).items())
    return f"{datetime.now(UTC):%Y-%m-%d}; {packages}; {processor() if device == 'cpu' else device}; `{command()}`"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of the packages that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def processor() -> str:
    """The cores, and the processor's name where Linux says it."""
    info = Path("/proc/cpuinfo")
    found = _CPU.search(info.read_text()) if info.exists() else None
    return f"{os.cpu_count()} cores, {found[1] if found else platform.machine()}"


def command() -> str:
    """The command as it was typed, without keys."""
    return _SECRET.sub(r"\1...", f"python -m scripts.lab {shlex.join(sys.argv[1:])}")


def ratio(text: str, above: float | None, below: float | None) -> str:
    """A line with the quotient; a dash if there is none."""
    return f"{text}: {above / below:.3f}" if above and below else f"{text}: -"


class Table:
    """A table in Markdown, told line by line: `Table({"": "<18", "step ms": "9.2f"})`.

    Args:
        columns: titles, each with the format of its numbers and texts. A format may begin with a width, and with < for
            a column whose cells are on the left, as those of columns without a format are.
        say: gets each line (default: they are kept in `lines` only).
    """

    def __init__(self, columns: Mapping[str, str], say: Callable[[str], None] = lambda line: None) -> None:
        self.lines: list[str] = []
        self._say = say
        self._columns: list[tuple[bool, int, str]] = []  # whether on the left, the width, and the rest of the format
        for title, spec in columns.items():
            side, width, form = _SPEC.fullmatch(spec).groups()  # type: ignore[union-attr]
            self._columns.append((side == "<" or not spec, max(int(width), len(title)) if width else 0, form))
        self.row(*columns)
        rules = ["-" * max(3 if on_left else 2, width - (not on_left)) for on_left, width, _ in self._columns]
        self.row(*(rule + ":" * (not on_left) for rule, (on_left, *_) in zip(rules, self._columns, strict=True)))

    def row(self, *values: object) -> None:
        """A line with a value for each column. Texts are not formatted, and None is a dash."""
        cells = []
        for value, (on_left, width, form) in zip(values, self._columns, strict=True):
            text = "-" if value is None else value if isinstance(value, str) else format(value, form)
            cells.append(text.ljust(width) if on_left else text.rjust(width))
        self.lines.append(f"| {' | '.join(cells)} |")
        self._say(self.lines[-1])
