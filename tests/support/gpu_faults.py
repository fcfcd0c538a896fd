"""Plants the faults of `tests/mutations/gpu_faults.toml`, one at a time, and runs their kernels' tests on the emulator.

python tests/support/gpu_faults.py [--seconds 300] [--jobs N] [--only WORDS …] [--json FILE]

Each is tried in a copy of the tree. The tests of a kernel must pass without a fault first. Prints what came of each.
Faults that say why they change nothing (`equivalent`) are not run; the exit code is 1 where another one is missed.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from support.mutations import Copies, run_tests
from support.paths import ROOT
from support.ptx.texts import instead_of

FILE = ROOT / "tests/mutations/gpu_faults.toml"
SOURCES = Path("pi_runtime/cuda")
PLANTED, WITNESS = "PI_TEST_FAULT", "PI_TEST_FAULT_WITNESS"
"""Environment of the tests: the fault's name, and the file that says that it was planted in a compiled text."""
TESTS = "tests/runtime/cuda"
ON_EMULATOR = "results_and_bytes or results_at_the_edges or any_schedule or any_company"
"""Tests of `test_compiled_kernels.py` that plant nothing themselves."""
DRAWN = {
    "_linear": "test_products",
    "_dequantise": "test_stored_rows_as_numbers",
    "_dequantise_words": "test_stored_rows_as_numbers",
    "_compact": "test_lists_are_compacted_in_order",
    "_neuron_activations": "test_neurons",
    "_gathered_axpy": "test_neurons",
    "_gathered_axpy_words": "test_neurons",
    "_predict": "test_prediction",
    "_norm": "test_norms",
    "_merge": "test_merging",
    "_store_kv": "test_attention",
    "_attend": "test_attention_of_a_token",
    "_combine": "test_attention_of_a_token",
    "_attend_block": "test_attention_of_a_block",
    "_route": "test_route",
    "_list_expert_neurons": "test_expert_neurons",
    "_apply_route_weights": "test_expert_neurons",
}
"""Each kernel's tests in `test_kernels.py` and `test_moe_kernels.py`."""
CAUGHT, MISSED, LATE, NOT_PLANTED = "caught", "MISSED", "MISSED in time", "NOT PLANTED"


@dataclass(frozen=True)
class Fault:
    """One fault: of a source, or of a kernel's compiled text. The fields are those of the file."""

    name: str
    kind: str
    kernel: str
    file: str = ""
    old: str = ""
    new: str = ""
    instruction: str = ""
    place: int = 0
    instead: str = ""
    equivalent: str = ""
    """Why nobody can notice it; empty where somebody must."""
    at_first: str = CAUGHT
    """What came of it when it was first planted, before any test was added for it."""

    def applied(self, source: str) -> str:
        assert source.count(self.old) == 1, f"{self.file} has this {source.count(self.old)} times: {self.old}"
        return source.replace(self.old, self.new)


def faults(file: Path = FILE) -> list[Fault]:
    return [Fault(**entry) for entry in tomllib.loads(file.read_text())["fault"]]


@cache
def _planted() -> Fault | None:
    name = os.environ.get(PLANTED)
    return next((f for f in faults() if f.name == name and f.instruction), None)


def plant(kernel: str, text: str) -> str:
    """A kernel's compiled text with the fault that the environment names, where it is this kernel's."""
    fault = _planted()
    if fault is None or fault.kernel != kernel:
        return text
    found = instead_of(text, fault.instruction, fault.instead, fault.place)
    if found != text:
        Path(os.environ[WITNESS]).touch()
    return found


def _tests(kernel: str) -> list[list[str]]:
    """Arguments of pytest, run after run."""
    if kernel not in DRAWN:
        return [[f"{TESTS}/test_order_of_work.py"]]
    drawn = [f"{TESTS}/test_kernels.py", f"{TESTS}/test_moe_kernels.py"]
    return [[f"{TESTS}/test_compiled_kernels.py", "-k", ON_EMULATOR], [*drawn, "-k", DRAWN[kernel]]]


class Trial:
    """Copies of the tree, and kernels that were compiled in an earlier run."""

    def __init__(self, folder: Path, jobs: int, seconds: float) -> None:
        self._copies, self._folder, self._seconds = Copies(ROOT, folder / "copies", jobs), folder, seconds

    def of(self, kernel: str, fault: Fault | None = None) -> tuple[str, float]:
        """What came of a fault, or of the tests without one; and the seconds that it took."""
        start, witness = time.monotonic(), self._folder / (f"{fault.name}.planted" if fault else "none")
        env = {
            "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PI_TEST_KERNEL": kernel,
            "PI_TEST_COMPILED": str(self._folder / "compiled"), WITNESS: str(witness),
            PLANTED: fault.name if fault else "",
        }  # fmt: skip
        with self._copies.one() as copy:
            path = copy / SOURCES / fault.file if fault and fault.file else None
            before = path.read_text() if path else ""
            try:
                if path and fault:
                    path.write_text(fault.applied(before))
                found = MISSED
                for tests in _tests(kernel):
                    left = start + self._seconds - time.monotonic()
                    code = run_tests(tests, copy, left, env)
                    if code not in (0, 5):
                        found = LATE if code is None else CAUGHT
                        break
            finally:
                if path:
                    path.write_text(before)
        if fault and fault.instruction and not witness.exists():
            found = NOT_PLANTED
        return found, time.monotonic() - start


def _chosen(words: Sequence[str]) -> list[Fault]:
    return [f for f in faults() if not words or any(w in f"{f.kernel} {f.name}" for w in words)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="of a kernel's tests for each fault")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--only", nargs="+", default=[], help="words of the faults' kernels or names")
    parser.add_argument("--all", action="store_true", help="those that change nothing too")
    parser.add_argument("--json", type=Path, help="write what came of each here too")
    a = parser.parse_args()
    chosen, found = [f for f in _chosen(a.only) if a.all or not f.equivalent], dict[str, str]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(a.jobs) as pool:
        trial = Trial(Path(folder), a.jobs, a.seconds)

        def sound(kernel: str) -> bool:
            outcome, seconds = trial.of(kernel)
            print(f"{seconds:5.0f} s  without a fault {'pass' if outcome == MISSED else 'FAIL'}: {kernel}", flush=True)
            return outcome == MISSED

        def one(fault: Fault) -> None:
            found[fault.name], seconds = trial.of(fault.kernel, fault)
            print(f"{seconds:5.0f} s  {found[fault.name]}: {fault.kernel}: {fault.name} ({fault.kind})", flush=True)

        if not all(pool.map(sound, sorted({f.kernel for f in chosen}))):
            sys.exit("Tests fail without a fault: nothing was planted")
        list(pool.map(one, chosen))
    if a.json:
        a.json.write_text(json.dumps([{**asdict(f), "outcome": found[f.name]} for f in chosen], indent=1))
    for kind in sorted({f.kind for f in chosen}):
        own = Counter(found[f.name] for f in chosen if f.kind == kind)
        print(f"{kind}: {own[CAUGHT]} of {own.total()}")
    caught = sum(outcome == CAUGHT for outcome in found.values())
    print(f"{caught} of {len(chosen)} faults were caught; at first {sum(f.at_first == CAUGHT for f in chosen)}")
    sys.exit(caught < len(chosen))


if __name__ == "__main__":
    main()
