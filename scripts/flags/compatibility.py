"""vLLM's flags, as `vllm.toml` lists them: those without a meaning here are taken with a line in the log, or refused
with a reason, and values that have another name here are translated."""

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
LEVEL_VARIABLE = "VLLM_LOGGING_LEVEL"
LEVELS = ("debug", "info", "warning", "error")
_READ_VARIABLES = ("VLLM_API_KEY", LEVEL_VARIABLE)
_NOTHING = (None, "", "None", "null", "{}", "[]")  # values that ask for nothing


def _by_flag(section: Mapping[str, str]) -> dict[str, str]:
    return {flag.rstrip("=+?"): reason for reason, flags in section.items() for flag in flags.split()}


def _nargs(*groups: str) -> dict[str, Any]:
    """The `nargs` of argparse of each flag."""
    by_end = {"=": None, "+": "+", "?": "?"}
    return {flag.rstrip("=+?"): by_end.get(flag[-1], 0) for flags in groups for flag in flags.split()}


SERVED = _nargs(TABLE["served"])
WITHOUT_EFFECT, REFUSED = _by_flag(TABLE["taken"]), _by_flag(TABLE["refused"])
UNSERVED = _nargs(*TABLE["taken"].values(), *TABLE["refused"].values())


def without_effect(flag: str, value: str | None) -> list[str]:
    """The line for the log about an unserved flag, if it needs one. Raises ValueError for a flag that is refused."""
    if flag in WITHOUT_EFFECT:
        return [f"{flag} has no effect: {WITHOUT_EFFECT[flag]}"]
    if value in _NOTHING and UNSERVED[flag] is None:
        return []
    raise ValueError(f"{flag}: {REFUSED[flag]}")


def translated(flag: str, value: str) -> tuple[list[str], list[str]] | None:
    """The arguments that mean the same here, and lines for the log if it is not quite the same. None: the flag and its
    value stay as they are. Raises ValueError for a value that is refused."""
    if flag in TABLE["harmless"] and re.fullmatch(TABLE["harmless"][flag], value):
        return [], []
    for entry in TABLE["values"]:
        if entry["flag"] == flag and re.fullmatch(entry["matches"], value):
            if "refuse" in entry:
                raise ValueError(f"{flag} {value}: {entry['refuse']}")
            return entry["as"], [f"{flag} {value}: {entry['why']}"] if "why" in entry else []
    return None


def log_warnings(args: argparse.Namespace) -> None:
    """Logs the lines of `parse_flags`, each once."""
    for warning in vars(args).pop("compatibility_warnings", ()):
        logger.warning("%s", warning)


def log_level(asked: str | None, environment: Mapping[str, str]) -> str:
    """The name of logging's level. Raises ValueError for an unknown one in the environment."""
    level = asked or environment.get(LEVEL_VARIABLE, "").lower().replace("critical", "error") or "info"
    if level not in LEVELS:
        raise ValueError(f"{LEVEL_VARIABLE} can be one of {', '.join(LEVELS)}, not {level!r}")
    return level.upper()


def unread_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """A line that names vLLM's variables in the environment that are not read here, if there are any."""
    names = sorted(name for name in environment if name.startswith("VLLM_") and name not in _READ_VARIABLES)
    if names:
        yield f"variables without effect here: {', '.join(names)}; --host, --port and other flags say such things"
