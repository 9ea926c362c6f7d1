from __future__ import annotations

import os

import pytest

from model.inputs.private_folders import check_closed, make_folder


def test_all_folders_on_the_way_are_private(tmp_path):
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]
    check_closed(tmp_path / "a" / "b", "--flag")


@pytest.mark.parametrize("mode", [0o701, 0o702, 0o704, 0o710, 0o720, 0o740])
def test_any_access_of_others_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(ValueError, match=f"--flag {tmp_path}: other users may enter it. Close it with `chmod 700"):
        check_closed(tmp_path, "--flag")


def test_a_group_that_is_inherited_opens_nothing(tmp_path):
    tmp_path.chmod(0o2700)
    check_closed(tmp_path, "--flag")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_a_folder_of_another_user_is_refused(tmp_path):
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(ValueError, match=f"--flag {tmp_path}: it belongs to another user"):
        check_closed(tmp_path, "--flag")
