"""A store on a socket, and the clients that reach it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from model.inputs.remote import filesystem
from tests.model.page_files.pages import opened  # noqa: F401
from tests.places.fake_gcs import FakeGcs, fake_gcs


@pytest.fixture(scope="session")
def served_store() -> Iterator[FakeGcs]:
    """One address for all tests: a client keeps the one that it has seen first."""
    pytest.importorskip("gcsfs", reason="gcsfs is not installed: scripts/test --all installs it")
    with fake_gcs() as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment().items():
            patch.setenv(name, value)
        filesystem.cache_clear()
        yield store
    filesystem.cache_clear()


@pytest.fixture
def store(served_store) -> FakeGcs:
    """The store with one bucket, `models`, that is empty."""
    served_store.reset("models")
    return served_store
