"""Threads with large stacks, for deep recursion."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

STACK_BYTES = 2**28  # bytes of address space; memory is allocated when it is used


def deep_threads(count: int, name: str) -> ThreadPoolExecutor:
    """A pool of `count` threads with large stacks, all started. A compiler written in Rust may recurse as deep as its
    input is nested, and a stack overflow there ends the process: it is not an exception."""
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    before = threading.stack_size(STACK_BYTES)
    try:
        everybody = threading.Barrier(count)  # waiting threads are not idle, so each task starts a thread
        for _ in range(count):
            pool.submit(everybody.wait)
    finally:
        threading.stack_size(before)
    return pool
