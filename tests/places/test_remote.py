"""Files of object stores: gcsfs over a socket, any other store through a file system in memory."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.inputs import remote
from model.inputs.fetched import TOOL_USE_FILE, fetched_folder, fetched_parts
from model.inputs.paths import place, write_whole
from model.inputs.remote import RemotePath, filesystem
from tests.examples import examples


@pytest.fixture
def memory() -> RemotePath:
    """A folder of a store in memory."""
    fsspec.filesystem("memory").store.clear()
    folder = place("memory://bucket/folder", "--model")
    assert isinstance(folder, RemotePath)
    return folder


@pytest.fixture
def folder(store) -> RemotePath:
    found = place("gs://models/folder", "--model")
    assert isinstance(found, RemotePath)
    return found


both = pytest.mark.parametrize("kind", ["memory", pytest.param("folder", marks=pytest.mark.clients)])


@both
def test_files_and_folders_are_what_pathlib_says_of_them(kind, request, tmp_path):
    remote_folder = request.getfixturevalue(kind)
    for there in (tmp_path, remote_folder):
        (there / "sub").mkdir(exist_ok=True)
        (there / "b.json").write_text("{é}")
        (there / "a.bin").write_bytes(b"")
        (there / "sub" / "c.json").write_bytes(b"3")
        assert there.is_dir() and there.exists() and not there.is_file()
        assert (there / "b.json").is_file() and not (there / "b.json").is_dir()
        assert not (there / "none").exists() and not (there / "none").is_dir() and not (there / "none").is_file()
        assert sorted(entry.name for entry in there.iterdir()) == ["a.bin", "b.json", "sub"]
        assert [entry.name for entry in there.glob("*.json")] == ["b.json"]
        assert (there / "b.json").read_text(encoding="utf-8") == "{é}" and (there / "b.json").stat().st_size == 4
        assert (there / "a.bin").read_bytes() == b""
        assert (there / "sub" / "c.json").parent == there / "sub" and (there / "x.GGUF").suffix == ".GGUF"
        assert (there / "b.json").with_name("z").name == "z"
        (there / "a.bin").unlink()
        (there / "a.bin").unlink(missing_ok=True)
        with pytest.raises(FileNotFoundError):
            (there / "a.bin").unlink()
        with pytest.raises(FileNotFoundError, match="none"):
            (there / "none").read_bytes()
    assert list((remote_folder / "none").glob("*")) == []


@both
def test_files_are_those_of_all_folders_below(kind, request):
    folder = request.getfixturevalue(kind)
    assert list(folder.files()) == []
    for name, size in (("b", 2), ("sub/a", 1), ("sub/deeper/c", 3)):
        (folder / name).write_bytes(bytes(size))
    (folder.parent / "other").write_bytes(b"1")
    assert sorted(map(str, folder.files())) == [f"{folder}/{name}" for name in ("b", "sub/a", "sub/deeper/c")]


@both
def test_content_goes_there_and_back_in_pieces(kind, request, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "PIECE_BYTES", 1000)
    file = request.getfixturevalue(kind) / "file"
    content = os.urandom(4321)
    (tmp_path / "there").write_bytes(content)
    file.copy_from(tmp_path / "there")
    file.copy_to(tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == file.read_bytes() == content
    assert {path.name for path in tmp_path.iterdir()} == {"there", "back"}
    write_whole(file, b"new")
    assert file.read_bytes() == b"new"


@both
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # of aiohttp, at gcsfs
@pytest.mark.parametrize("size", [10, 6 << 20], ids=["at once", "in parts"])
def test_a_new_file_replaces_none(kind, size, request, tmp_path):
    file = request.getfixturevalue(kind) / "file"
    (tmp_path / "own").write_bytes(os.urandom(size - 2) + b"\r\r")
    file.copy_from(tmp_path / "own", is_new=True)
    before = file.version()
    with pytest.raises(FileExistsError, match="there already"):
        file.copy_from(tmp_path / "own", is_new=True)
    assert file.version() == before


@settings(max_examples=examples(50))
@given(
    content=st.binary(max_size=300),
    piece=st.integers(1, 400),
    ends=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=5),
)
def test_ranges_are_the_bytes_asked_for(content, piece, ends):
    file = RemotePath("memory", "bucket/ranges")
    file.write_bytes(content)
    ranges = [(min(pair) % (len(content) + 1), min(max(pair), len(content))) for pair in ends]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "PIECE_BYTES", piece)
        for start, end in ranges:
            assert file.read_range(start, end) == content[start:end]


@both
def test_a_range_that_is_not_there_is_an_error(kind, request):
    file = request.getfixturevalue(kind) / "file"
    file.write_bytes(b"0123456789")
    with pytest.raises(ValueError, match=r"file: 2 bytes came of the 5 from 8 on"):
        file.read_range(8, 13)


@pytest.mark.clients
@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (403, "sa@p does not have storage.objects.get access", "no permission: .*sa@p does not have"),
        (
            401,
            "Anonymous caller does not have access",
            "no credentials for it: .*gcloud auth application-default",
        ),
    ],
)
@pytest.mark.parametrize("act", ["read_bytes", "exists", "iterdir", "write", "unlink", "check_bucket"])
def test_what_google_refuses_is_said_with_the_url(store, folder, code, said, words, act):
    (folder / "file").write_bytes(b"1")
    store.refuse = lambda method, bucket, name: (code, said)
    with pytest.raises(ValueError, match=rf"(?s)gs://models/folder.*: {words}"):
        (folder / "file").write_bytes(b"2") if act == "write" else getattr(folder / "file", act)()


@pytest.mark.clients
def test_a_missing_bucket_is_not_a_missing_file(store):
    file = RemotePath("gs", "nowhere/file")
    for act in (file.read_bytes, file.exists, file.check_bucket, lambda: file.write_bytes(b"1")):
        with pytest.raises(ValueError, match="gs://nowhere/file: there is no bucket nowhere"):
            act()
    assert not RemotePath("gs", "models/file").exists()


@pytest.mark.clients
def test_who_may_not_list_the_bucket_may_read_in_it(store, folder):
    (folder / "file").write_bytes(b"1")

    def refuse(method: str, bucket: str, name: str) -> tuple[int, str] | None:
        return (403, "no storage.objects.list") if method == "GET" and not name else None

    store.refuse = refuse
    assert (folder / "file").read_bytes() == b"1"


@pytest.mark.clients
def test_an_answer_that_is_cut_off_is_an_error(store, folder):
    (folder / "file").write_bytes(b"0123456789")
    store.cut = lambda name: 3
    with pytest.raises(ValueError, match="gs://models/folder/file: 7 bytes came of the 10 from 0 on"):
        (folder / "file").read_bytes()


@pytest.mark.clients
def test_a_store_that_is_not_there_is_said_to_be_unreachable(store, folder, monkeypatch):
    import gcsfs.retry

    monkeypatch.setattr(gcsfs.core.asyncio, "sleep", _at_once(gcsfs.core.asyncio.sleep))  # it waits between its tries
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="gs://models/folder/file: the store cannot be reached"):
        (folder / "file").read_bytes()


def _at_once(sleep):
    return lambda delay, *rest: sleep(0, *rest)


@pytest.mark.clients
def test_a_copy_of_a_file_that_changes_meanwhile_is_refused(store, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "PIECE_BYTES", 4)
    (folder / "file").write_bytes(b"0123456789")
    asked: list[str] = []

    def cut(name: str) -> int:
        asked.append(name)
        if len(asked) == 1:
            store.put("models", "folder/file", b"9876543210")
        return 0

    store.cut = cut
    with pytest.raises(ValueError, match="gs://models/folder/file changed while it was copied"):
        (folder / "file").copy_to(tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


@both
def test_copies_are_made_once_for_each_version(kind, request, tmp_path):
    remote_folder = request.getfixturevalue(kind)
    for name in (
        "config.json",
        "chat_template.jinja",
        "tokenizer.model",
        "model.safetensors",
        "sub/other.json",
        TOOL_USE_FILE,
    ):
        (remote_folder / name).write_bytes(name.encode())
    first = fetched_folder(remote_folder, tmp_path)
    copied = sorted(str(path.relative_to(first)) for path in first.rglob("*") if path.is_file())
    assert copied == [TOOL_USE_FILE, "chat_template.jinja", "config.json", "tokenizer.model"]
    assert (first / TOOL_USE_FILE).read_text() == TOOL_USE_FILE
    assert fetched_folder(remote_folder, tmp_path) == first
    (remote_folder / "config.json").write_bytes(b"other")
    second = fetched_folder(remote_folder, tmp_path)
    assert second != first and (second / "config.json").read_bytes() == b"other"
    assert (first / "config.json").read_bytes() == b"config.json", "a running start may still read it"
    os.utime(first, (0, 0))
    (remote_folder / "config.json").write_bytes(b"third")
    fetched_folder(remote_folder, tmp_path)
    assert not first.exists() and second.exists()
    assert fetched_parts([remote_folder / "sub" / "other.json"], tmp_path).read_bytes() == b"sub/other.json"


def test_a_file_that_is_too_long_is_not_fetched(memory, tmp_path):
    (memory / "config.json").write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"config\.json has 4 bytes; at most 3 are read"):
        fetched_folder(memory, tmp_path, max_bytes=3)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gs:/bucket/folder", "a URL is written as gs://bucket/folder"),
        ("gs://bucket/../other", "a URL is written as gs://bucket/folder"),
        ("gs:///folder", "a URL is written as gs://bucket/folder"),
        ("gs://bucket/a#1", "the name of an object has no # here"),
        ("simplecache://gs::memory://b/f", "a URL is written as"),
        ("file:///folder", "a file of this machine is named by its path alone"),
        ("https://host/folder", "folders cannot be listed over HTTP"),
        ("nope://bucket/folder", "no package of fsspec is for nope://"),
    ],
)
def test_a_url_that_names_no_place_is_refused_in_words(url, words):
    with pytest.raises(ValueError, match=f"--model '{url}': {words}"):
        place(url, "--model")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    filesystem.cache_clear()
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "gs", raising=False)
    words = r"gs:// needs a package that is not installed: run `\.venv/bin/python -m pip install .* gcsfs`"
    with pytest.raises(ValueError, match=words):
        place("gs://bucket/folder", "--model")
    filesystem.cache_clear()


def test_a_path_is_a_path():
    assert place("~/x", "--model") == Path.home() / "x"
    assert place("c:/models", "--model") == Path("c:/models")
    assert str(place("MEMORY://Bucket/x/", "--model")) == "memory://Bucket/x"
