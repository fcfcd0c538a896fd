"""The faults for GPU kernels can all be planted, and each has tests that are to find it."""

import pytest

pytest.importorskip("triton.backends.nvidia", reason="the emulator takes what Triton compiles")

from support.gpu_faults import DRAWN, SOURCES, Fault, faults
from support.paths import ROOT
from support.ptx.texts import instead_of


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_faults_can_be_planted(fault: Fault) -> None:
    assert fault.kernel in DRAWN or fault.kernel == "order of work"
    assert bool(fault.file) != bool(fault.instruction)
    if fault.file:
        source = (ROOT / SOURCES / fault.file).read_text(encoding="utf-8")
        compile(fault.applied(source), fault.file, "exec")


def test_instructions_are_changed_in_their_place() -> None:
    text = "\tbar.sync \t0;\n\tshfl.sync.bfly.b32 \t%r1, %r2, 16, 31, -1;\n\tbar.sync \t1;\n"
    assert instead_of(text, "bar.sync", "", 1) == text.replace("bar.sync \t1;", "")
    assert "mov.b32 %r1, %r2;" in instead_of(text, "shfl.sync.bfly.b32", "mov.b32 {0}, {1};")
    assert instead_of(text, "bar.sync", "", 2) == text
