"""Folders of programs: none of them stops a start, and none that others can write to is used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts.building.device import kept_folders, users_cache_folder
from scripts.flags.settings import EngineSettings


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_folders_are_made_for_this_user_alone(home):
    folders = kept_folders(EngineSettings())
    assert folders.programs == home / ".cache/pallas-serve/compiled"
    assert folders.native == home / ".cache/pallas-serve/compiled/native"
    made = [home / ".cache", *(home / ".cache").rglob("*")]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 4
    assert kept_folders(EngineSettings(compile_cache="none")).programs is None


@pytest.mark.parametrize("settings", [EngineSettings(), EngineSettings(compile_cache="~/programs")])
def test_a_folder_that_cannot_be_made_is_a_warning(home, monkeypatch, caplog, settings):
    (home / "file").touch()
    monkeypatch.setenv("HOME", str(home / "file/home"))
    folders = kept_folders(settings)
    assert (folders.programs, folders.native) == (None, None)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "programs are not kept for the next start" in caplog.text and str(home / "file") in caplog.text


def test_the_default_folder_is_not_used_if_others_can_write_to_it(home, caplog):
    programs = kept_folders(EngineSettings()).programs
    assert isinstance(programs, Path)
    programs.chmod(0o775)
    assert kept_folders(EngineSettings()).programs is None
    assert f"other users may write to {programs}" in caplog.text and "`chmod 700` it" in caplog.text
    with pytest.raises(ValueError, match="--compile-cache: other users may write to"):
        kept_folders(EngineSettings(compile_cache=str(programs)))


def test_code_in_c_is_not_read_from_a_folder_that_others_can_write_to(home, caplog):
    native = kept_folders(EngineSettings()).native
    assert native is not None
    native.chmod(0o777)
    folders = kept_folders(EngineSettings())
    assert folders.programs is not None and folders.native is None
    assert f"other users may write to {native}" in caplog.text


def test_a_user_without_a_home_has_a_folder_in_the_temporary_one(tmp_path, monkeypatch):
    """As in a container whose user has a number and no entry in /etc/passwd."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert users_cache_folder().parent.parent == tmp_path
