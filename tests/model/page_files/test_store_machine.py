"""Calls, starts, kills and damages in any order: a store gives the bytes that its weights have computed, or none."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from model.page_files.store import PageFiles
from tests.examples import examples
from tests.model.page_files.pages import FILE_BYTES, IDENTITY, get, has, open_store, page_of, put

NUMBERS = st.integers(0, 6)  # of pages
FILES = st.integers(0, 99)
ENGINES = st.integers(0, 2)
MAX_PAGES = 4
IDENTITIES = (IDENTITY, IDENTITY, replace(IDENTITY, weights="x"))  # two engines share pages, the third has its own


class Machine(RuleBasedStateMachine):
    """Three engines on one folder."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.stores = [self.start(engine) for engine in range(len(IDENTITIES))]
        self.weights = [0, 0, 1]  # of each engine now: they decide the bytes of its pages
        self.next_weights = 2
        self.unknown = 0  # files that an engine has stored since another one has listed the folder

    def start(self, engine: int) -> PageFiles:
        return open_store(self.folder, identity=IDENTITIES[engine], max_pages=MAX_PAGES)

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        shutil.rmtree(self.folder)

    def files(self) -> list[Path]:
        return sorted(self.folder.rglob("*.page"))

    def file(self, number: int) -> list[Path]:
        """One of the files; none if there are none. What is drawn must not depend on them: some names are random."""
        found = self.files()
        return [found[number % len(found)]] if found else []

    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files())

    @rule(engine=ENGINES, number=NUMBERS)
    def store(self, engine, number):
        before = self.stores[engine].num_stored
        assert put(self.stores[engine], number, self.weights[engine])
        assert has(self.stores[engine], number)
        self.unknown += self.stores[engine].num_stored - before

    @rule(engine=ENGINES, number=NUMBERS)
    def load(self, engine, number):
        found = get(self.stores[engine], number)
        assert found is None or found.tobytes() == page_of(number, self.weights[engine]).tobytes()
        if found is None:
            assert not has(self.stores[engine], number)

    @rule(engine=ENGINES, number=NUMBERS)
    def stored_pages_are_loaded(self, engine, number):
        assert put(self.stores[engine], number, self.weights[engine])
        before = self.stores[engine].num_broken
        assert get(self.stores[engine], number) is not None or self.stores[engine].num_broken == before + 1
        self.unknown += 1

    @rule(engine=ENGINES)
    def list_folder(self, engine):
        self.stores[engine].refresh()
        assert self.stores[engine].bytes_on_disk <= MAX_PAGES * FILE_BYTES

    @rule()
    def list_in_all_engines(self):
        for _ in range(2):  # what the last one deletes, the first does not know
            for store in self.stores:
                store.refresh()
        self.unknown = 0
        assert {store.bytes_on_disk for store in self.stores} == {self.num_bytes()}

    @rule(engine=ENGINES)
    def restart(self, engine):
        self.stores[engine].close()
        self.stores[engine] = self.start(engine)
        self.weights[engine] = 0 if engine < 2 else 1

    @rule(engine=ENGINES)
    def clear(self, engine):
        self.stores[engine].clear()
        self.weights[engine], self.next_weights = self.next_weights, self.next_weights + 1
        assert not any(has(self.stores[engine], number) for number in range(7))

    @rule(file=FILES, bit=st.integers(0, 8 * FILE_BYTES - 1))
    def flip_a_bit(self, file, bit):
        for path in self.file(file):
            content = bytearray(path.read_bytes())
            if bit // 8 < len(content):
                content[bit // 8] ^= 1 << bit % 8
                path.write_bytes(content)

    @rule(file=FILES, size=st.integers(0, FILE_BYTES - 1))
    def lose_the_end(self, file, size):
        """As when the power fails."""
        for path in self.file(file):
            os.truncate(path, min(size, path.stat().st_size))

    @rule(file=FILES, other=FILES)
    def swap(self, file, other):
        for one, two in zip(self.file(file), self.file(other), strict=True):
            content = one.read_bytes(), two.read_bytes()
            two.write_bytes(content[0])
            one.write_bytes(content[1])

    @rule(file=FILES)
    def delete(self, file):
        for path in self.file(file):
            path.unlink()

    @rule(file=FILES, size=st.integers(0, FILE_BYTES), is_old=st.booleans())
    def die_while_writing(self, file, size, is_old):
        for path in self.file(file):
            left = path.with_name(f"{path.name}.{'0' * 16}")
            left.write_bytes(path.read_bytes()[:size])
            if is_old:
                os.utime(left, (0, 0))
                self.stores[0].refresh()
                assert not left.exists()

    @invariant()
    def folder_is_bounded(self):
        """Each engine keeps the bound with what it knows."""
        assert self.num_bytes() <= (MAX_PAGES + self.unknown) * FILE_BYTES
        assert all(store.bytes_on_disk <= MAX_PAGES * FILE_BYTES for store in self.stores)
        assert all(store.num_failed == 0 for store in self.stores)


Machine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40)
test_machine = Machine.TestCase
