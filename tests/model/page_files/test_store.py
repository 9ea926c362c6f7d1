"""Files of pages: what is loaded is what was stored, or nothing."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import threading
from dataclasses import replace

import numpy as np
import pytest

from model.page_files.local_pages import LocalPages
from model.page_files.page_index import KeptPage
from model.page_files.store import PAUSE_S, PageFiles
from tests.model.page_files import pages

OTHER = replace(pages.IDENTITY, weights="x")


def test_a_page_comes_back_in_a_later_start(tmp_path, opened):
    first = opened(tmp_path / "new" / "folder")
    assert not pages.has(first, 1) and pages.get(first, 1) is None
    assert pages.put(first, 1) and pages.put(first, 1) and pages.put(first, 2)
    assert pages.has(first, 1) and pages.is_right(first, 1)
    assert (first.num_stored, first.num_loaded, first.num_broken, first.num_failed) == (2, 1, 0, 0)
    second = opened(tmp_path / "new" / "folder")
    assert pages.has(second, 1) and pages.is_right(second, 1) and pages.is_right(second, 2)
    assert second.bytes_on_disk == 2 * pages.FILE_BYTES == sum(path.stat().st_size for path in pages.files_in(tmp_path))


def test_close_ends_the_thread(tmp_path, opened):
    before = set(threading.enumerate())
    store = opened(tmp_path)
    assert set(threading.enumerate()) <= before, "the first call starts it"
    assert pages.put(store, 1)
    (thread,) = set(threading.enumerate()) - before
    store.close()
    assert not thread.is_alive()


def test_a_file_is_its_head_its_checksum_and_the_page(tmp_path, opened):
    assert pages.put(opened(tmp_path), 7)
    content = pages.file_of(tmp_path, 7).read_bytes()
    assert content[:8] == b"kv-page\n" and content[8:12] == b"\2\0\0\0"
    assert content[28:44] == pages.digest_of(7) and content[56:72] == pages.tokens_of(7)
    assert content[pages.HEAD_BYTES :] == pages.page_of(7).tobytes() and len(content) == pages.FILE_BYTES


def test_a_flipped_bit_is_a_miss_and_the_file_is_deleted(tmp_path, opened):
    store = opened(tmp_path)
    assert pages.put(store, 1)
    path = pages.file_of(tmp_path, 1)
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert pages.get(store, 1) is None
        assert not path.exists() and not pages.has(store, 1)
    assert store.num_broken == 8 * pages.FILE_BYTES and store.num_failed == 0 and store.bytes_on_disk == 0
    assert pages.put(store, 1) and pages.is_right(store, 1)


def test_a_pipe_in_place_of_a_file_is_a_miss_at_once(tmp_path, opened):
    store = opened(tmp_path)
    assert pages.put(store, 1)
    path, found = pages.file_of(tmp_path, 1), []
    path.unlink()
    os.mkfifo(path)
    reading = threading.Thread(target=lambda: found.append(pages.get(store, 1)), daemon=True)
    reading.start()
    reading.join(60)
    assert found == [None] and not path.exists() and store.num_broken == 1
    assert pages.put(store, 1) and pages.is_right(store, 1)


def test_a_page_of_other_tokens_is_a_miss_and_stays(tmp_path, opened):
    store = opened(tmp_path)
    assert pages.put(store, 1)
    assert not store.load(pages.digest_of(1), pages.tokens_of(2), np.zeros(pages.PAGE_BYTES, np.uint8))
    assert pages.is_right(store, 1) and store.num_broken == 0


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "x"}, {"draft_weights": "x"}, {"computation": "x"}, {"contents": "x"}, {"layout": "x"},
        {"page_size": 8}, {"page_bytes": 49},
    ],
    ids=str,
)  # fmt: skip
def test_pages_of_another_identity_are_never_found(tmp_path, change, opened):
    store, identity = opened(tmp_path), replace(pages.IDENTITY, **change)
    assert pages.put(store, 1)
    other = PageFiles(tmp_path, identity, max_bytes=1000 * pages.FILE_BYTES)
    other.refresh()
    tokens = np.arange(identity.page_size, dtype=np.int32).tobytes()
    assert not pages.has(other, 1)
    assert not other.load(pages.digest_of(1), tokens, np.zeros(identity.page_bytes, np.uint8))
    assert other.bytes_on_disk == pages.FILE_BYTES and pages.is_right(store, 1)
    other.close()


def test_the_order_of_use_outlives_a_start_and_the_bound_is_of_all_identities(tmp_path, opened):
    store, other = opened(tmp_path), opened(tmp_path, identity=OTHER)
    assert pages.put(store, 1) and pages.put(other, 2) and pages.put(store, 3) and pages.put(other, 4)
    for number, used_s in ((1, 300), (2, 100), (3, 200), (4, 400)):
        pages.used_at(pages.file_of(tmp_path, number), used_s)
    later = opened(tmp_path, max_pages=3)
    assert pages.get(other, 2) is None, "a listing deletes what exceeds the bound"
    assert pages.put(later, 5)
    assert [pages.has(later, number) for number in (1, 3, 5)] == [True, False, True] and pages.is_right(other, 4)
    other.refresh()
    assert not pages.has(other, 2) and pages.has(other, 4)


def test_a_load_is_a_use_for_others(tmp_path, opened):
    store = opened(tmp_path)
    for number in (1, 2):
        assert pages.put(store, number)
        pages.used_at(pages.file_of(tmp_path, number), number)
    assert pages.is_right(store, 1)
    later = opened(tmp_path, max_pages=1)
    assert [pages.has(later, 1), pages.has(later, 2)] == [True, False]


def test_pages_of_another_engine_are_known_after_a_listing(tmp_path, opened):
    store, other = opened(tmp_path), opened(tmp_path)
    assert pages.put(other, 1)
    assert not pages.has(store, 1) and pages.is_right(store, 1), "a file is found also if it is not known"
    store.refresh()
    assert pages.has(store, 1)
    pages.file_of(tmp_path, 1).unlink()
    assert pages.has(store, 1) and pages.get(store, 1) is None and not pages.has(store, 1)
    assert pages.put(store, 1) and pages.is_right(other, 1)
    pages.file_of(tmp_path, 1).unlink()
    assert pages.put(other, 1), "it is written again"
    assert pages.is_right(store, 1) and store.num_failed == other.num_failed == 0


def test_what_killed_processes_left_is_deleted_when_it_is_old(tmp_path, opened):
    store = opened(tmp_path)
    assert pages.put(store, 1)
    path = pages.file_of(tmp_path, 1)
    old, young, foreign = (path.with_name(f"{path.name}.{end}") for end in ("0" * 16, "1" * 16, "txt"))
    own = tmp_path / "notes"
    empty = path.parents[1] / "ff"
    empty.mkdir()
    lost = tmp_path / ("f" * 32)
    (lost / "ab").mkdir(parents=True)
    for left in (old, young, foreign, own):
        left.write_bytes(b"1")
        pages.used_at(left, 0)
    for folder in (empty, lost / "ab", lost):
        pages.used_at(folder, 0)
    os.utime(young)
    store.refresh()
    assert not old.exists() and young.exists() and foreign.exists() and own.exists()
    assert not empty.exists() and not (lost / "ab").exists() and path.parent.exists()
    assert store.bytes_on_disk == pages.FILE_BYTES and pages.is_right(store, 1)
    pages.used_at(lost, 0)
    store.refresh()
    assert not lost.exists()


def test_a_folder_that_another_engine_deleted_is_made_again(tmp_path, opened):
    store = opened(tmp_path)
    assert pages.put(store, 1)
    shutil.rmtree(pages.file_of(tmp_path, 1).parents[1])
    assert pages.put(store, 1) and pages.is_right(store, 1)


def test_nothing_waits_for_a_slow_listing(tmp_path, monkeypatch, opened):
    assert pages.put(opened(tmp_path), 1)
    listing, go_on = threading.Event(), threading.Event()
    list_at_once = LocalPages.listed

    def listed(self):
        listing.set()
        assert go_on.wait(60)
        yield from list_at_once(self)

    monkeypatch.setattr(LocalPages, "listed", listed)
    store = PageFiles(tmp_path, pages.IDENTITY, max_bytes=2 * pages.FILE_BYTES)
    assert not listing.is_set(), "the first call starts it"
    assert not pages.has(store, 1)
    assert listing.wait(60)
    assert not pages.has(store, 1) and pages.is_right(store, 1) and not pages.put(store, 2)
    assert store.num_failed == 1
    go_on.set()
    store.refresh()  # begins when the first one has ended
    assert pages.has(store, 1) and pages.put(store, 2)
    store.close()


def test_close_ends_a_listing(tmp_path, monkeypatch):
    listing: list[threading.Thread] = []
    is_listing = threading.Event()

    def listed(self):
        listing.append(threading.current_thread())
        while True:
            is_listing.set()
            yield KeptPage("x", 1, 0.0)

    monkeypatch.setattr(LocalPages, "listed", listed)
    store = PageFiles(tmp_path, pages.IDENTITY, max_bytes=pages.FILE_BYTES)
    assert not pages.has(store, 1) and is_listing.wait(60)
    store.close()
    assert [thread.is_alive() for thread in listing] == [False]


def test_a_page_stored_during_a_listing_stays_known(tmp_path, monkeypatch, opened):
    store = opened(tmp_path)
    list_at_once = LocalPages.listed

    def listed(self):
        found = list(list_at_once(self))
        assert pages.put(store, 2)
        return iter(found)

    assert pages.put(store, 1)
    monkeypatch.setattr(LocalPages, "listed", listed)
    store.refresh()
    assert pages.has(store, 1) and pages.has(store, 2) and store.bytes_on_disk == 2 * pages.FILE_BYTES


def test_pages_stored_at_once_do_not_exceed_the_bound(tmp_path, monkeypatch, opened):
    """All writes wait for each other, so all are under way at once."""
    store, write = opened(tmp_path, max_pages=3), LocalPages.write
    all_here = threading.Barrier(3)

    def write_together(self, name, parts):
        all_here.wait(60)
        write(self, name, parts)
        assert len(list(tmp_path.rglob("*.page"))) <= 3

    monkeypatch.setattr(LocalPages, "write", write_together)
    for first in (0, 10, 20):
        threads = [threading.Thread(target=pages.put, args=(store, first + n)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.num_stored == first // 10 * 3 + 3
        assert all(pages.is_right(store, first + n) for n in range(3))
        assert len(pages.files_in(tmp_path)) == 3 and store.bytes_on_disk == 3 * pages.FILE_BYTES


def test_a_folder_that_others_may_enter_is_refused(tmp_path, opened):
    tmp_path.chmod(0o750)
    with pytest.raises(ValueError, match=r"--kv-offloading-path .*other users may enter it.*chmod 700"):
        opened(tmp_path)


def test_what_cannot_be_the_folder_is_refused(tmp_path, opened):
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=f"--kv-offloading-path {folder}: it cannot be made or entered"):
            opened(folder)
    with pytest.raises(ValueError, match=f"--kv-offloading-disk: {pages.FILE_BYTES - 1} bytes are less than a page"):
        PageFiles(tmp_path, pages.IDENTITY, max_bytes=pages.FILE_BYTES - 1)


def test_folders_are_made_for_this_user_alone(tmp_path, opened):
    before = os.umask(0)
    try:
        assert pages.put(opened(tmp_path / "a" / "b"), 1)
    finally:
        os.umask(before)
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(folders) == 4 and {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


def test_a_folder_that_vanished_is_not_made_again_and_its_return_is_noticed(tmp_path, caplog, opened):
    clock, folder = pages.Clock(), tmp_path / "mounted"
    store = opened(folder, clock=clock)
    assert pages.put(store, 1)
    folder.rename(tmp_path / "away")
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            assert not pages.put(store, number) and pages.get(store, number) is None
        store.refresh()
    assert not folder.exists() and store.num_failed == 6
    assert ["written" in record.message for record in caplog.records] == [True, False], "each kind once"
    (tmp_path / "away").rename(folder)
    assert pages.is_right(store, 1) and not pages.put(store, 2), "it is tried again after a pause"
    clock.now_s += PAUSE_S
    assert pages.put(store, 2) and pages.is_right(store, 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_without_permission_nothing_is_found_and_nothing_raised(tmp_path, caplog, opened):
    store = opened(tmp_path)
    assert pages.put(store, 1)
    os.seteuid(65534)
    try:
        assert pages.get(store, 1) is None and not pages.put(store, 2)
        store.refresh()
    finally:
        os.seteuid(0)
    assert (store.num_failed, store.num_broken) == (3, 0) and len(caplog.records) == 3
    store.refresh()
    assert pages.is_right(store, 1)
