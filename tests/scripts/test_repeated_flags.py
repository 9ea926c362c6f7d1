"""Flags given twice, in all commands: of a list both count, and a secret is never dropped."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

from scripts import launch
from scripts.flags.serve import api_keys
from server.flag import EachCounts, Once

SCRIPTS = Path(launch.__file__).parent
COMMANDS = sorted(
    ".".join(path.relative_to(SCRIPTS).with_suffix("").parts)
    for path in [*SCRIPTS.glob("*.py"), *SCRIPTS.glob("lab/*.py")]
    if "\ndef parser() -> argparse.ArgumentParser:" in path.read_text()
)
ACTIONS = [
    (f"{command}:{action.option_strings[0]}", action)
    for command in COMMANDS
    for action in importlib.import_module(f"scripts.{command}").parser()._actions
    if action.option_strings and action.nargs != 0
]


def test_every_list_counts_each_time():
    lists = {name: action for name, action in ACTIONS if action.nargs in ("+", "*")}
    assert {"launch:--api-key", "launch:--admin-api-key", "lab.serving:--goodput"} <= lists.keys()
    extended = argparse._ExtendAction  # without a default that the values would join
    others = {name: action for name, action in lists.items() if not isinstance(action, EachCounts)}
    assert {type(action) for action in others.values()} <= {extended}
    assert {action.default for action in others.values()} <= {None}


def test_a_secret_is_not_dropped_in_silence(capsys):
    secrets = {name: action for name, action in ACTIONS if isinstance(action, Once)}
    assert {"launch:--ssl-keyfile-password", "launch:--hosts-secret-file"} <= secrets.keys()
    for action in secrets.values():
        flag = action.option_strings[0]
        assert getattr(launch.parser().parse_args([flag, "a"]), action.dest) is not None
        with pytest.raises(SystemExit):
            launch.parser().parse_args([flag, "a", flag, "b"])
        assert f"{flag}: it is given twice" in capsys.readouterr().err


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
