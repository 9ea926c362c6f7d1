"""A kernel in PTX as data: registers, operands and instructions."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

type Warp = Any  # machine.Warp and machine.Block: the machine imports the families of instructions, and they not it
type Block = Any


@dataclass(frozen=True)
class Register:
    """A virtual register."""

    name: str
    bank: str  # pred, b16, b32 or b64
    row: int  # its number among all registers of the kernel


@dataclass(frozen=True)
class Immediate:
    """A constant. Floating-point constants are given by their bits."""

    value: int


@dataclass(frozen=True)
class Special:
    """A read-only register such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """The name of a shared variable or of a parameter."""

    name: str


@dataclass(frozen=True)
class Label:
    """The target of a branch."""

    name: str


@dataclass(frozen=True)
class Sink:
    """`_`: the result is dropped."""


@dataclass(frozen=True)
class Address:
    """`[base + offset]`."""

    base: Register | Symbol | Immediate
    offset: int = 0


@dataclass(frozen=True)
class Vector:
    """`{a, b}`, or `a|b`."""

    parts: tuple[Operand, ...]


@dataclass(frozen=True)
class Coordinates:
    """`[tensor map, {c0, c1}]`."""

    base: Register | Symbol | Address
    parts: tuple[Operand, ...]


type Operand = Register | Immediate | Special | Symbol | Label | Sink | Address | Vector | Coordinates


@dataclass(frozen=True)
class Instruction:
    """One instruction, with its place in the text."""

    index: int
    opcode: str  # with its modifiers, as it is written
    operands: tuple[Operand, ...]
    predicate: Register | None
    negated: bool
    line: int
    text: str
    source: str = ""  # file:line of the kernel in Python, from .loc

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The opcode and its modifiers."""
        return tuple(self.opcode.split("."))


@dataclass(frozen=True)
class Parameter:
    """A parameter of the kernel, in bytes."""

    name: str
    size: int
    align: int


@dataclass(frozen=True)
class SharedVariable:
    """A variable in shared memory. The one whose size is given by the launch has size 0."""

    name: str
    size: int
    align: int


@dataclass(frozen=True)
class Kernel:
    """A kernel's entry."""

    name: str
    target: str  # sm_80, ...
    parameters: tuple[Parameter, ...]
    registers: tuple[Register, ...]
    shared: tuple[SharedVariable, ...]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int] = field(default_factory=dict)  # the index of the instruction after each
