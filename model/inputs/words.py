"""Values and errors as one readable line: bounded in length, without control characters."""

from __future__ import annotations

import reprlib
import textwrap
from typing import Any

MAX_LINE_CHARS = 4000
_DETAIL = "\t"  # around the details of a line of a report
_REPORT_WIDTH = 120

_REPR = reprlib.Repr(maxlevel=4, maxdict=12, maxlist=12, maxset=12, maxtuple=12, maxstring=100, maxother=100)


def shown(value: Any) -> str:
    """`repr`, shortened for long or deeply nested values."""
    return _REPR.repr(value)


def one_line(text: str) -> str:
    """The text in one line: lines are joined, non-printable characters escaped, and a very long text is cut off."""
    line = " ".join(stripped for part in text.splitlines() if (stripped := part.strip()))
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line[: MAX_LINE_CHARS + 1])
    return line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + "..."


def detail(text: str) -> str:
    """A part of a line of a report that `report_lines` leaves out by default."""
    return f"{_DETAIL}{text}{_DETAIL}"


def report_lines(line: str, *, verbose: bool = False) -> str:
    """A line of a report as it is printed: whole and with details if `verbose`, else in lines of 120 characters."""
    parts = line.split(_DETAIL)
    if verbose:
        return "".join(parts)
    return textwrap.fill(
        "".join(parts[::2]), _REPORT_WIDTH, subsequent_indent=" " * 20, break_long_words=False, break_on_hyphens=False
    )


def is_worded(error: BaseException) -> bool:
    """Whether the error's message is for the user. Every other error is a fault of this program."""
    return isinstance(error, ValueError | OSError)


def described(error: BaseException) -> str:
    """The error in one line. An internal error is shown with its type and a hint at --debug."""
    name, message = type(error).__name__, one_line(str(error))
    if is_worded(error):
        return message or name
    return f"internal error: {name}: {message}; run with --debug for the traceback"
