from __future__ import annotations

import ctypes
from pathlib import Path

import jax
import pytest

from model.execution.device_memory import cgroup_limits, device_memory, return_freed_memory


def test_the_machine_says_how_much_memory_it_has():
    memory = device_memory(jax.devices("cpu")[0])
    assert memory.is_host
    assert 0 < memory.free <= memory.total
    assert memory.total > 1 << 29


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used"),
    [
        ("0::/pod/me", "pod/me", "memory.max", "memory.current"),
        ("4:memory:/pod/me", "memory/pod/me", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("4:cpu,memory:/elsewhere", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_a_containers_limit_is_read(tmp_path, line, folder, limit, used):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / limit).write_text("1000\n")
    (tmp_path / folder / used).write_text("400\n")
    assert cgroup_limits(f"7:pids:/\n{line}\n", tmp_path) == [(1000, 400)]


@pytest.mark.parametrize(
    ("line", "folder", "names", "prefix"),
    [
        ("0::/", "", ("memory.max", "memory.current"), ""),
        ("4:memory:/", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
    ],
)
@pytest.mark.parametrize(("inactive", "used"), [(5000, 3500), (20_000, 0)])  # not all is counted at one instant
def test_files_that_the_kernel_keeps_in_spare_memory_are_not_used(
    tmp_path, line, folder, names, prefix, inactive, used
):
    (tmp_path / folder).mkdir(exist_ok=True)
    for name, value in zip(names, (10_000, 9000), strict=True):
        (tmp_path / folder / name).write_text(f"{value}\n")
    own = "cache 1\ninactive_file 1\nactive_file 1\n" if prefix else "anon 3000\n"  # of version 1, without groups below
    stat = f"{own}{prefix}active_file 500\n{prefix}inactive_file {inactive}\n{prefix}unevictable 7\n"
    (tmp_path / folder / "memory.stat").write_text(stat)
    assert cgroup_limits(f"{line}\n", tmp_path) == [(10_000, used)]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_freed_memory_is_returned_to_the_machine():
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    pieces = [ctypes.c_void_p(libc.malloc(1 << 16)) for _ in range(2000)]
    for piece in pieces:
        libc.memset(piece, 1, 1 << 16)
    used = _resident_bytes()
    for piece in pieces[:-1]:  # the last one is above all others, so glibc keeps them
        libc.free(piece)
    assert _resident_bytes() > used - (1 << 25)
    return_freed_memory()
    assert _resident_bytes() < used - (100 << 20)
    libc.free(pieces[-1])


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_limit_holds_for_all_groups_below(tmp_path):
    for folder, limit in (("", "max"), ("pods", "3000"), ("pods/a", "2000"), ("pods/a/me", "max")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
        (tmp_path / folder / "memory.current").write_text("400\n")
    assert sorted(cgroup_limits("0::/pods/a/me\n", tmp_path)) == [(2000, 400), (3000, 400)]


def test_a_container_without_a_limit_has_none(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert cgroup_limits("0::/\n", tmp_path) == []
