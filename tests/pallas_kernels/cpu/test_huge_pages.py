"""Huge pages, as Linux itself lists them."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import huge_pages
from pallas_kernels.cpu.huge_pages import SIZE


def huge_bytes() -> int:
    """Of this process, by Linux's account."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("AnonHugePages:"))
    return int(kilobytes) << 10


def test_arrays_move_and_keep_their_numbers():
    arrays = [jnp.arange(n) for n in (8 * SIZE // 4, 3 * SIZE // 4 + 100, 5)]
    expected, before = [np.array(x) for x in arrays], huge_bytes() if Path("/proc/self/smaps_rollup").exists() else 0
    moved = huge_pages.use(arrays)
    if moved == 0:
        pytest.skip("this machine has no huge pages to give")
    assert moved <= 11 * SIZE  # and fewer than 9 where the machine's memory is in pieces
    assert moved <= huge_bytes() <= before + moved  # some may have been there before
    for array, wanted in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(array, wanted)


def test_a_machine_whose_owner_wants_none(tmp_path, monkeypatch):
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(huge_pages, "SETTING", setting)
    assert huge_pages.use([jnp.zeros(4 * SIZE)]) == 0
