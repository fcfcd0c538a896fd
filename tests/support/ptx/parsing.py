"""PTX text as a list of blocks of instructions.

Only what Triton writes is read: one entry, registers declared by class, no functions, no local memory.
"""

import re
from dataclasses import dataclass

from support.ptx.faults import UnknownInstructionError

_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(%\w+?)<(\d+)>;")
_PARAMETER = re.compile(r"\.param \.(\w+)(?: \.ptr [^,)]*?)? (\w+)\s*[,\n)]")
_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_WIDTHS = {"pred": 1, "b16": 16, "b32": 32, "b64": 64}
_ENDS = ("bra", "bra.uni", "bar.sync", "ret")


@dataclass(frozen=True)
class Instruction:
    """One instruction: run only where its guard is true, or false if `negated`."""

    opcode: str
    operands: tuple[str, ...]
    guard: str | None
    negated: bool
    line: int

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.guard} " if self.guard else ""
        return f"line {self.line}: {guard}{self.opcode} {', '.join(self.operands)}"


@dataclass(frozen=True)
class Block:
    """Instructions that run one after the other; only the last one may be a branch, a barrier or the end."""

    body: tuple[Instruction, ...]
    end: Instruction | None


@dataclass(frozen=True)
class Kernel:
    """A kernel's parameters (name → type), its registers' widths in bits by their prefix, and its blocks."""

    name: str
    threads: int
    parameters: dict[str, str]
    widths: dict[str, int]
    blocks: tuple[Block, ...]
    labels: dict[str, int]
    """The block at each label."""

    def width(self, register: str) -> int:
        """Bits of a register; 1 for a predicate."""
        return self.widths[register.rstrip("0123456789")]


def parse(text: str) -> Kernel:
    """Read a kernel. Raises UnknownInstructionError for what Triton does not write."""
    name = re.search(r"\.entry (\w+)\(", text)
    threads = re.search(r"\.reqntid (\d+)", text)
    assert name is not None
    assert threads is not None
    head, _, rest = text.partition("\n{")
    body = rest[: rest.index("\n}")]
    declared = _REGISTERS.findall(body)
    if unknown := [kind for kind, *_ in declared if kind not in _WIDTHS] or re.findall(r"\.local|\.func|\.const", body):
        raise UnknownInstructionError(f"{name[1]}: {unknown}")
    parameters = {name: kind for kind, name in _PARAMETER.findall(head[name.end() :])}
    first_line = head.count("\n") + 2
    blocks, labels = _blocks(body.splitlines(), first_line)
    return Kernel(
        name[1], int(threads[1]), parameters, {prefix: _WIDTHS[kind] for kind, prefix, _ in declared}, blocks, labels
    )


def _blocks(lines: list[str], first_line: int) -> tuple[tuple[Block, ...], dict[str, int]]:
    blocks: list[Block] = []
    labels: dict[str, int] = {}
    body: list[Instruction] = []

    def close(end: Instruction | None) -> None:
        blocks.append(Block(tuple(body), end))
        body.clear()

    for number, line in enumerate(lines, first_line):
        code = line.partition("//")[0].strip()
        if label := re.fullmatch(r"(\$\w+):", code):
            if body:
                close(None)
            labels[label[1]] = len(blocks)
            continue
        if not code or code.startswith("."):
            continue
        for statement in filter(None, (part.strip() for part in code.split(";"))):
            instruction = _instruction(statement, number)
            if instruction.opcode in _ENDS:
                close(instruction)
            else:
                body.append(instruction)
    close(None)
    return tuple(blocks), labels


def _instruction(statement: str, line: int) -> Instruction:
    found = _STATEMENT.fullmatch(statement)
    if found is None:
        raise UnknownInstructionError(f"line {line}: {statement}")
    negated, guard, opcode, operands = found.groups()
    return Instruction(opcode, tuple(o.strip() for o in _OPERAND.findall(operands)), guard, bool(negated), line)
