"""How a kernel computes the offsets of pages that `cp.async` copies, read from PTX.

A page's offset is its number times the bytes of a page, which does not fit 32 bits in a pool of serving size. So the
product must be one of 64 bits. (A copy by TMA takes the number itself as a coordinate; the copy engine multiplies it by
a stride of 64 bits.)

The numbers of pages are read from an address that depends on another number from memory: the page table is read at the
row that the list of work names. Others are, too, but nothing else is multiplied by as much as a page has elements.
"""

from __future__ import annotations

import re

_READ = re.compile(r"\bld\.global\S*\.[bsu]32\s+([^\[]+), \[(%\w+)")
_MADE = re.compile(r"^(?:@!?%p\d+\s+)?([a-z]\S*)\s+(%\w+), (.*);")
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\s+\[[^\]]+\], \[(%\w+)")
_REGISTER = re.compile(r"%rd?\d+")
_PRODUCT = re.compile(r"(shl|mul|mad|mul24|mad24)\.\S+ %\w+, %\w+, (\d+)\b")


def page_products(ptx: str, page_elements: int) -> list[str]:
    """The instructions that multiply a page's number by `page_elements` or more, for the source of a `cp.async`."""

    def multiplies(line: str) -> bool:
        if (product := _PRODUCT.match(line)) is None:
            return False
        number = int(product[2])
        return (1 << number if product[1] == "shl" else number) >= page_elements

    lines = [" ".join(line.split()) for line in ptx.splitlines()]
    read = {name: match[2] for line in lines if (match := _READ.search(line)) for name in _REGISTER.findall(match[1])}
    made: dict[str, list[tuple[str, list[str]]]] = {}
    for line in lines:
        if (match := _MADE.match(line)) and not match[1].startswith("ld."):
            made.setdefault(match[2], []).append((line, _REGISTER.findall(match[3])))

    def reached(starts: list[str]) -> list[str]:
        """These registers and those that they are computed from, without another access to memory."""
        found, todo = dict.fromkeys(starts), list(starts)
        while todo:
            for _, operands in made.get(todo.pop(), []):
                new = [name for name in operands if name not in found]
                found |= dict.fromkeys(new)
                todo += new
        return list(found)

    pages = {name for name, address in read.items() if any(other in read for other in reached([address]))}
    sources = reached([copy[1] for line in lines if (copy := _COPY.search(line))])
    return sorted(
        line
        for name in sources
        for line, operands in made.get(name, [])
        if multiplies(line) and not pages.isdisjoint(reached(operands))
    )
