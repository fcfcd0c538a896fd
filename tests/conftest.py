"""Fixtures every test may use."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from pi_runtime.engine import loading
from pi_runtime.execution.devices import gpu_driver

if not gpu_driver():
    # Triton reads it when it is imported, and whoever imports it first decides.
    os.environ.setdefault("TRITON_INTERPRET", "1")

BESIDE_OTHERS = "PYTEST_XDIST_WORKER" in os.environ
if BESIDE_OTHERS:
    # Other processes test on the other cores. torch reads it when it is imported; numba keeps its threads, for tests
    # that name a number. Where none is named it is one: threads that wait for each other double a test's time.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PI_THREADS", "1")

# A build takes as many workers as there is room for; here each would import torch for a second's work.
os.environ.setdefault("PI_WORKERS", "1")

# The same examples every time: new ones are for the sessions that fuzz, not for those that merge. How long one takes
# depends on what else runs on the machine.
hypothesis.settings.register_profile("short", derandomize=True, deadline=None, max_examples=30)
hypothesis.settings.register_profile("long", derandomize=True, deadline=None)

# A shell's background jobs ignore it, and their children with them: then no test could interrupt a command.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="proofs that have a short form take their long one")
    parser.addoption("--minutes", type=float, help="time for a test that has a short form in the suite: soak, fuzz")
    parser.addoption("--seed", type=int, help="the seed of the fuzzers' cases; their long form draws and prints one")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("long" if config.getoption("--long") else "short")


MORE = (
    # Other instruction sets, Triton's interpreter, and the emulator of a GPU's instructions
    "runtime/cuda",
    "runtime/kernels/codegen/test_isa.py",
    "runtime/kernels/ops/test_tile_products.py",
    # A browser, and a server under load for long
    "runtime/server/test_page.py",
    "runtime/server/test_page_served.py",
    "runtime/server/test_soak.py",
    # Faults that are drawn or planted; kills and signals
    "fuzz",
    "mutations",
    "compile/pipeline/test_many_workers.py",
    "compile/pipeline/test_pipeline.py::test_a_build_killed",
    "compile/pipeline/test_launching.py::test_local_workers_take",
    "compile/calibration/test_stage.py::test_the_same_bytes_again_from_a_file_and_after_a_kill",
    "compile/sparsification/test_resume.py",
    "compile/training/test_layer_search.py::test_a_killed_search",
    "compile/training/test_stage.py::test_a_kill_in",
    "compile/workers/test_ray.py",
    "runtime/commands/test_model_cache.py::test_a_signal",
    "runtime/disk/test_faults.py",
    "runtime/execution/test_kv_cache.py::test_ctrl_c",
    "runtime/server/test_ending.py",
    "runtime/server/test_replicas.py",
    # Pages and benchmarks that are run; the package as it is installed
    "benchmarks",
    "docs/test_blocks.py",
    "recipes/test_gain.py",
    "recipes/test_installed.py",
    "recipes/test_sparse_model.py",
    "compile/planning/test_baselines.py::test_published",
    # Larger models, all families, and slow variants of what has a quick one
    "compile/calibration/test_profile_memory.py",
    "compile/calibration/test_sensitivity.py::test_the_",
    "compile/calibration/test_stage.py::test_the_order_of_tasks",
    "compile/checkpoint/families/test_logits.py::test_greedy_text",
    "compile/checkpoint/families/test_mistakes.py::test_no_long_work",
    "compile/checkpoint/gguf/test_block_types.py::test_a_packed_file_runs",
    "compile/checkpoint/gguf/test_block_types.py::test_the_loss_is_stated",
    "compile/checkpoint/gguf/test_names.py::test_an_artifact_is_compared",
    "compile/corpus/test_sources.py::test_of_much_text",
    "compile/corpus/test_sources.py::test_of_pythons_documentation",
    "compile/evaluation/test_scoring.py::test_real_questions",
    "compile/evaluation/test_scoring.py::test_scores_are_those_of_transformers[opt]",
    "compile/machine/test_measurement.py::test_a_disk_is_measured",
    "compile/packing/test_logits.py::test_threads",
    "compile/packing/test_packing.py::test_memory_does_not_grow",
    "compile/pipeline/test_division.py::test_a_b",
    "compile/pipeline/test_lock_file.py::test_recomputed",
    "compile/pipeline/test_only_dense.py::test_a_rung",
    "compile/pipeline/test_only_dense.py::test_weights",
    "compile/pipeline/test_rounding_check.py::test_a_rescale",
    "compile/placement/solvers/test_constrained_path.py::test_equal_layers",
    "compile/placement/solvers/test_constrained_path.py::test_neither",
    "compile/placement/test_three_tiers.py::test_equals_brute_force_on_a_grid",
    "compile/sparsification/test_training.py::test_steering",
    "compile/torch_model/test_predictor.py::test_training_lowers",
    "runtime/engine/test_prompt_writer.py::test_published_templates",
    "runtime/kernels/codegen/test_threads.py",
    "runtime/kernels/test_ffn_company.py::test_a_list_of_neurons",
    "runtime/test_imports.py::test_importing_leaves",
    "runtime/text/test_chat_template_limits.py::test_the_confined",
    "runtime/text/test_quotation.py::test_published_templates",
)
"""How tests of the second tier, `nox -s tests_more`, begin; single cases of a table are marked `more` where they stand.

Each room keeps a quick test of its own in the first tier."""


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no process is left with one at the end. The long form's may be left."""
    here = Path(__file__).parent
    for item in items:
        if (item.path.relative_to(here).as_posix() + item.nodeid[item.nodeid.find("::") :]).startswith(MORE):
            item.add_marker(pytest.mark.more)
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="--long"))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_sessionstart() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """What is imported and collected stays: Python need not walk through it each time it looks for garbage."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def long(pytestconfig: pytest.Config) -> bool:
    """Whether proofs that have a short form are to take their long one."""
    return bool(pytestconfig.getoption("--long"))


@pytest.fixture(scope="session")
def minutes(pytestconfig: pytest.Config) -> float | None:
    """How long a test that has a short form is to go on; None: its short form."""
    found: float | None = pytestconfig.getoption("--minutes")
    return found


SHARED = Path(os.environ.get("PI_TEST_DATA", Path(__file__).parents[2] / "shared"))


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks() -> Iterator[None]:
    """Tests write thousands of artifacts, and none has to survive a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread_each() -> Iterator[None]:
    """Beside other processes a model runs on one thread, unless a test says how many; results are the same."""
    with pytest.MonkeyPatch.context() as patch:
        if BESIDE_OTHERS:
            threads = loading._threads
            patch.setattr(loading, "_threads", lambda wanted: threads(1 if wanted is None else wanted))
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of real models and texts kept beside the repository; the test is skipped where it is not there."""
    if not (SHARED / "models").is_dir():
        pytest.skip("no real models beside the repository (PI_TEST_DATA)")
    return SHARED


@pytest.fixture(scope="session")
def demo() -> Path:
    """The bundled demo checkpoint."""
    return Path(__file__).parents[1] / "recipes" / "demo"
