"""Block sizes found by measurement, per device, beside the code that has a rule for every other case.

`tuned/<device>.json` holds `{"source": ..., "entries": {key: sizes}}`; what a key and its sizes mean is the business of
the family of kernels that looks them up. On a miss, device or key, the caller's rule decides: nothing is approximated
from other entries.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tuned"


@cache
def entries(device: str) -> dict[str, Any]:
    """All entries for `device`; none where there is no file."""
    path = FOLDER / f"{device}.json"
    return json.loads(path.read_text())["entries"] if path.is_file() else {}


def lookup(device: str, key: str) -> Any | None:
    """The sizes tuned for `key` on `device`, or None."""
    return entries(device).get(key)
