"""The emulator of PTX does what instructions say, and finds what no kernel may do; the short form of its session."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.paths import ROOT
from support.ptx.arithmetic import OPERATIONS
from support.ptx.faults import (
    BarrierError,
    OutsideError,
    PendingError,
    RaceError,
    UnknownInstructionError,
    UnwrittenError,
)
from support.ptx.machine import Schedule
from support.ptx.texts import run_text, small, without

OWN = """
	ld.param.b64 	%rd1, [small_param_0];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd2, %r1, 4;
	add.s64 	%rd3, %rd1, %rd2;
	shl.b32 	%r2, %r1, 2;
	mov.b32 	%r3, global_smem;
	add.s32 	%r4, %r3, %r2;
	xor.b32 	%r5, %r4, 128;
"""
"""%rd3: the thread's number in the tensor. %r4: its place in shared memory; %r5: that of its twin in the other warp."""
MMA = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r6}, {%r1}, {%r1}, {%r6};\nret;"
EXCHANGE = OWN + "st.shared.b32 [%r4], %r1;\nbar.sync 0;\nld.shared.b32 %r6, [%r5];\nst.global.b32 [%rd3], %r6;\nret;"
COPIED = (
    OWN
    + """
	shl.b32 	%r7, %r1, 4;
	add.s32 	%r8, %r3, %r7;
	mul.wide.u32 	%rd4, %r1, 16;
	add.s64 	%rd5, %rd1, %rd4;
	mov.b32 	%r9, 16;
	cp.async.cg.shared.global [%r8+0], [%rd5+0], 0x10, %r9;
	cp.async.commit_group;
	cp.async.wait_group 0;
	bar.sync 	0;
	ld.shared.b32 	%r6, [%r5];
	bar.sync 	0;
	st.global.b32 	[%rd3], %r6;
	ret;
"""
)


def numbers(count: int = 64) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def computed(opcode: str, *values: np.ndarray) -> np.ndarray:
    operation = OPERATIONS[opcode]
    with np.errstate(all="ignore"):
        return np.asarray(operation.compute(*values))


