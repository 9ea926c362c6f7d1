"""Starts child processes without this process's main module, and ends them when this process ends for any reason."""

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

    By default a spawned process first imports that module and with it the HTTP server, which takes half a second. The
    engine's target and its arguments are in other modules.

    Args:
        environment: environment variables for the process. Variables that this process has already stay as they are.
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
