"""The diagnosis names what is there, what is missing, and what to do about it."""

import errno
import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.paths import ROOT

from pi_compile.machine import doctor
from pi_runtime.errors.exit_codes import EXTRA_OF
from pi_runtime.kernels.codegen import isa, threads

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def required(requirements: list[str]) -> set[str]:
    """Import names of the packages, those of other extras left out."""
    names = {re.split(r"[\[><=; ]", text)[0] for text in requirements}
    return {name.replace("-", "_") for name in names - {"pi-toolchain"}}


def found(topic: str) -> doctor.Finding:
    return {finding.topic: finding for finding in doctor.diagnose()}[topic]


def without(*names: str) -> Callable[..., Any]:
    """In place of `find_spec`: all packages are installed but these."""
    return lambda name: None if name in names else importlib.util.find_spec("sys")


def test_the_packages_are_those_of_the_project() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {name: set(packages) for name, packages in doctor.EXTRAS.items()} == {
        "runtime": required(PROJECT["dependencies"]),
        **{
            name: required(extras[name])
            for name in ("place", "report", "pack", "compile", "cuda", "grammar", "serve", "ray")
        },
    }
    assert set(EXTRA_OF) == {package for extra in extras.values() for package in required(extra)}
    within = required(extras["place"]) | required(extras["pack"])  # compile has these too
    assert all(package in required(extras[extra]) | within for package, extra in EXTRA_OF.items())


def test_every_topic_has_a_finding() -> None:
    findings = doctor.diagnose()
    topics = "python cores memory processor threading_layer kernels gpu bundled_data runtime"
    extras = [f"extra {name}" for name in ("place", "report", "pack", "compile", "cuda", "grammar", "serve", "ray")]
    assert [finding.topic.replace(" ", "_") for finding in findings[:9]] == topics.split()
    assert [finding.topic for finding in findings[9:]] == extras
    assert all(finding.found for finding in findings)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "find_spec", without("torch", "zarr", "highspy", "gguf", "llguidance", "starlette", "ray")
    )
    finding = found("extra compile")
    assert finding.found == "missing torch, zarr"
    assert finding.remedy == f"{sys.executable} -m pip install '.[compile]', in your clone of pi-toolchain"
    assert found("extra place").found == "missing highspy"


def test_what_is_installed_is_named_with_its_version() -> None:
    finding = found("runtime")
    assert f"numba {importlib.metadata.version('numba')}" in finding.found
    assert finding.remedy == ""


def test_without_torch_no_gpu_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", without("torch", "gguf", "llguidance", "starlette", "ray"))
    finding = found("gpu")
    assert "torch is not installed" in finding.found
    assert "'.[cuda]'" in finding.remedy


def test_a_gpu_that_torch_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor, "gpu_driver", lambda: True)
    assert found("gpu").remedy == "a torch built for CUDA in its place"


def test_a_gpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    card = SimpleNamespace(name="Card", total_memory=1 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _n: card)
    monkeypatch.delenv("CC", raising=False)
    for path, advised in (("/usr/bin/gcc", False), (None, True)):
        monkeypatch.setattr(doctor.shutil, "which", lambda _name, path=path: path)
        assert found("gpu").found == "cuda:0 Card, 1.0 GiB"
        assert ("C compiler" in found("gpu").remedy) == advised


@pytest.mark.parametrize(("layer", "advised"), [("omp", False), ("tbb", False), ("workqueue", True)])
def test_a_slow_threading_layer_has_a_remedy(monkeypatch: pytest.MonkeyPatch, layer: str, advised: bool) -> None:
    monkeypatch.setattr(threads, "threading_layer", lambda: layer)
    finding = found("threading layer")
    assert finding.found == layer
    assert ("libgomp" in finding.remedy) == advised


def test_tiles_that_are_refused_are_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = pytest.importorskip("llvmlite.binding")
    features = type(binding.get_host_cpu_features())
    there = features({"amx-tile": True, "amx-int8": True})
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: there)
    monkeypatch.setattr(doctor, "_gpu", lambda: doctor.Finding("gpu", "none"))
    for number, told in (
        (0, ""),
        (errno.EINVAL, "; AMX is not used: the system refuses them (EINVAL): this system is"),
    ):
        monkeypatch.setattr(isa, "ask", lambda number=number: number)
        assert found("processor").found.partition("amx-int8")[2].startswith(told)
        assert ("AMX is not used" in found("processor").found) == bool(told)
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: features({"avx2": True}))
    for name, told in (("sapphirerapids", True), ("znver4", False)):
        monkeypatch.setattr(binding, "get_host_cpu_name", lambda name=name: name)
        assert ("virtual machine does not show them" in found("processor").found) == told