@pytest.mark.parametrize(
    ("opcode", "values", "wanted"),
    [
        ("shl.b32", [np.uint32([1, 1, 3]), np.uint32([4, 32, 31])], np.uint32([16, 0, 1 << 31])),
        ("shr.s32", [np.int32([-8, -8]), np.uint32([1, 99])], np.int32([-4, -1])),
        ("shr.u32", [np.uint32([8, 8]), np.uint32([1, 99])], np.uint32([4, 0])),
        ("div.s32", [np.int32([-7, 7, 7]), np.int32([2, -2, 0])], np.int32([-3, -3, -1])),
        ("rem.s32", [np.int32([-7, 7]), np.int32([2, -2])], np.int32([-1, 1])),
        ("bfe.s32", [np.int32([0x70, 0x70]), np.uint32([4, 4]), np.uint32([3, 4])], np.int32([-1, 7])),
        ("bfe.u32", [np.uint32([0x70, 7]), np.uint32([4, 0]), np.uint32([2, 0])], np.uint32([3, 0])),
        ("prmt.b32", [np.uint32([0x44332281]), np.uint32([0]), np.uint32([0x7778])], np.uint32([0xFF])),
        ("mul.hi.s64", [np.int64([-1, 1 << 62]), np.int64([1, 8])], np.int64([-1, 2])),
        ("mul.wide.s16", [np.int16([-3]), np.int16([20000])], np.int32([-60000])),
        ("popc.b64", [np.uint64([0b1011 << 40])], np.uint32([3])),
        ("max.f32", [np.float32([np.nan, 1]), np.float32([2, 3])], np.float32([2, 3])),
        ("setp.neu.f32", [np.float32([np.nan, 1]), np.float32([np.nan, 1])], np.array([True, False])),
        ("setp.gtu.f32", [np.float32([np.nan, 1]), np.float32([0, 1])], np.array([True, False])),
        ("fma.rn.f32", [np.float32([1 + 2**-12])] * 2 + [np.float32([-1])], np.float32([2**-11 + 2**-24])),
        ("mul.ftz.f32", [np.float32([1e-30]), np.float32([1e-10])], np.float32([0])),
        ("cvt.rzi.s32.f32", [np.float32([-1.9, np.nan, 3e9])], np.int32([-1, 0, 2**31 - 1])),
        ("cvt.rn.bf16.f32", [np.float32([1 + 2**-8, 1 + 3 * 2**-8])], np.uint16([0x3F80, 0x3F82])),
        ("cvt.f32.bf16", [np.uint16([0xC040])], np.float32([-3])),
        ("cvt.rn.f16x2.f32", [np.float32([2]), np.float32([1])], np.uint32([0x40003C00])),
        ("cvt.s32.s8", [np.int8([-5])], np.int32([-5])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_instructions_that_compute(opcode: str, values: list[np.ndarray], wanted: np.ndarray) -> None:
    found = computed(opcode, *values)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("instruction", "wanted"),
    [
        ("shfl.sync.bfly.b32 %r6, %r1, 1, 31, -1;", lambda n: n ^ 1),
        ("shfl.sync.up.b32 %r6, %r1, 2, 0, -1;", lambda n: n - 2 if n % 32 >= 2 else n),
        ("shfl.sync.down.b32 %r6, %r1, 2, 31, -1;", lambda n: n + 2 if n % 32 < 30 else n),
        ("shfl.sync.idx.b32 %r6, %r1, 5, 31, -1;", lambda n: n // 32 * 32 + 5),
        ("mov.b32 %r7, -1;\nredux.sync.add.s32 %r6, %r1, %r7;", lambda n: 496 + n // 32 * 1024),
        ("cvt.s8.s32 %rs1, %r1;\ncvt.s32.s8 %r6, %rs1;", lambda n: n),
        ("mov.b32 {%rs1, _}, %r1;\nmov.b32 %r6, {%rs1, %rs1};", lambda n: n * 65537),
        ("setp.lt.s32 %p1, %r1, 9;\nselp.b32 %r6, 4, %r1, %p1;", lambda n: max(n, 4) if n >= 9 else 4),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_instructions_of_warps_and_registers(instruction: str, wanted: object) -> None:
    found = numbers()
    run_text(small(OWN + instruction + "\nst.global.b32 [%rd3], %r6;\nret;"), found)
    assert callable(wanted)
    assert found.tolist() == [wanted(n) for n in range(64)]


def test_rows_of_matrices() -> None:
    """Lanes 0 to 7 name the rows of the first matrix of 8 × 8, and so on; each lane gets two neighbours."""
    store = "cvt.u16.u32 %rs1, %r1;\nst.shared.v4.b32 [%r8], {%r1, %r1, %r1, %r1};\nbar.sync 0;\n"
    load = "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r6, %r9}, [%r8];\nst.global.b32 [%rd3], %r9;\nret;"
    found = numbers()
    run_text(small(OWN + "shl.b32 %r7, %r1, 4;\nadd.s32 %r8, %r3, %r7;\n" + store + load), found)
    assert found.tolist() == [n // 32 * 32 + 8 + n % 32 // 4 for n in range(64)]


def test_loops_end_thread_by_thread() -> None:
    loop = "mov.b32 %r6, 0;\n$L__1:\nadd.s32 %r6, %r6, 2;\nsetp.lt.s32 %p1, %r6, %r1;\n@%p1 bra $L__1;\n"
    found = numbers()
    run_text(small(OWN + loop + "bar.sync 0;\nst.global.b32 [%rd3], %r6;\nret;"), found)
    assert found.tolist() == [max(2, n + n % 2) for n in range(64)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_any_schedule_gives_the_same(seed: int, groups: int) -> None:
    for text in (EXCHANGE, COPIED):
        found = torch.arange(256, dtype=torch.int32)
        run_text(small(text), found, shared=1024, schedule=Schedule(seed, [groups]))
        assert found[:64].tolist() == [n ^ 32 for n in range(64)]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RaceError, without(small(EXCHANGE), "bar.sync")),
        (RaceError, small(OWN + "st.shared.b32 [%r4], %r1;\nst.shared.b32 [%r5], %r1;\nret;")),
        (RaceError, small(OWN + "st.shared.b32 [%r3], %r1;\nret;")),
        (RaceError, small(OWN + "st.shared.b32 [%r4], %r1;\nld.shared.b32 %r6, [global_smem];\nret;")),
        (RaceError, small(OWN + "st.global.b32 [%rd1], %r1;\nret;")),
        (RaceError, small(OWN + "ld.global.b32 %r6, [%rd1];\nst.global.b32 [%rd3], %r6;\nret;")),
        (PendingError, without(small(COPIED), "cp.async.wait_group")),
        (PendingError, without(small(COPIED), "cp.async.commit_group")),
        (RaceError, without(small(COPIED), "bar.sync", 0)),
        (UnwrittenError, small(OWN + "ld.shared.b32 %r6, [%r4];\nret;")),
        (UnwrittenError, small(OWN + "st.global.b32 [%rd3], %r6;\nret;")),
        (OutsideError, small(OWN + "st.global.b32 [%rd3+2048], %r1;\nret;")),
        (OutsideError, small(OWN + "ld.global.b32 %r6, [%rd3+-4];\nret;")),
        (OutsideError, small(OWN + "ld.global.v2.b32 {%r6, %r7}, [%rd3];\nret;")),
        (OutsideError, small(OWN + "ld.global.b32 %r6, [%rd2];\nret;")),
        (OutsideError, small(OWN + "st.shared.b32 [%r4+960], %r1;\nret;")),
        (BarrierError, small(OWN + "setp.lt.s32 %p1, %r1, 32;\n@%p1 bra $L__1;\nbar.sync 0;\n$L__1:\nret;")),
        (BarrierError, small(OWN + "setp.lt.s32 %p1, %r1, 5;\n@%p1 shfl.sync.bfly.b32 %r6, %r1, 1, 31, -1;\nret;")),
        (UnknownInstructionError, small(OWN + "red.global.add.f32 [%rd3], %r1;\nret;")),
        (UnknownInstructionError, small(OWN + "atom.global.add.f32 %r6, [%rd3], %r1;\nret;")),
        (UnknownInstructionError, small(OWN + MMA)),
        (UnknownInstructionError, small(OWN + "shfl.sync.bfly.b32 %r6, %r1, 1, 31, 255;\nret;")),
        (UnknownInstructionError, small(OWN + "mov.u32 %r6, %nctaid.x;\nret;")),
    ],
)  # fmt: skip
def test_what_no_kernel_may_do(error: type[Exception], text: str) -> None:
    tensor = torch.arange(256, dtype=torch.int32)
    with pytest.raises(error) as found:
        run_text(text, tensor)
    if error is UnknownInstructionError:  # it is named
        assert any(name in str(found.value) for name in ("red.global", "atom.global", "mma.sync", "shfl", "%nctaid"))


def test_programs_do_not_share_a_place() -> None:
    with pytest.raises(RaceError):
        run_text(small(OWN + "st.global.b32 [%rd3], %r1;\nret;"), numbers(), programs=2)


def test_lanes_of_a_warp_need_a_barrier_too() -> None:
    """Lanes go on by themselves; only `bar.warp.sync` orders what they do in memory."""
    exchange = OWN + "xor.b32 %r5, %r4, 4;\nst.shared.b32 [%r4], %r1;\nbar.warp.sync -1;\nld.shared.b32 %r6, [%r5];\n"
    text, found = small(exchange + "st.global.b32 [%rd3], %r6;\nret;"), numbers()
    run_text(text, found)
    assert found.tolist() == [n ^ 1 for n in range(64)]
    with pytest.raises(RaceError):
        run_text(without(text, "bar.warp.sync"), found)


def test_memory_that_was_only_allocated_is_not_read() -> None:
    tensor = torch.full((64,), -1515870811, dtype=torch.int32)  # 0xA5A5A5A5
    with pytest.raises(UnwrittenError):
        run_text(small(OWN + "ld.global.b32 %r6, [%rd3];\nret;"), tensor)


@pytest.mark.slow
def test_compiled_kernels(tmp_path: Path) -> None:
    """In a process of its own: this one may have the interpreter's kernels."""
    tests = Path(__file__).with_name("test_compiled_kernels.py")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--basetemp", str(tmp_path)]
    env = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": ""}
    done = subprocess.run([*command, str(tests)], capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
