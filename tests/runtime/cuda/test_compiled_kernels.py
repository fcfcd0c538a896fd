"""Kernels as they are compiled, on the emulator: right, in any order, moving no byte too much; and faults are found.

They run in a process of their own, with TRITON_INTERPRET=0 (`test_ptx.py` starts one, and the session `ptx`).
"""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.gpu_kernels import Stored, integers, normal
from support.long_form import marked_long

pytest.importorskip("triton.backends.nvidia")

from support.ptx.cases import EVEN, GROUPS, ODD, SMALL_DOTS, SMALL_SUMS, case, cases
from support.ptx.edges import EDGES
from support.ptx.faults import PendingError, PtxError, RaceError, UnwrittenError
from support.ptx.launching import Emulator, Launch
from support.ptx.machine import Schedule
from support.ptx.texts import changed, without
from support.ptx.traffic import traffic

from pi_runtime.cuda.kernels import ffn_neurons, row_dot
from pi_runtime.cuda.kernels.compaction import NeuronList
from pi_runtime.cuda.kernels.ffn_neurons import CODES
from pi_runtime.cuda.kernels.gathered_sum import gathered_sums

MOST = 1.3
"""Bytes that a kernel moves ÷ the least. What is odd or tiny ends within sectors."""
LATER = {group for group in GROUPS if group.endswith(str(EVEN)) or group.startswith(("bf16", "q5", "q4_1"))}
"""Only in the long form; each of these formats has one like it that stays."""


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Lines to print when all kernels have run."""
    lines = [
        "",
        "| kernel | of | least bytes | distinct | sectors | asked of caches |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    yield lines
    print("\n".join(lines))


@pytest.mark.parametrize("group", marked_long(GROUPS, LATER))
def test_results_and_bytes(emulator: Emulator, group: str, table: list[str], monkeypatch: Any) -> None:
    launches: list[Launch] = []
    monkeypatch.setattr(emulator, "seen", launches.append)
    for c in cases(GROUPS[group]):
        launches.clear()
        c.launch()
        c.check()
        moved = [traffic(launch.memory) for launch in launches]
        distinct, sectors, asked = (
            sum(getattr(t, kind) for t in moved) / c.least for kind in ("distinct", "sectors", "asked")
        )
        table.append(f"| `{c.kernel}` | {c.format} | {c.least:,} | {distinct:.2f} | {sectors:.2f} | {asked:.2f} |")
        assert distinct <= MOST, (c.kernel, c.format, distinct)
        # Scales and offsets of a short row are two small pieces, each of which begins and ends within a sector.
        most = MOST + 0.05 * c.format.startswith(("q4_1", "q4z"))
        assert sectors <= most or c.least < 1000, (c.kernel, c.format, sectors)


@pytest.mark.parametrize("group", EDGES)
def test_results_at_the_edges(emulator: Emulator, group: str) -> None:
    for c in cases(EDGES[group]):
        c.launch()
        c.check()


@pytest.mark.parametrize("group", [f"q4 × {ODD}", f"f16 × {ODD}", "attention", "lists"])
def test_any_schedule_gives_the_same_bits(emulator: Emulator, group: str, long: bool, monkeypatch: Any) -> None:
    if group in (f"f16 × {ODD}", "lists") and not long:
        pytest.skip("only with --long")
    wanted: dict[str, np.ndarray] = {}
    for seed in range(8 if long else 2):
        monkeypatch.setattr(emulator, "schedule", Schedule(seed, [1 + seed % 3]))
        for c in cases(GROUPS[group]):
            c.launch()
            np.testing.assert_array_equal(c.found.numpy(), wanted.setdefault(c.kernel, c.found.numpy().copy()))


@pytest.mark.parametrize("fmt", ["q4", "q8", "f16"])
def test_tokens_get_the_same_bits_in_any_company(emulator: Emulator, fmt: str, long: bool, monkeypatch: Any) -> None:
    """One to eight tokens run the very same text, and get the bits of a token alone."""
    if fmt != "q4" and not long:
        pytest.skip("only with --long")
    most = 8 if long else 3
    texts: dict[str, str] = {}

    def seen(launch: Launch) -> None:
        assert texts.setdefault(launch.name, launch.text) == launch.text, launch.name

    monkeypatch.setattr(emulator, "seen", seen)
    cpu, rng, rows = torch.device("cpu"), np.random.default_rng(0), 200
    # Long enough lists for several tiles in a part of the sum.
    first, rest = Stored(cpu, fmt, normal(rng, rows, ODD)), Stored(cpu, fmt, normal(rng, 2 * rows, ODD))
    bias, x, added, factors = (torch.from_numpy(normal(rng, 8, n)) for n in (rows, ODD, rows, rows))
    neurons = ffn_neurons.Neurons(first.matrix, bias[0], rest.matrix, None, CODES["relu"])
    index, lengths = np.stack([rng.permutation(rows) for _ in range(8)]), rng.integers(50, rows, 8)

    def run(chosen: list[int]) -> list[torch.Tensor]:
        m = len(chosen)
        y, h, sums = added[chosen], torch.zeros(m, rows), torch.zeros(m, SMALL_SUMS.splits, ODD)
        listed, given = NeuronList.of(integers(cpu, index[chosen]), integers(cpu, lengths[chosen])), x[chosen]
        row_dot.linear(first.matrix, bias[0], given, y, SMALL_DOTS, add=True)
        counts = torch.zeros(m, rows, dtype=torch.int32)
        ffn_neurons.neuron_activations(neurons, given, listed, h, counts, SMALL_DOTS)
        gathered_sums(first.matrix, listed, factors[chosen], sums, SMALL_SUMS)
        return [y, h, sums]

    alone = [run([token]) for token in range(most)]
    for m in range(2, most + 1):
        for found, *wanted in zip(run(list(range(m))), *alone[:m], strict=True):
            assert torch.equal(found, torch.cat(wanted))


BARRIERS = [
    ("attention", "_attend", range(1, 10)),
    ("attention", "_attend_block", range(4)),
    ("attention", "_store_kv", range(1)),
    ("lists", "_compact", range(13)),
    ("residual", "_norm", range(3)),
    (f"f32 × {ODD}", "_dequantise", range(1, 8)),
    (f"f16 × {ODD}", "_linear", range(1, 6)),
    (f"q4 × {ODD}", "_neuron_activations", range(6)),
    (f"q4 × {ODD}", "_gathered_axpy_words", range(6)),
]
"""Barriers of the first kernel of a group, by their places in its text. A first one often stands before all use."""


def fault(emulator: Emulator, group: str, kernel: str, edit: Callable[[str], str]) -> None:
    """Run a case with a fault planted in the text of one kernel. Raises what finds it."""
    edited = []

    def planted(name: str, text: str) -> str:
        if name != kernel:
            return text
        edited.append(edit(text))
        assert edited[-1] != text, "nothing is planted"
        return edited[-1]

    with patch.object(emulator, "edit", planted):
        c = case(group, kernel)
        c.launch()
        assert edited
        c.check()


@pytest.mark.parametrize(("group", "kernel", "places"), BARRIERS, ids=[kernel for _, kernel, _ in BARRIERS])
def test_no_barrier_can_be_left_out(emulator: Emulator, group: str, kernel: str, places: range, long: bool) -> None:
    for n in places if long else places[-1:]:
        with pytest.raises((RaceError, UnwrittenError)):
            fault(emulator, group, kernel, lambda text, n=n: without(text, "bar.sync", n))


@pytest.mark.parametrize("n", range(4))
def test_no_barrier_of_a_warp_can_be_left_out(emulator: Emulator, n: int) -> None:
    with pytest.raises(RaceError):
        fault(emulator, f"q4 × {ODD}", "_linear", lambda text: without(text, "bar.warp.sync", n))


@pytest.mark.parametrize(("opcode", "n"), [("cp.async.wait_group", 0), ("cp.async.commit_group", 1)])
def test_copies_are_waited_for(emulator: Emulator, opcode: str, n: int) -> None:
    with pytest.raises(PendingError):
        fault(emulator, "attention", "_attend_block", lambda text: without(text, opcode, n))


WRONG: dict[str, tuple[str, str, Callable[[str], str]]] = {
    "a mask that lets one more pass": ("residual", "_norm", lambda t: t.replace("setp.lt.s32", "setp.le.s32")),
    "a mask of rows": (f"f32 × {ODD}", "_linear", lambda t: t.replace("setp.lt.s32", "setp.le.s32")),
    "a lane's part left out": (f"f16 × {ODD}", "_linear", lambda t: changed(t, "shfl.sync.bfly", " 16,", " 0,")),
    "a prefix of another lane": ("lists", "_compact", lambda t: changed(t, "shfl.sync.up", " 1,", " 2,")),
    "a scale of another format": (f"q8 × {ODD}", "_linear", lambda t: changed(t, "cvt.f32.f16", "f16", "bf16")),
    "rows of another stride": ("residual", "_merge", lambda t: changed(t, "mul.wide.s32", ", 4", ", 8")),
    "a place in shared memory of others": ("residual", "_norm", lambda t: changed(t, "st.shared", "]", "+4]")),
    "a factor left out": ("experts", "_apply_route_weights", lambda t: changed(t, "mul.f32", "mul", "add")),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_instruction_is_found(emulator: Emulator, name: str) -> None:
    with pytest.raises((PtxError, AssertionError)) as found:
        fault(emulator, *WRONG[name])
    assert "planted" not in str(found.value)
