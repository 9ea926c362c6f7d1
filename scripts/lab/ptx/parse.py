"""Reads the kernel of a PTX module. The subset is that of LLVM's back end and of Mosaic GPU's inline assembly."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from scripts.lab.ptx import isa

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\).*?\n\{\n", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(?:\.align (\d+)\s+)?\.(\w+)(?:\s+\.ptr\s+(?:\.align \d+)?)?\s+(\w+)(?:\[(\d+)\])?")
_SHARED = re.compile(r"\.shared\s+(?:\.align (\d+)\s+)?\.\w(\d+)\s+(\w+)(?:\[(\d*)\])?$")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)$", re.DOTALL)
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+([1-9]\d*)")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"(?:[^"]*/)?([^"/]+)"', re.MULTILINE)
_INSTRUCTION = re.compile(r"(?:@(!?)(\S+)\s+)?([a-z]\S*)\s*(.*)$", re.DOTALL)
_TOKEN = re.compile(r"\s*(0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|-?0x[0-9a-fA-F]+|-?\d+|[%$\w.]+|[][{},|+!])U?")
_SPECIAL = re.compile(r"%(?:n?tid|n?ctaid|cluster_\w+|[xyzw]|laneid|warpid|clock\w*|globaltimer|dynamic_smem_size)\b")
_DIRECTIVE = re.compile(r"\.(?:loc|file|pragma|section)\b")


class ParseError(ValueError):
    """Text that is no PTX, or that this reader does not know."""


@dataclass
class _Scope:
    """The names of an inline assembly block: its registers and labels are its own."""

    number: int
    names: dict[str, isa.Register] = field(default_factory=dict)


def parse(ptx: str) -> isa.Kernel:
    """The only kernel of the module.

    Raises:
        ParseError: there is no kernel, or a statement is unknown.
    """
    entry = _ENTRY.search(ptx)
    if entry is None:
        raise ParseError("the PTX has no .entry")
    return _Reader(ptx, entry).kernel()


class _Reader:
    def __init__(self, ptx: str, entry: re.Match[str]) -> None:
        self.ptx, self.entry = ptx, entry
        self.registers: list[isa.Register] = []
        self.shared = [_shared(line) for line in re.findall(r"\.shared[^;]*", ptx[: entry.start()])]
        self.instructions: list[isa.Instruction] = []
        self.labels: dict[str, int] = {}
        self.files = dict(_FILE.findall(ptx))
        self.scopes = [_Scope(0)]
        self.num_scopes = 0
        self.source = ""

    def kernel(self) -> isa.Kernel:
        name, parameters = self.entry.groups()
        for line, text in self._statements():
            try:
                self._statement(line, text)
            except (ParseError, IndexError) as error:
                raise ParseError(f"line {line} of the PTX is not understood: {text!r}: {error}") from error
        target = re.search(r"^\.target (\w+)", self.ptx, re.MULTILINE)
        if target is None:
            raise ParseError("the PTX has no .target")
        return isa.Kernel(
            name=name,
            target=target[1],
            parameters=tuple(_parameter(*found) for found in _PARAMETER.findall(parameters)),
            registers=tuple(self.registers),
            shared=tuple(self.shared),
            instructions=tuple(self.instructions),
            labels=self.labels,
        )

    def _statements(self) -> Iterator[tuple[int, str]]:
        """Each statement of the body without its semicolon, and its line. Also `{`, `}`, labels and `.loc`."""
        pending, began = "", 0
        first = self.ptx.count("\n", 0, self.entry.end()) + 1
        for number, whole in enumerate(self.ptx[self.entry.end() :].split("\n"), first):
            rest = whole.partition("//")[0].strip()
            while rest:
                if not pending:
                    began = number
                    if _DIRECTIVE.match(rest):
                        yield number, rest
                        break
                    if opened := re.match(r"[{}]|[$\w]+:", rest):
                        if rest[0] == "}" and len(self.scopes) == 1:
                            return
                        yield number, opened[0]
                        rest = rest[opened.end() :].strip()
                        continue
                statement, semicolon, rest = rest.partition(";")
                pending += " " + statement
                rest = rest.strip()
                if semicolon:
                    yield began, pending.strip()
                    pending = ""
        raise ParseError("the kernel does not end")

    def _statement(self, line: int, text: str) -> None:
        if text == "{":
            self.num_scopes += 1
            self.scopes.append(_Scope(self.num_scopes))
        elif text == "}":
            self.scopes.pop()
        elif text.endswith(":"):
            self.labels[self._label(text[:-1])] = len(self.instructions)
        elif location := _LOCATION.match(text):  # not line 0, which is the compiler's own
            self.source = f"{self.files.get(location[1], '')}:{location[2]}"
        elif registers := _REGISTERS.match(text):
            self._declare(*registers.groups())
        elif text.startswith(".shared"):
            self.shared.append(_shared(text))
        elif text and not _DIRECTIVE.match(text):
            self._instruction(line, text)

    def _declare(self, kind: str, names: str) -> None:
        bank = "pred" if kind == "pred" else f"b{kind[1:]}"
        for declared in names.split(","):
            name, _, count = declared.strip().partition("<")
            every = [f"{name}{i}" for i in range(int(count.rstrip(">")))] if count else [name]
            for each in every:
                scope = self.scopes[-1]
                shown = f"{each}@{scope.number}" if scope.number else each
                self.registers.append(isa.Register(shown, bank, len(self.registers)))
                scope.names[each] = self.registers[-1]

    def _label(self, name: str) -> str:
        number = self.scopes[-1].number
        return f"{name}@{number}" if number and not name.startswith("$L") else name

    def _instruction(self, line: int, text: str) -> None:
        match = _INSTRUCTION.match(text)
        if match is None:
            raise ParseError("no instruction")
        negation, predicate, opcode, rest = match.groups()
        tokens = _Tokens(rest)
        operands: list[isa.Operand] = []
        while tokens:
            operands.append(self._operand(tokens, jump=opcode.startswith("bra")))
            if tokens:
                tokens.expect(",")
        self.instructions.append(
            isa.Instruction(
                index=len(self.instructions),
                opcode=opcode,
                operands=tuple(operands),
                predicate=self._register(predicate) if predicate else None,
                negated=bool(negation),
                line=line,
                text=re.sub(r"\s+", " ", text),
                source=self.source,
            )
        )

    def _operand(self, tokens: _Tokens, *, jump: bool = False) -> isa.Operand:
        token = tokens.popleft()
        if token == "{":
            return isa.Vector(self._list(tokens, "}"))
        if token == "[":
            return self._address(tokens)
        if jump:
            return isa.Label(self._label(token))
        first = self._value(token)
        if tokens.take("|"):
            return isa.Vector((first, self._value(tokens.popleft())))
        if tokens.take("+"):
            assert isinstance(first, isa.Register | isa.Symbol | isa.Immediate)
            return isa.Address(first, int(tokens.popleft(), 0))
        return first

    def _address(self, tokens: _Tokens) -> isa.Operand:
        base = self._value(tokens.popleft())
        assert isinstance(base, isa.Register | isa.Symbol | isa.Immediate)
        address = isa.Address(base, int(tokens.popleft(), 0) if tokens.take("+") else 0)
        coordinates = None
        if tokens.take(","):
            tokens.expect("{")
            coordinates = self._list(tokens, "}")
        tokens.expect("]")
        return address if coordinates is None else isa.Coordinates(address, coordinates)

    def _list(self, tokens: _Tokens, end: str) -> tuple[isa.Operand, ...]:
        found = [self._operand(tokens)]
        while tokens.take(","):
            found.append(self._operand(tokens))
        tokens.expect(end)
        return tuple(found)

    def _value(self, token: str) -> isa.Operand:
        if token == "_":
            return isa.Sink()
        if re.match(r"0[fFdD]", token) and len(token) in (10, 18):
            return isa.Immediate(int(token[2:], 16))
        if re.match(r"-?\d", token):
            return isa.Immediate(int(token, 0))
        if register := self._find(token):
            return register
        if token.startswith("%"):
            if not _SPECIAL.match(token):
                raise ParseError(f"{token} is no register")
            return isa.Special(token)
        return isa.Symbol(token)

    def _find(self, name: str) -> isa.Register | None:
        return next((scope.names[name] for scope in reversed(self.scopes) if name in scope.names), None)

    def _register(self, name: str) -> isa.Register:
        found = self._find(name)
        if found is None:
            raise ParseError(f"{name} is not declared")
        return found


class _Tokens(deque[str]):
    """The operands of an instruction, cut into tokens."""

    def __init__(self, text: str) -> None:
        super().__init__()
        place = 0
        while place < len(text.rstrip()):
            match = _TOKEN.match(text, place)
            if match is None:
                raise ParseError(f"{text[place:]!r} is no operand")
            self.append(match[1])
            place = match.end()

    def take(self, token: str) -> bool:
        """Whether this token is the next one, which it then leaves out."""
        return bool(self) and self[0] == token and bool(self.popleft())

    def expect(self, token: str) -> None:
        if not self.take(token):
            raise ParseError(f"{token!r} is missing")


def _parameter(align: str, kind: str, name: str, count: str) -> isa.Parameter:
    size = int(kind[1:]) // 8
    return isa.Parameter(name, size * int(count or 1), int(align or size))


def _shared(text: str) -> isa.SharedVariable:
    match = _SHARED.match(text.strip())
    if match is None:
        raise ParseError(f"{text!r} declares no shared variable")
    align, bits, name, count = match.groups()
    return isa.SharedVariable(name, int(bits) // 8 * int(count or 0), int(align or 1))
