"""Whether the mask of V tells the two values of a register apart, read from PTX.

The tensor cores take V with two keys of a column in a register. Where a sequence ends between them, one is kept and the
other cleared. Interpret mode knows no registers, and does not see that both keys of a pair have the same mask.
"""

from __future__ import annotations

import re
from collections import defaultdict

_PAIR = re.compile(r"mov\.b32\s+\{(%rs\d+), (%rs\d+)\}, %r\d+;")
_CLEARED = re.compile(r"selp\.b16\s+%rs\d+, (%rs\d+), 0x0000, (%p\d+);")


def pairs_under_one_mask(ptx: str) -> tuple[int, int]:
    """The registers whose halves are cleared by masks, and those of them whose halves have the same one."""
    masks: dict[str, set[str]] = defaultdict(set)
    for half, mask in _CLEARED.findall(ptx):
        masks[half].add(mask)
    pairs = [(masks[low], masks[high]) for low, high in _PAIR.findall(ptx) if masks[low] and masks[high]]
    return len(pairs), sum(low == high for low, high in pairs)
