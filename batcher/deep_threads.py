"""Threads with room for deep recursion."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

STACK_BYTES = 2**28  # of address space; memory is taken as it is used


def deep_threads(count: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads have all been started. A compiler that recurses as deep as its input is nested ends the
    process where its stack ends: Rust has no exception for that."""
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    before = threading.stack_size(STACK_BYTES)
    try:
        everybody = threading.Barrier(count)  # a thread that waits is not idle: each task starts another one
        for _ in range(count):
            pool.submit(everybody.wait)
    finally:
        threading.stack_size(before)
    return pool
