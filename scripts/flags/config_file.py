"""`--config FILE`: flags from a YAML file. Flags of the command line take precedence."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import yaml

from model.inputs.json_file import read_text
from scripts.flags.parsing import KeywordParser, flag_words

CONFIG = "--config"
MAX_CONFIG_BYTES = 2**20


def with_config(argv: Sequence[str]) -> list[str]:
    """The arguments of the file, then those of `argv` without `--config FILE`.

    A key is a flag's name, with `-` or `_`: `max-model-len: 512`, `served_model_name: [a, b]`, `strict-fields: true`.
    Raises ValueError or OSError for an invalid file.
    """
    parser = KeywordParser(allow_abbrev=False, add_help=False)
    parser.add_argument(CONFIG, nargs="?", const="", action="append", default=[])
    found, arguments = parser.parse_known_args(argv)
    files = found.config
    if "" in files:
        raise ValueError("--config wants the path of a YAML file")
    if len(files) > 1:
        raise ValueError(f"--config was given {len(files)} times: one file is read")
    # They replace those of the file, lists too.
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    from_file = [argument for file in files for argument in _arguments(Path(file), given)]
    num_first = 1 if arguments and not arguments[0].startswith("-") else 0  # the model stays before lists of the file
    return arguments[:num_first] + from_file + arguments[num_first:]


def _arguments(file: Path, given: Collection[str]) -> Iterator[str]:
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
        if f"--{name}" == CONFIG:
            raise ValueError(f"--config {file}: it names another file")
        if f"--{name}" not in given:
            yield from flag_words(name, value, f"--config {file}")
