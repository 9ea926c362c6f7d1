"""An engine's process that stores and loads pages of a folder, for `test_shared_folder.py`.

    python -m tests.model.page_files.engine_process FOLDER SEED [--stop-before-rename | --most-file-bytes N]

It prints a line after each call, and ends with its standard input, or with an error once a page is wrong.
"""

from __future__ import annotations

import random
import resource
import select
import sys
import threading
from pathlib import Path

from tests.model.page_files.pages import get, is_right, open_store, page_of, put

NUM_PAGES, MAX_PAGES = 12, 8


def _main(folder: str, seed: str, *options: str) -> None:
    store = open_store(Path(folder), max_pages=MAX_PAGES)
    if "--most-file-bytes" in options:
        most = int(options[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        print(put(store, 1), store.num_failed, flush=True)
        return
    if "--stop-before-rename" in options:
        Path.replace = lambda *args: (print("written", flush=True), threading.Event().wait())
        put(store, 100)
    draws = random.Random(seed)
    while not select.select([sys.stdin], [], [], 0)[0]:
        number, action = draws.randrange(NUM_PAGES), draws.random()
        if action < 0.5:
            assert put(store, number)
        elif action < 0.9:
            found = get(store, number)
            assert found is None or found.tobytes() == page_of(number).tobytes()
        else:
            store.refresh()
        print(action, flush=True)
    assert put(store, 0) and is_right(store, 0)
    assert (store.num_broken, store.num_failed) == (0, 0)
    store.close()
    print("done", store.num_loaded > 0, flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
