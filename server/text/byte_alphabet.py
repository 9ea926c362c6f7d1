"""The printable alphabet in which byte-level BPE vocabularies write their bytes (GPT-2's)."""

from __future__ import annotations


def byte_to_unicode() -> dict[int, int]:
    """Byte -> code point, for `str.translate`: itself where it prints, else the next free code point from 256."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {byte: 256 + i for i, byte in enumerate(others)}


def unicode_to_byte() -> dict[int, int]:
    """The inverse of `byte_to_unicode`."""
    return {code: byte for byte, code in byte_to_unicode().items()}
