"""What the final bundles of an attention kernel say of its offsets in HBM, and of the cores that run it."""

from __future__ import annotations

import re

GRANULE_BYTES = 32  # the unit of addresses and of copies: a window of the page table has 512 bytes, 16 granules
_MADE = re.compile(r"(%s\d+_s\d+) = ([^;}\n]+)")
_COPY = re.compile(r"= dma\.(?:hbm_to_\w+|\w+_to_hbm)[^;\n]*?/\*hbm=\*/(%s\d+_s\d+)")
_PLACE = re.compile(r"scalar_lea\.hbm \S+, (%s\d+_s\d+)")
_POINTER = re.compile(r"int_to_ptr\.hbm [^%]*(%s\d+_s\d+)")
_SHIFT = re.compile(r"sshll\.u32 (?:\([^)]*\), )?(\S+), (\d+)")
_LEAVES = re.compile(r"(%p\d+)_p\d+ = scmp\.ne\.s32\.totalorder (%s\d+_s\d+), 0")


def offsets_not_in_granules(bundles: str) -> list[str]:
    """The copies from or to HBM whose offset is not made by a shift to granules, last of all: by the 16 of a row of
    512 bytes, or by those of a larger tile.

    An offset in rows or tiles, and then in granules, fits the 32 bits of a scalar register for 128 GiB. On v5e the sum
    of base and offset is made in rows, and then shifted.
    """
    made = dict(_MADE.findall(bundles))

    def is_in_granules(place: str) -> bool:
        content = made.get(place, "")
        if pointer := _POINTER.match(content):
            shift = _SHIFT.match(made.get(pointer[1], ""))
            rows = made.get(shift[1], "") if shift and int(shift[2]) >= 4 else ""
            return bool(_PLACE.match(rows)) or "operand" in rows
        computed = _PLACE.match(content)
        if computed is None:
            return "operand" in content
        shift = _SHIFT.match(made.get(computed[1], ""))
        return bool(shift and int(shift[2]) >= 4)

    return [f"{place} = {made.get(place)}" for place in _COPY.findall(bundles) if not is_in_granules(place)]


def runs_on_the_first_core(bundles: str) -> bool:
    """Whether a device's other core, if it has one, leaves the kernel before the first copy."""
    head = bundles[: bundles.index(" dma.")]
    core = re.search(r"(%s\d+_s\d+) = sld [^;}\n]*/\* megacore core id", head)
    if core is None:
        return True  # the device has one core
    leaves = [name for name, tested in _LEAVES.findall(head) if tested == core[1]]
    return any(re.search(rf"sbr\.rel \({name}_p\d+\) target", head) for name in leaves)
