"""Processes that this one starts: they start without its main module, and end with it, however it ends."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from multiprocessing import connection, parent_process
from multiprocessing.process import BaseProcess
from types import ModuleType

EXIT_ORPHANED = 2
_STARTING = threading.Lock()


def start_without_main(process: BaseProcess, environment: Mapping[str, str] | None = None) -> None:
    """Starts a process that does not import this process's main module.

    By default, a spawned process first imports it, and with it the HTTP server: half a second of every start. The
    engine's target and its arguments are in modules of their own.

    Args:
        environment: variables that the process has, unless this one's environment has them.
    """
    with _STARTING:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        own = {name: value for name, value in (environment or {}).items() if name not in os.environ}
        os.environ |= own
        try:
            process.start()
        finally:
            sys.modules["__main__"] = main
            for name in own:
                del os.environ[name]


def end_with_parent() -> None:
    """Starts a thread that ends this process when its parent has ended for any reason."""
    threading.Thread(target=_wait, name="parent-watch", daemon=True).start()


def _wait() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(EXIT_ORPHANED)
