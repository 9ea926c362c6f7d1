"""A process that ends with the one that started it, however that one ends."""

from __future__ import annotations

import os
import threading
from multiprocessing import connection, parent_process

EXIT_ORPHANED = 2


def end_with_parent() -> None:
    """Starts a thread that ends this process when its parent has ended for any reason."""
    threading.Thread(target=_wait, name="parent-watch", daemon=True).start()


def _wait() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(EXIT_ORPHANED)
