"""Tuned block sizes, per chip. The kernels have a rule for every case that is not tuned.

`tuned/<chip>.json` holds `{"source": ..., "entries": {key: sizes}}`; `<chip>` is the chip's name in `chips`. Each
kernel defines its keys and sizes. If the chip or the key is missing, the kernel's rule decides. Sizes are never
interpolated from other entries.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tuned"


@cache
def entries(chip: str) -> dict[str, Any]:
    """All entries for `chip`; empty if there is no file."""
    path = FOLDER / f"{chip}.json"
    return json.loads(path.read_text())["entries"] if path.is_file() else {}


def lookup(chip: str, key: str) -> Any | None:
    """The sizes tuned for `key` on `chip`, or None."""
    return entries(chip).get(key)
