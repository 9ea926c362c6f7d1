"""Batch runs whose output is in a store: whole or not there, and continued on the same machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from model.inputs.paths import place
from model.inputs.remote import RemotePath
from scripts.generate import BatchInput, begin, generate
from scripts.offline.journal import Header, Journal
from scripts.offline.output import Output
from server.http.encoding import encode_json

RECORD = {"response": {"status_code": 200}}
NUMBERS = [1, 2]


@pytest.fixture
def url() -> RemotePath:
    fsspec.filesystem("memory").store.clear()
    found = place("memory://bucket/batches/out.jsonl", "--output")
    assert isinstance(found, RemotePath)
    (found.parent / "other").write_bytes(b"1")
    return found


def add_all(journal: Journal) -> None:
    for number in NUMBERS:
        journal.add(number, encode_json(RECORD))


def run(
    url: RemotePath, work: Path, add: Callable[[Journal], None], lines: str = "aa", *, overwrite: bool = False
) -> None:
    """A run on a machine whose cache folder is `work`: it adds records, and ends when all are there.

    Args:
        lines: stands for the input's digest.
    """
    output = Output(url, work)

    def load() -> object:
        raise AssertionError("no line is left to be answered")

    with Journal(output.partial) as journal:
        header = Header(input=lines, settings={}, replaces=output.version())
        keys = [(number, lines) for number in NUMBERS]
        if begin(journal, output, header, keys, overwrite=overwrite):
            add(journal)
            if all(number in journal for number in NUMBERS):
                generate(None, keys, output, journal, {}, load)


def test_the_same_machine_goes_on_where_a_run_was_interrupted(url, tmp_path):
    def interrupted(journal: Journal) -> None:
        journal.add(2, encode_json(RECORD))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(url, tmp_path, interrupted)
    assert not url.exists()
    with pytest.raises(ValueError, match=r"out\.jsonl\.partial holds 1 finished records.*over another input"):
        run(url, tmp_path, lambda journal: None, "bb")

    def rest(journal: Journal) -> None:
        assert 2 in journal
        journal.add(1, encode_json(RECORD | {"n": 1}))

    run(url, tmp_path, rest)
    assert [json.loads(line).get("n") for line in url.read_text().splitlines()] == [1, None]
    assert sorted(entry.name for entry in url.parent.iterdir()) == ["other", "out.jsonl"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_bucket_that_fails_costs_no_record(url, tmp_path, monkeypatch):
    def fail(self: RemotePath, local: Path, **options: bool) -> None:
        raise ValueError(f"{self}: no permission")

    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "copy_from", fail)
        with pytest.raises(ValueError, match="no permission"):
            run(url, tmp_path, add_all)
    run(url, tmp_path, lambda journal: None)
    assert url.read_text().count("\n") == 2


@pytest.mark.parametrize("is_new", [True, False])
def test_an_output_that_another_machine_has_written_meanwhile_stays(url, tmp_path, is_new):
    if not is_new:
        url.write_bytes(b"old")

    def meanwhile(journal: Journal) -> None:
        for number in NUMBERS:
            journal.add(number, encode_json(RECORD))
        url.write_bytes(b"the other's")

    with pytest.raises(ValueError, match="another run has written"):
        run(url, tmp_path, meanwhile, overwrite=not is_new)
    for _ in range(2):
        assert url.read_bytes() == b"the other's"
        with pytest.raises(ValueError, match=r"Move memory://bucket/batches/out\.jsonl away"):
            run(url, tmp_path, lambda journal: None)
    url.unlink()
    run(url, tmp_path, lambda journal: None)
    assert url.read_text().count("\n") == 2


def test_a_run_that_ended_between_its_output_and_the_removal_of_its_journal_is_complete(url, tmp_path, monkeypatch):
    def end(self: Journal) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "finish", end)
        with pytest.raises(KeyboardInterrupt):
            run(url, tmp_path, add_all)
    before = url.read_bytes()
    run(url, tmp_path, lambda journal: None)
    assert url.read_bytes() == before
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


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
