"""Flags given twice, in all commands: of a list both count, of one value the last, and a secret is never dropped."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import pytest

from scripts import launch
from scripts.flags.serve import api_keys
from scripts.lab.chip.parts import PARTS
from server.flag import EachCounts, Once

SCRIPTS = Path(launch.__file__).parent
COMMANDS = sorted(
    ".".join(path.relative_to(SCRIPTS).with_suffix("").parts)
    for path in [*SCRIPTS.glob("*.py"), *SCRIPTS.glob("lab/*.py")]
    if "\ndef parser() -> argparse.ArgumentParser:" in path.read_text()
)
TEXTS = ["1", "2", "a={port}", "b={port}", "4:12", "8:16", '{"a": 1}', '{"b": 2}', *list(PARTS)[:2]]


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = importlib.import_module(f"scripts.{command}").parser()
    for action in parser._actions:
        action.required = False
    return parser


def flags_of(command: str) -> list[argparse.Action]:
    return [action for action in parser_of(command)._actions if action.option_strings and action.nargs != 0]


def two_values(action: argparse.Action) -> list[str]:
    """Two texts that the flag takes."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices][-2:]
    taken = []
    for text in TEXTS:
        try:
            (action.type or str)(text)
        except (ValueError, argparse.ArgumentTypeError):
            continue
        taken.append(text)
    return taken[:2]


def parsed(command: str, action: argparse.Action, *values: str) -> Any:
    arguments = [text for value in values for text in (action.option_strings[0], value)]
    return getattr(parser_of(command).parse_args(arguments), action.dest)


def is_list(action: argparse.Action) -> bool:
    return action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction)


CASES = [(command, action) for command in COMMANDS for action in flags_of(command)]
LISTS = [(command, action) for command, action in CASES if is_list(action)]
VALUES = [(command, action) for command, action in CASES if type(action) is argparse._StoreAction]
NAMES = {id(action): f"{command}:{action.option_strings[0]}" for command, action in CASES}


def names(cases: list[tuple[str, argparse.Action]]) -> list[str]:
    return [NAMES[id(action)] for _, action in cases]


def test_the_flags_that_are_known_are_found():
    assert {"launch:--api-key", "launch:--api-key-file", "launch:--admin-api-key", "lab.check:--model"} <= {
        *names(LISTS)
    }
    assert "launch:--port" in names(VALUES)
    assert not [name for name, (_, action) in zip(names(VALUES), VALUES, strict=True) if is_list(action)]


@pytest.mark.parametrize(("command", "action"), LISTS, ids=names(LISTS))
def test_of_a_list_both_count_and_replace_the_default(command, action):
    first, second = two_values(action)
    both = parsed(command, action, first, second)
    convert = action.type or str
    assert both == [convert(first), convert(second)]
    assert parsed(command, action, first) == both[:1]


@pytest.mark.parametrize(("command", "action"), VALUES, ids=names(VALUES))
def test_of_one_value_the_last_counts(command, action):
    first, second = two_values(action)
    assert parsed(command, action, first, second) == parsed(command, action, second)


def test_a_secret_is_not_dropped_in_silence(capsys):
    secrets = [(command, action) for command, action in CASES if isinstance(action, Once)]
    assert {"launch:--ssl-keyfile-password", "launch:--hosts-secret-file"} <= {*names(secrets)}
    for command, action in secrets:
        assert parsed(command, action, "a") is not None
        with pytest.raises(SystemExit):
            parsed(command, action, "a", "b")
        assert f"{action.option_strings[0]}: it is given twice" in capsys.readouterr().err


def test_keys_of_all_times_and_files_are_accepted(monkeypatch, tmp_path):
    monkeypatch.delenv("PALLAS_SERVE_API_KEY", raising=False)
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"in-{name}\n")
    files = [text for name in ("one", "two") for text in ("--api-key-file", str(tmp_path / name))]
    args = launch.parse(["--api-key", "k1", "k2", "--api-key", "k3", *files])
    assert api_keys(args) == ("k1", "k2", "k3", "in-one", "in-two")


def test_the_command_line_replaces_lists_of_a_configuration_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("api-key: [old]\nadmin_api_key: boss\nallowed_origins: [a, b]\n")
    args = launch.parse(["--config", str(file), "--api-key", "new", "--allowed-origins=c"])
    assert (args.api_key, args.admin_api_key, args.allowed_origins) == (["new"], ["boss"], ["c"])


def test_a_list_without_a_default():
    parser = argparse.ArgumentParser()
    parser.add_argument("--names", nargs="*", action=EachCounts)
    assert parser.parse_args([]).names is None
    assert parser.parse_args(["--names", "--names", "a"]).names == ["a"]
