"""Pages in a bucket, which several machines share."""

from __future__ import annotations

import logging
from dataclasses import replace

import fsspec
import numpy as np
import pytest

from model.inputs.paths import place
from model.inputs.remote import PIECE_BYTES, RemotePath
from model.page_files.store import PAUSE_S, PageFiles
from tests.model.page_files import pages
from tests.model.page_files.pages import FILE_BYTES, IDENTITY, Clock, get, has, is_right, put

NUMBERS = range(1, 5)


@pytest.fixture
def memory() -> RemotePath:
    """A folder of a store in memory."""
    fsspec.filesystem("memory").store.clear()
    found = place("memory://bucket/pages", "--kv-offloading-path")
    assert isinstance(found, RemotePath)
    (found.parent / "other").write_bytes(b"1")
    return found


@pytest.fixture
def folder(store) -> RemotePath:
    found = place("gs://models/pages", "--kv-offloading-path")
    assert isinstance(found, RemotePath)
    return found


both = pytest.mark.parametrize("kind", ["memory", pytest.param("folder", marks=pytest.mark.clients)])


def page_in(folder: RemotePath, number: int, identity: pages.PageIdentity = IDENTITY) -> RemotePath:
    digest = pages.digest_of(number).hex()
    return folder / f"{identity.digest().hex()}/{digest[:2]}/{digest}.page"


@both
def test_machines_share_pages(kind, request, opened):
    place = request.getfixturevalue(kind)
    first, second = opened(place), opened(place)
    assert get(first, 1) is None and put(first, 1) and is_right(first, 1)
    assert not has(second, 1) and is_right(second, 1)
    second.refresh()
    assert has(second, 1) and put(second, 1)
    assert (second.num_stored, second.num_failed, second.bytes_on_disk) == (0, 0, FILE_BYTES)
    other = opened(place, identity=replace(IDENTITY, layout="2 chips"))
    assert not has(other, 1) and get(other, 1) is None and other.bytes_on_disk == FILE_BYTES
    first.clear()
    assert not has(first, 1) and get(first, 1) is None and put(first, 1, weights=1)
    assert is_right(first, 1, weights=1) and is_right(second, 1)


@pytest.mark.parametrize("kind", ["memory", "tmp_path"])
def test_a_page_may_be_larger_than_a_buffer_or_a_piece(kind, request, opened):
    place, num_bytes = request.getfixturevalue(kind), PIECE_BYTES + 12345
    identity = replace(IDENTITY, page_bytes=num_bytes)
    store = opened(place, identity=identity, max_pages=1 << 20)
    page, found = np.random.default_rng(1).integers(0, 256, num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    assert store.store(pages.digest_of(1), pages.tokens_of(1), page)
    assert store.load(pages.digest_of(1), pages.tokens_of(1), found) and np.array_equal(found, page)


@both
def test_a_damaged_object_is_a_miss_and_is_deleted(kind, request, opened):
    place = request.getfixturevalue(kind)
    store = opened(place)
    assert put(store, 1)
    content = page_in(place, 1).read_bytes()
    flipped = bytearray(content)
    flipped[60] ^= 1
    for damaged in (bytes(flipped), content[:-1], content[:10], b""):
        page_in(place, 1).write_bytes(damaged)
        assert get(store, 1) is None and not page_in(place, 1).exists()
    assert (store.num_broken, store.num_failed) == (4, 0)
    assert put(store, 1) and is_right(store, 1)


@both
def test_the_bound_is_of_all_objects_and_others_stay(kind, request, opened):
    place = request.getfixturevalue(kind)
    (place / "notes").write_bytes(b"1")
    store = opened(place, max_pages=3)
    for number in NUMBERS[:3]:
        assert put(store, number)
    assert is_right(store, 1)
    store.refresh()  # a store has no times of use, and this engine's are kept
    assert put(store, 4)
    assert [has(store, number) for number in NUMBERS] == [True, False, True, True]
    assert [page_in(place, number).exists() for number in NUMBERS] == [True, False, True, True]
    assert opened(place, max_pages=1).bytes_on_disk == FILE_BYTES
    assert [file.st_size for file in place.files()] == [FILE_BYTES, 1] and (place / "notes").exists()


@pytest.mark.clients
def test_a_store_that_refuses_is_left_alone_for_a_while(store, folder, opened, caplog):
    clock = Clock()
    engine = opened(folder, clock=clock)
    assert put(engine, 1)
    store.refuse = lambda method, bucket, name: (403, "Forbidden")
    with caplog.at_level(logging.WARNING):
        assert get(engine, 1) is None and not put(engine, 2) and not put(engine, 3)
        engine.refresh()
    assert engine.num_failed == 4
    said = [record.message for record in caplog.records if record.name == "model.page_files.store"]
    assert len(said) == 3 and all("no permission" in line and "\n" not in line for line in said)
    store.refuse = lambda method, bucket, name: None
    assert not put(engine, 2)
    clock.now_s = PAUSE_S
    assert put(engine, 2) and is_right(engine, 1)


@pytest.mark.clients
def test_an_answer_that_is_cut_is_a_failure_and_the_object_stays(store, folder, opened):
    engine = opened(folder)
    assert put(engine, 1)
    store.cut = lambda name: 5
    assert get(engine, 1) is None
    assert (engine.num_failed, engine.num_broken) == (1, 0)
    store.cut = lambda name: 0
    assert is_right(engine, 1)


@pytest.mark.clients
def test_a_bucket_that_is_not_there_is_refused(store):
    missing = place("gs://nowhere/pages", "--kv-offloading-path")
    with pytest.raises(ValueError, match=r"--kv-offloading-path gs://nowhere/pages: there is no bucket nowhere"):
        PageFiles(missing, IDENTITY, max_bytes=FILE_BYTES)
