"""Kernels as text: small ones written here, and compiled ones with a fault planted in them."""

import re
from typing import Any

import numpy as np
import torch

from support.ptx.global_memory import GlobalMemory, Region
from support.ptx.machine import Grid, Schedule, run
from support.ptx.translating import translate

_HEAD = """.version 8.8
.target sm_80
.extern .shared .align 16 .b8 global_smem[];
.visible .entry small(
{parameters}
)
.reqntid {threads}
{{
	.reg .pred 	%p<32>;
	.reg .b16 	%rs<32>;
	.reg .b32 	%r<64>;
	.reg .b64 	%rd<32>;
{body}
}}
"""


def small(body: str, parameters: int = 1, threads: int = 64) -> str:
    """A kernel with pointers as parameters: `small_param_0` and so on."""
    names = ",\n".join(f"\t.param .u64 .ptr .global .align 1 small_param_{n}" for n in range(parameters))
    return _HEAD.format(parameters=names, threads=threads, body=body)


def run_text(
    text: str, *tensors: torch.Tensor, programs: int = 1, shared: int = 1024, schedule: Schedule | None = None
) -> GlobalMemory:
    """Run a kernel whose parameters are these tensors. Raises PtxError."""
    translated = translate(text)
    regions = [
        Region(n, name, t) for n, (name, t) in enumerate(zip(translated.kernel.parameters, tensors, strict=True))
    ]
    memory = GlobalMemory(regions)
    pointers: dict[str, Any] = {region.name: np.array(region.pointer, np.uint64) for region in regions}
    run(translated, Grid((programs, 1, 1), shared), pointers, memory, schedule or Schedule())
    return memory


def without(text: str, opcode: str, number: int = 0) -> str:
    """The kernel without the n-th instruction whose opcode begins so."""
    start, end = _found(text, opcode)[number].span(1)
    return text[:start] + text[end:]


def changed(text: str, opcode: str, old: str, new: str, number: int = 0) -> str:
    """The kernel with another text in the n-th instruction whose opcode begins so."""
    start, end = _found(text, opcode)[number].span(1)
    return text[:start] + text[start:end].replace(old, new, 1) + text[end:]


def instead_of(text: str, opcode: str, new: str, number: int = 0) -> str:
    """The kernel with `new`, which may name operands ({0}, {1} …), in the n-th such place; as it is without one."""
    places = _found(text, opcode)[number : number + 1]
    for place in places:
        start, end = place.span(1)
        operands = [o.strip() for o in re.split(r"[,\s]+", place[1].strip(";"))[1:]]
        text = text[:start] + new.format(*operands) + text[end:]
    return text


def _found(text: str, opcode: str) -> list[re.Match[str]]:
    return list(re.finditer(rf"^\s*((?:@!?%\w+\s+)?{re.escape(opcode)}[^;]*;)", text, re.MULTILINE))
