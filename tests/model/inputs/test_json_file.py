from __future__ import annotations

import os

import pytest

from model.inputs.json_file import read_object, read_text


def test_the_last_of_equal_keys_counts(tmp_path):
    (tmp_path / "f").write_text('{"a": 1, "a": 2}')
    assert read_object(tmp_path / "f") == {"a": 2}


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # whoever opened it would wait for ever
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match="is not a file"):
            read_object(path)


def test_a_file_that_is_not_there_is_the_systems_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_object(tmp_path / "f")


def test_a_text_has_an_end(tmp_path):
    (tmp_path / "f").write_text("abcd")
    assert read_text(tmp_path / "f", 4) == "abcd"
    with pytest.raises(ValueError, match="has 4 bytes; at most 3 are read"):
        read_text(tmp_path / "f", 3)
