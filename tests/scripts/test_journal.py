"""The journal of a batch run: torn records, and processes that want it at once and are killed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from scripts.offline import journal as journal_module
from scripts.offline.journal import Header, Journal
from server.batches.batch_file import answer_record, parse_line
from server.http.encoding import encode_json

ROOT = Path(__file__).parents[2]
HEADER = Header(input="aa", settings={"--model": "m"}, replaces=None)


def read_records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_journal_forgets_a_torn_record(tmp_path):
    path = tmp_path / "j"
    record = answer_record(parse_line('{"prompt": "a"}', 1, {}), 200, b'{"id":"x"}')
    with Journal(path) as journal:
        journal.begin(HEADER)
        journal.add(1, record)
        journal.add(2, record)
    path.write_bytes(path.read_bytes()[:-5])
    with Journal(path) as journal:
        assert journal.header == HEADER
        assert 1 in journal
        assert 2 not in journal
        journal.add(2, encode_json(json.loads(record) | {"id": "again"}))
        assert journal.write_to(tmp_path / "o", [2, 1]) == 0
        journal.finish()
    assert [entry["id"] for entry in read_records(tmp_path / "o")] == ["again", json.loads(record)["id"]]
    assert not path.exists()


def test_a_torn_header_is_no_journal_and_a_text_without_a_line_is_no_torn_header(tmp_path):
    path = tmp_path / "j"
    with Journal(path) as journal:
        journal.begin(HEADER)
        journal.add(1, b"{}")
    header = path.read_bytes().splitlines(keepends=True)[0]
    for size in range(len(header) + 1):
        path.write_bytes(header[:size])
        with Journal(path) as journal:
            assert journal.is_empty
        assert not path.exists()
    path.write_bytes(b"notes")
    with pytest.raises(ValueError, match="is in the way"):
        Journal(path)
    assert path.read_bytes() == b"notes"


def test_forgotten_records_are_lost_when_the_first_new_one_is_added_and_not_before(tmp_path):
    with Journal(tmp_path / "j") as journal:
        journal.begin(HEADER)
        journal.add(1, b"{}")
        journal.add(2, b"{}")
    with Journal(tmp_path / "j") as journal:
        journal.begin(replace(HEADER, input="bb"))
        assert 1 not in journal
    with Journal(tmp_path / "j") as journal:
        assert journal.header == HEADER
        assert 1 in journal
        journal.begin(replace(HEADER, input="bb"))
        journal.add(3, b"{}")
    with Journal(tmp_path / "j") as journal:
        assert journal.header.input == "bb"
        assert 1 not in journal
        assert 3 in journal


@pytest.mark.parametrize("is_there_again", [False, True])
def test_a_journal_that_its_run_removes_before_it_is_locked_is_opened_anew(is_there_again, tmp_path, monkeypatch):
    """Two processes: the second has opened the file when the first completes and removes it."""
    lock = fcntl.flock
    num_calls = 0

    def flock(file, how):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            (tmp_path / "j").unlink()
            if is_there_again:
                (tmp_path / "j").touch()
        lock(file, how)

    monkeypatch.setattr(journal_module.fcntl, "flock", flock)
    with Journal(tmp_path / "j") as journal:
        assert num_calls == 2
        journal.begin(HEADER)
        journal.add(1, b"{}")
        with pytest.raises(BlockingIOError):  # it is the file at the path that is locked
            Journal(tmp_path / "j")
    assert len(read_records(tmp_path / "j")) == 2


class Run:
    """scripts.generate in processes of their own, over the fake runner."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.output, self.partial = folder / "out.jsonl", folder / "out.jsonl.partial"
        source = folder / "in.jsonl"
        lines = [{"prompt": f"prompt {i}", "max_tokens": 5, "temperature": 0} for i in range(40)]
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self._flags = ["--model", str(model), "--input", str(source), "--output", str(self.output)]

    def begin(self, count: int, name: str, *flags: str) -> subprocess.Popen[str]:
        """A process that sends itself the signal `name` when it has written `count` records."""
        command = [sys.executable, "-m", "tests.scripts.generating", str(count), name, *self._flags, *flags]
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def until_its_end(self, count: int, name: str, *flags: str) -> tuple[int, str]:
        process = self.begin(count, name, *flags)
        _, errors = process.communicate(timeout=120)
        return process.returncode, errors


@pytest.fixture
def run(tmp_path, model_folder):
    return Run(tmp_path, model_folder)


NEVER = 0


def test_a_second_run_is_refused_and_takes_nothing_from_the_first(run):
    run.output.write_text("old\n")
    first = run.begin(7, "SIGSTOP", "--overwrite")
    try:
        os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WNOWAIT)
        before = run.partial.read_bytes()
        assert 8 <= len(before.splitlines()) < 41  # a thread may run on for an instant
        for flags in ([], ["--overwrite"]):
            code, errors = run.until_its_end(NEVER, "SIGKILL", *flags)
            assert code == 2
            assert f"another run is writing {run.partial}" in errors
        assert run.partial.read_bytes() == before
        assert run.output.read_text() == "old\n"
        first.send_signal(signal.SIGCONT)
        _, errors = first.communicate(timeout=120)
        assert first.returncode == 0, errors
    finally:
        first.kill()
        first.communicate()
    assert len(read_records(run.output)) == 40
    assert not run.partial.exists()
