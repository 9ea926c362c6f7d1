"""Runs the program that Mosaic GPU makes for the host of a kernel: it fills tensor maps and launches the kernel.

The program is LLVM IR without branches. Its pointers are those of the arguments' arrays and of its own variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.lab.ptx.isa import Kernel
from scripts.lab.ptx.machine import Launch
from scripts.lab.ptx.memory import Array
from scripts.lab.ptx.tma import TensorMap

_FUNCTION = re.compile(r"^define i32 @(?!_mlir_ciface)\w+\((.*?)\) \{\n(.*?)^\}", re.DOTALL | re.MULTILINE)
_SIZES = {"ptr": 8, "half": 2, "bfloat": 2, "float": 4, "double": 8}


class HostError(ValueError):
    """The host's program has something that this interpreter does not know."""


@dataclass(frozen=True)
class Pointer:
    """A place in an array, or in a variable of the program (values by their offsets)."""

    target: Array | dict[int, Any] | list[Any]
    offset: int = 0

    def __hash__(self) -> int:
        return hash((id(self.target), self.offset))


def run(program: str, kernel: Kernel, buffers: list[Array]) -> Launch:
    """The launch of the kernel for the arrays of a call. An argument of tensor maps has them as `meta`.

    Raises:
        HostError: an instruction is unknown, or nothing is launched.
    """
    function = _FUNCTION.search(program)
    if function is None:
        raise HostError("no function of the host is in the program")
    host = _Host(kernel, [Pointer([]), Pointer([]), Pointer(list(buffers))])
    for line in function[2].splitlines():
        try:
            host.execute(line.strip())
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise HostError(f"the host's program: {line.strip()!r}: {error!r}") from error
    if host.launched is None:
        raise HostError("the host's program launches nothing")
    return host.launched


class _Host:
    def __init__(self, kernel: Kernel, arguments: list[Pointer]) -> None:
        self.kernel = kernel
        self.values: dict[str, Any] = {f"%{i}": argument for i, argument in enumerate(arguments)}
        self.launched: Launch | None = None

    def execute(self, line: str) -> None:
        line = line.partition(", !")[0]
        name, equals, rest = line.partition(" = ")
        operation, _, operands = (rest if equals else line).partition(" ")
        if operation in ("", "ret"):
            return
        known: dict[str, Callable[[list[str]], Any]] = {
            "load": self._load, "store": self._store, "getelementptr": self._element, "alloca": lambda _: Pointer({}),
            "insertvalue": self._insert, "extractvalue": self._extract, "ptrtoint": self._cast, "inttoptr": self._cast,
            "mul": self._product,
        }  # fmt: skip
        if operation == "call":
            self.values[name] = self._call(operands)
        elif operation in known:
            self.values[name] = known[operation](split(operands))
        else:
            raise HostError(f"{operation!r} is not known")

    def _value(self, text: str) -> Any:
        """Of an operand with its type, or without."""
        text = text.rpartition(" ")[2]
        if text in ("undef", "poison"):
            return {}
        return self.values[text] if text[0] == "%" else int(text)

    def _load(self, operands: list[str]) -> Any:
        kind, pointer = operands[0], self._value(operands[1])
        if isinstance(pointer.target, list):  # of the arguments
            return Pointer(pointer.target[pointer.offset // 8])
        if kind[0] != "[":
            return pointer.target[pointer.offset]
        end = pointer.offset + size_of(kind)
        return {at - pointer.offset: x for at, x in pointer.target.items() if pointer.offset <= at < end}

    def _store(self, operands: list[str]) -> None:
        value, pointer = self._value(operands[0]), self._value(operands[1])
        fields = value if isinstance(value, dict) else {0: value}
        pointer.target.update({pointer.offset + at: x for at, x in fields.items()})

    def _element(self, operands: list[str]) -> Pointer:
        kind = re.sub(r"^(?:inbounds|nuw|nusw) ", "", operands[0])
        pointer, (first, *path) = self._value(operands[1]), [self._value(x) for x in operands[2:]]
        offset = pointer.offset + first * size_of(kind)
        for index in path:
            before, kind = member(kind, index)
            offset += before
        return Pointer(pointer.target, offset)

    def _insert(self, operands: list[str]) -> dict[tuple[str, ...], Any]:
        return self._value(operands[0]) | {tuple(operands[2:]): self._value(operands[1])}

    def _extract(self, operands: list[str]) -> Any:
        return self._value(operands[0])[tuple(operands[1:])]

    def _cast(self, operands: list[str]) -> Any:
        return self._value(operands[0].partition(" to ")[0])

    def _product(self, operands: list[str]) -> int:
        return self._value(operands[0]) * self._value(operands[1])

    def _call(self, text: str) -> int:
        match = re.match(r"\w+ @(\w+)\((.*)\)", text)
        assert match is not None, text
        values = [self._value(operand) for operand in split(match[2])]
        if match[1] == "mosaic_gpu_init_tma_desc":
            place, base, kind, rank, sizes, strides, swizzle, box = values
            lists = (tuple(x.target[x.offset + 8 * i] for i in range(rank)) for x in (sizes, strides, box))
            place.target[place.offset] = TensorMap.encoded(base.target, base.offset, kind, *lists, swizzle=swizzle)
        elif match[1] == "mosaic_gpu_launch_kernel":
            sizes, shared, pointers = values[1:10], values[10], values[13]
            places = [pointers.target[at] for at in sorted(pointers.target)]
            grid, block = tuple(sizes[:3]), tuple(sizes[6:])
            cluster = sizes[3] or 1, sizes[4] or 1, sizes[5] or 1
            arguments = [self._argument(place) for place in places]
            self.launched = Launch(
                kernel=self.kernel, grid=grid, cluster=cluster, block=block, shared_bytes=shared, arguments=arguments
            )
        else:
            raise HostError(f"a call of {match[1]}")
        return 0

    @staticmethod
    def _argument(place: Pointer) -> Any:
        """An array, or the tensor maps that are passed as the parameter's bytes."""
        assert isinstance(place.target, dict)
        value = place.target[place.offset]
        if not isinstance(value, TensorMap):
            assert value.offset == 0, "a pointer into an array"
            return value.target
        maps, at = {}, place.offset
        while isinstance(place.target.get(at), TensorMap):
            maps[at - place.offset] = place.target[at]
            at += 128
        parameter = Array("tensor maps", np.zeros(128 * len(maps), np.uint8))
        parameter.inline, parameter.meta = True, maps
        return parameter


def split(text: str) -> list[str]:
    """The operands between commas that are in no brackets."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found]


def size_of(kind: str) -> int:
    """The bytes of a type, without padding: all fields of its structures are 8-byte values or follow them."""
    if kind in _SIZES:
        return _SIZES[kind]
    if kind[0] == "i":
        return -(-int(kind[1:]) // 8)
    if kind[0] == "[":
        count, _, of = kind[1:-1].partition(" x ")
        return int(count) * size_of(of)
    return sum(size_of(part) for part in split(kind[1:-1]))


def member(kind: str, index: int) -> tuple[int, str]:
    """The offset and type of a structure's or array's member."""
    if kind[0] == "[":
        of = kind[1:-1].partition(" x ")[2]
        return index * size_of(of), of
    parts = split(kind[1:-1])
    return sum(size_of(part) for part in parts[:index]), parts[index]
