"""What the pages promise, read from them."""

import re
from dataclasses import dataclass
from typing import Any

from support.paths import ROOT

DOCS = ROOT / "docs"
KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "null": (type(None),),
}


def page(name: str) -> str:
    """A page of docs/, like `reference/output.md`."""
    return (DOCS / name).read_text(encoding="utf-8")


def documented(command: str) -> dict[str, tuple[str, bool]]:
    """Key of `command --json` → its type, and whether it is there in some cases only."""
    (section,) = re.findall(rf"^## `{re.escape(command)}`\n(.*?)(?=^## |\Z)", page("reference/output.md"), re.M | re.S)
    rows = re.findall(r"^\| (\*?`.*?) \| ([a-z ]+) \| ", section, re.M)
    return {key: (kind, bool(star)) for keys, kind in rows for star, key in re.findall(r"(\*?)`([\w ]+)`", keys)}


def sometimes(command: str) -> set[str]:
    """The keys of `command --json` that are there in some cases only."""
    return {key for key, (_, only) in documented(command).items() if only}


def assert_as_documented(command: str, found: dict[str, Any], also: set[str] | frozenset[str] = frozenset()) -> None:
    """The keys that are always there and those of `also`, no others, each of its type."""
    promised = documented(command)
    assert promised
    assert found.keys() == (promised.keys() - sometimes(command)) | also
    wrong = {key: value for key, value in found.items() if not is_a(value, promised[key][0])}
    assert wrong == {}


def is_a(value: Any, kind: str) -> bool:
    """Whether a value of JSON has a documented type, such as `list of string` or `integer or null`."""
    if " or " in kind:
        return any(is_a(value, one) for one in kind.split(" or "))
    if kind.startswith("list of "):
        return isinstance(value, list) and all(is_a(one, kind.removeprefix("list of ")) for one in value)
    return isinstance(value, KINDS[kind]) and (kind == "boolean") == isinstance(value, bool)


# Blocks of commands and of Python.

PROGRAMS = (
    *("pi-compile", "pi-run", "pi-serve", "python", "nox", "pytest", "pip", "pipx", "uv", "curl", "docker", "git"),
    *("accelerate", "torchrun", "srun", "mount", "#!/bin/bash"),
)
"""What commands begin with."""
FENCE = re.compile(r"^( *)```(\S*)")
MARK = re.compile(r"^ *<!-- (not run|run by): (.+) -->$")
INDENT = "    "
BEFORE = re.compile(r"\s*$|#|<!--")
"""What stands before an indented block: an empty line, a heading or a comment."""


@dataclass(frozen=True)
class Block:
    """A block of a page. Indented ones, which say no language, count as `console` if they begin with a command."""

    line: int
    language: str
    text: str
    mark: str = ""
    """What the comment before it says: `not run` or `run by`; empty without one."""
    said: str = ""
    """The reason, or the test."""


def blocks(text: str) -> list[Block]:
    """The blocks of a page in Markdown, in order."""
    lines, found, at = text.splitlines(), [], 0
    while at < len(lines):
        begins, fence = at, FENCE.match(lines[at])
        if fence:
            indent, language = fence[1], fence[2]
            at = next(n for n in range(at + 1, len(lines)) if lines[n] == f"{indent}```")
            inside = [line.removeprefix(indent) for line in lines[begins + 1 : at]]
        elif lines[at].startswith(INDENT) and BEFORE.match(lines[at - 1]) and not _in_list(lines, at):
            while at + 1 < len(lines) and (lines[at + 1].startswith(INDENT) or not lines[at + 1].strip()):
                at += 1
            inside = [line.removeprefix(INDENT) for line in lines[begins : at + 1]]
            language = "console" if inside[0].startswith(PROGRAMS) else "text"
        else:
            at += 1
            continue
        before = next((line for line in reversed(lines[:begins]) if line.strip()), "")
        mark = MARK.match(before)
        found.append(Block(begins + 1, language, "\n".join(inside), *(mark.groups() if mark else ())))
        at += 1
    return found


def _in_list(lines: list[str], at: int) -> bool:
    """Whether an indented line goes on with an item of a list."""
    above = next((line for line in reversed(lines[:at]) if line.strip() and not line.startswith(" ")), "")
    return bool(re.match(r"([-*]|\d+\.) ", above))


def commands(block: str) -> list[str]:
    """The commands of a block, without comments; one that ends with a backslash goes on in the next line."""
    joined = re.sub(r"\\\n\s*", "", block)
    uncommented = [re.sub(r"(^|\s)# .*", "", line).strip() for line in joined.splitlines()]
    return [command.strip() for line in uncommented for command in line.split(" && ") if command.strip()]
