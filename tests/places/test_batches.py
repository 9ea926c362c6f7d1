"""Batch runs whose output is in a store: whole or not there, and continued on another machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from model.inputs.paths import place
from model.inputs.remote import RemotePath
from scripts.offline import output as outputs
from scripts.offline.batch_input import BatchInput
from scripts.offline.journal import Journal
from scripts.offline.output import Output

RECORD = {"response": {"status_code": 200}}
KEYS = [(1, "aa"), (2, "bb")]


@pytest.fixture
def url() -> RemotePath:
    fsspec.filesystem("memory").store.clear()
    found = place("memory://bucket/batches/out.jsonl", "--output")
    assert isinstance(found, RemotePath)
    (found.parent / "other").write_bytes(b"1")
    return found


def run(url: RemotePath, work: Path, add: Callable[[Journal], None]) -> None:
    """A run on a machine whose cache folder is `work`: it adds records, and ends when all are there."""
    output = Output(url, work)
    output.fetch_journal()
    with Journal(output.partial) as journal, output.kept(journal):
        add(journal)
        if all(key in journal for key in KEYS):
            journal.write_ordered(iter(KEYS), output.ordered, output.publish)


def test_another_machine_goes_on_where_the_first_was_interrupted(url, tmp_path):
    def interrupted(journal: Journal) -> None:
        journal.add(2, "bb", RECORD)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(url, tmp_path / "first", interrupted)
    assert not url.exists()
    assert url.with_name("out.jsonl.partial").is_file()

    def rest(journal: Journal) -> None:
        assert (2, "bb") in journal
        journal.add(1, "aa", RECORD | {"n": 1})

    run(url, tmp_path / "second", rest)
    assert [json.loads(line).get("n") for line in url.read_text().splitlines()] == [1, None]
    assert sorted(entry.name for entry in url.parent.iterdir()) == ["other", "out.jsonl"]
    assert [path for path in (tmp_path / "second").rglob("*") if path.is_file()] == []


def test_copies_of_the_journal_go_to_the_bucket_while_it_grows(url, tmp_path, monkeypatch):
    monkeypatch.setattr(outputs, "SECONDS_BETWEEN_COPIES", 0.01)
    copy = url.with_name("out.jsonl.partial")

    def add(journal: Journal) -> None:
        for number, key in ((1, "aa"), (2, "bb")):
            journal.add(number, key, RECORD)
            while not (copy.exists() and copy.read_bytes().count(b"\n") == number):
                pass

    run(url, tmp_path, add)
    assert url.is_file() and not copy.exists()


def test_a_bucket_that_fails_costs_no_record(url, tmp_path, monkeypatch, capsys):
    def fail(self: RemotePath, local: Path, **options: bool) -> None:
        raise ValueError(f"{self}: no permission")

    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "copy_from", fail)
        with pytest.raises(ValueError, match="no permission"):
            run(url, tmp_path, lambda journal: [journal.add(*key, RECORD) for key in KEYS])
    assert "the finished records are on this machine only" in capsys.readouterr().err
    run(url, tmp_path, lambda journal: None)
    assert url.read_text().count("\n") == 2


def test_of_two_machines_the_one_that_began_last_goes_on(url, tmp_path, monkeypatch):
    """The first one ends with its next record after it has seen the other's copy, and leaves that alone."""
    monkeypatch.setattr(outputs, "SECONDS_BETWEEN_COPIES", 0.01)
    copy = url.with_name("out.jsonl.partial")

    def first(journal: Journal) -> None:
        journal.add(1, "aa", RECORD | {"by": "first"})
        while not copy.exists():
            pass
        run(url, tmp_path / "second", second)
        while True:
            journal.add(2, "bb", RECORD | {"by": "first"})

    def second(journal: Journal) -> None:
        assert (1, "aa") in journal
        journal.add(2, "bb", RECORD | {"by": "second"})

    with pytest.raises(ValueError, match=r"another run writes memory://bucket/batches/out\.jsonl.*its records are in"):
        run(url, tmp_path / "first", first)
    assert [json.loads(line)["by"] for line in url.read_text().splitlines()] == ["first", "second"]
    assert not copy.exists()


@pytest.mark.parametrize("is_new", [True, False])
def test_an_output_that_another_machine_has_written_meanwhile_stays(url, tmp_path, is_new):
    if not is_new:
        url.write_bytes(b"old")

    def meanwhile(journal: Journal) -> None:
        for key in KEYS:
            journal.add(*key, RECORD)
        url.write_bytes(b"the other's")

    with pytest.raises(ValueError, match="another run writes"):
        run(url, tmp_path, meanwhile)
    assert url.read_bytes() == b"the other's"
    run(url, tmp_path, lambda journal: None)  # asked for again, it replaces that
    assert url.read_text().count("\n") == 2


def test_a_copy_whose_writing_failed_is_not_anothers(url, tmp_path, monkeypatch, capsys):
    """The answer to a write may be lost although it has succeeded."""
    monkeypatch.setattr(outputs, "SECONDS_BETWEEN_COPIES", 0.01)
    write, lost = RemotePath.copy_from, []

    def lose_the_first(self: RemotePath, local: Path, **options: bool) -> None:
        write(self, local, **options)
        if not lost:
            lost.append(self)
            raise ValueError("the connection ended")

    monkeypatch.setattr(RemotePath, "copy_from", lose_the_first)

    def add(journal: Journal) -> None:
        journal.add(*KEYS[0], RECORD)
        while not lost:
            pass
        journal.add(*KEYS[1], RECORD)

    run(url, tmp_path, add)
    assert "the connection ended" in capsys.readouterr().err
    assert url.read_text().count("\n") == 2


def test_an_input_is_read_whole_and_several_times(url):
    (url.parent / "in.jsonl").write_bytes(b"one\n\ntwo")
    with BatchInput(url.parent / "in.jsonl") as batch:
        for _ in range(2):
            assert list(batch.numbered_lines()) == [(1, "one"), (3, "two")]
    with pytest.raises(ValueError, match="--input memory://bucket/batches is a folder"):
        BatchInput(url.parent)
    with pytest.raises(FileNotFoundError, match="none"):
        BatchInput(url.parent / "none")


def test_an_output_that_cannot_be_written_is_refused_first(url, tmp_path):
    with pytest.raises(ValueError, match="--output memory://bucket/batches is a folder"):
        Output(url.parent, tmp_path)
    with pytest.raises(ValueError, match="there is no bucket nowhere"):
        Output(RemotePath("memory", "nowhere/out.jsonl"), tmp_path)
