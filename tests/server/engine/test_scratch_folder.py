"""Folders of processes that are killed: removed by the next start, and nothing else with them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.engine.scratch_folder import PREFIX, ScratchFolder, sweep
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import CHAT, HELLO
from tests.server.support.running import ECHO, ROOT, running_server

OWNER = """
import sys
from pathlib import Path
from server.engine.scratch_folder import ScratchFolder
folder = ScratchFolder(Path(sys.argv[1]))
(folder.path / "file").write_text("a")
print(folder.path, flush=True)
sys.stdin.read()
"""


def folders(root: Path) -> list[Path]:
    return sorted(root.glob(f"{PREFIX}*"))


def owner(root: Path) -> subprocess.Popen[str]:
    """A process that holds a folder in `root` until it is killed."""
    command = [sys.executable, "-c", OWNER, str(root)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.folder = Path(process.stdout.readline().strip())
    return process


def test_a_folder_lasts_as_long_as_its_owner(tmp_path):
    with ScratchFolder(tmp_path) as scratch:
        assert scratch.path.parent == tmp_path
        assert scratch.path.stat().st_mode & 0o777 == 0o700
        (scratch.path / "file").write_text("a")
    assert folders(tmp_path) == []


def test_what_a_killed_process_leaves_is_swept_and_what_a_live_one_holds_is_not(tmp_path):
    with owner(tmp_path) as killed, owner(tmp_path) as alive:
        killed.kill()
        killed.wait()
        assert killed.folder.is_dir()
        with ScratchFolder(tmp_path) as own:
            assert folders(tmp_path) == sorted([alive.folder, own.path])
            sweep(tmp_path)  # not one's own either
            assert folders(tmp_path) == sorted([alive.folder, own.path])
        alive.kill()


def test_what_is_not_such_a_folder_stays(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("a")
    (tmp_path / f"{PREFIX}link").symlink_to(precious)
    (tmp_path / f"{PREFIX}file").write_text("a")
    (tmp_path / f"{PREFIX}open").mkdir(mode=0o777)
    (tmp_path / f"{PREFIX}open").chmod(0o777)
    dead = tmp_path / f"{PREFIX}dead"
    dead.mkdir(mode=0o700)
    (dead / "link").symlink_to(precious)
    names = {path.name for path in folders(tmp_path)}
    sweep(tmp_path)
    assert {path.name for path in folders(tmp_path)} == names - {dead.name}
    assert (precious / "file").read_text() == "a"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_another_users_folder_stays(tmp_path):
    other = tmp_path / f"{PREFIX}other"
    other.mkdir(mode=0o700)
    os.chown(other, 12345, 12345)
    sweep(tmp_path)
    assert other.is_dir()


def test_starts_at_the_same_time_do_not_take_each_others_folders(tmp_path):
    processes = [owner(tmp_path) for _ in range(4)]
    assert folders(tmp_path) == sorted(process.folder for process in processes)
    for process in processes:
        process.communicate()
    assert folders(tmp_path) == sorted(process.folder for process in processes)  # they ended without a clean-up
    sweep(tmp_path)
    assert folders(tmp_path) == []


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder whose path is short enough for sockets: pytest's own may be too long."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_a_servers_sockets_are_swept_by_the_next_server(tmp_path, temporary):
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with running_server(tmp_path, ECHO, EchoConfig(), env=environment) as killed:
        (left,) = folders(temporary)
        killed.process.kill()
        killed.process.wait()
        assert left.is_dir()
        with running_server(tmp_path, ECHO, EchoConfig(), env=environment) as server, server.http() as http:
            assert left not in folders(temporary)
            assert http.post(CHAT, json=HELLO | {"max_tokens": 1}).status_code == 200
    assert folders(temporary) == []
