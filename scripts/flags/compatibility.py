"""vLLM's flags, as `vllm.toml` lists them: those without a meaning here are taken with a warning, or refused with a
reason, and values that have another name here are translated."""

from __future__ import annotations

import argparse
import logging
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("pallas_serve")

TABLE: dict[str, Any] = tomllib.loads((Path(__file__).parent / "vllm.toml").read_text(encoding="utf-8"))
_NARGS = {"=": None, "+": "+", "?": "?"}  # by the end of a flag in the table; a switch has none of these
_NOTHING = "|None|null|{}|[]".split("|")  # values that ask for nothing
READ_VARIABLES = ("VLLM_API_KEY", "VLLM_LOGGING_LEVEL")


def _name(flag: str) -> str:
    return flag.rstrip("=+?")


def _by_flag(section: Mapping[str, str]) -> dict[str, str]:
    return {_name(flag): reason for reason, flags in section.items() for flag in flags.split()}


SERVED = tuple(map(_name, TABLE["served"].split()))
WITHOUT_EFFECT, REFUSED = _by_flag(TABLE["taken"]), _by_flag(TABLE["refused"])
NARGS: dict[str, Any] = {
    _name(flag): _NARGS.get(flag[-1], 0)
    for flags in (TABLE["served"], *TABLE["taken"].values(), *TABLE["refused"].values())
    for flag in flags.split()
}


class _Do(argparse.Action):
    """Calls the function `const` with the parser, the namespace, the flag and its value."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: Any = None
    ) -> None:
        self.const(parser, namespace, flag, values)


def _warn(_parser: argparse.ArgumentParser, namespace: argparse.Namespace, flag: str, _value: Any) -> None:
    warnings = vars(namespace).setdefault("compatibility_warnings", [])
    warnings.append(f"{flag} has no effect: {WITHOUT_EFFECT[flag]}")


def _refuse(parser: argparse.ArgumentParser, _namespace: argparse.Namespace, flag: str, value: Any) -> None:
    if value not in _NOTHING:
        parser.error(f"{flag}: {REFUSED[flag]}")


def add_compatibility_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags, hidden from the help. The namespace's `compatibility_warnings` has the warnings, if any."""
    hidden: dict[str, Any] = {"action": _Do, "dest": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for flags, work in ((WITHOUT_EFFECT, _warn), (REFUSED, _refuse)):
        for flag in flags:
            parser.add_argument(flag, nargs=NARGS[flag], const=work, **hidden)


def translated(flag: str, value: str) -> tuple[list[str], str | None] | None:
    """The arguments that mean the same here, and a line for the log if that is not quite the same. None: the flag and
    its value stay as they are."""
    if re.fullmatch(TABLE["harmless"].get(flag, r"[^\s\S]"), value):
        return [], None
    for entry in TABLE["values"]:
        if entry["flag"] == flag and re.fullmatch(entry["matches"], value):
            why = entry.get("why")
            return entry["as"], why and f"{flag} {value}: {why}"
    return None


def log_warnings(args: argparse.Namespace) -> None:
    """Logs the warnings of the flags of `add_compatibility_flags`, each once."""
    for warning in vars(args).pop("compatibility_warnings", ()):
        logger.warning("%s", warning)


def unread_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """A line that names vLLM's variables in the environment that are not read here, if there are any."""
    names = sorted(name for name in environment if name.startswith("VLLM_") and name not in READ_VARIABLES)
    if names:
        yield f"{', '.join(names)} have no effect here: --host, --port and other flags say such things"
