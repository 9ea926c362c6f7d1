"""`--config FILE`: flags from a YAML file. Flags of the command line take precedence."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from model.inputs.json_file import read_text
from model.inputs.words import shown

CONFIG = "--config"
MAX_CONFIG_BYTES = 2**20


def with_config(argv: Sequence[str], flags: Collection[str] = ()) -> list[str]:
    """The arguments of the file, then those of `argv` without `--config FILE`.

    A key is a flag's name, with `-` or `_`: `max-model-len: 512`, `served_model_name: [a, b]`, `strict-fields: true`.
    Raises ValueError or OSError for an invalid file.

    Args:
        flags: the flags that there are. The value `false` of a switch is `--no-SWITCH` if there is such a flag, and
            otherwise the switch's default.
    """
    arguments, files = [], []
    rest = iter(argv)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name != CONFIG:
            arguments.append(argument)
            continue
        file = value if equals else next(rest, None)
        if not file:
            raise ValueError("--config wants the path of a YAML file")
        files.append(Path(file))
    if len(files) > 1:
        raise ValueError(f"--config was given {len(files)} times: one file is read")
    given = {argument.partition("=")[0] for argument in arguments}  # they replace those of the file, lists too
    from_file = [argument for file in files for argument in _arguments(file, given, flags)]
    num_first = 1 if arguments and not arguments[0].startswith("-") else 0  # the model stays before lists of the file
    return arguments[:num_first] + from_file + arguments[num_first:]


def _arguments(file: Path, given: Collection[str], flags: Collection[str]) -> Iterator[str]:
    text = read_text(file, MAX_CONFIG_BYTES)
    try:
        settings = yaml.safe_load(text)
    except RecursionError as error:
        raise ValueError(f"--config {file} is nested too deeply") from error
    except Exception as error:  # of any type: yaml's readers of dates, numbers and truth values raise their own
        raise ValueError(f"--config {file} is not YAML: {str(error) or type(error).__name__}") from error
    if settings is None:
        return
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ValueError(f"--config {file}: it must hold `flag: value` lines")
    for key, value in settings.items():
        name = key.replace("_", "-")
        if f"--{name}" not in given:
            yield from _flag(name, value, file, flags)


def _flag(name: str, value: Any, file: Path, flags: Collection[str]) -> Iterator[str]:
    if name == CONFIG.removeprefix("--"):
        raise ValueError(f"--config {file}: it names another file")
    match value:
        case True:
            yield f"--{name}"
        case False:
            if f"--no-{name}" in flags:
                yield f"--no-{name}"
        case None:
            return
        case list() if all(isinstance(entry, str | int | float) for entry in value):
            yield f"--{name}"
            yield from map(str, value)
        case str() | int() | float():
            yield f"--{name}={value}"
        case _:
            raise ValueError(f"--config {file}: {name} must be a value or a list of them, not {shown(value)}")
