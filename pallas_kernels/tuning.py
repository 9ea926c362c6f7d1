"""Block sizes found by measurement, per chip, next to the code that has a rule for every other case.

`tuned/<chip>.json`, by the chip's name in `chips`, holds `{"source": ..., "entries": {key: sizes}}`; what a key and its
sizes mean is the business of the family of kernels that looks them up. On a miss, chip or key, the caller's rule
decides: nothing is approximated from other entries.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tuned"


@cache
def entries(chip: str) -> dict[str, Any]:
    """All entries for `chip`; none where there is no file."""
    path = FOLDER / f"{chip}.json"
    return json.loads(path.read_text())["entries"] if path.is_file() else {}


def lookup(chip: str, key: str) -> Any | None:
    """The sizes tuned for `key` on `chip`, or None."""
    return entries(chip).get(key)
