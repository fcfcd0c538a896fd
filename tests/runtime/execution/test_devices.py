"""A device is there, or asking for it is an error that says why."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pi_runtime.errors import DeviceError, MissingExtraError, UsageError
from pi_runtime.execution import devices
from pi_runtime.execution.devices import available_memory, gpu_kernels_are_cold, processor_name, resolve_device


def pretend(monkeypatch: pytest.MonkeyPatch, gpus: int | None) -> None:
    """A machine with so many GPUs, None for one without torch."""
    torch = SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: gpus), __version__="9.8+cpu")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None if gpus is None else object())


@pytest.mark.parametrize("name", ["cpu", "stand-in"])
@pytest.mark.parametrize("gpus", [None, 0, 2])
def test_the_processor_is_always_there(monkeypatch: pytest.MonkeyPatch, name: str, gpus: int | None) -> None:
    pretend(monkeypatch, gpus)
    assert resolve_device(name) == name


@pytest.mark.parametrize("name", ["", "gpu", "CPU", "cuda:x", "cuda:-1", "cuda:²", "cuda:0:1", "cpu:0", " cpu"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_device(name)
    assert type(caught.value) is UsageError


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:3"])
def test_without_torch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pretend(monkeypatch, None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[cuda\]'"):
        resolve_device(name)


@pytest.mark.parametrize(("name", "gpus"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_no_such_gpu(monkeypatch: pytest.MonkeyPatch, name: str, gpus: int) -> None:
    pretend(monkeypatch, gpus)
    with pytest.raises(DeviceError, match="no such GPU") as caught:
        resolve_device(name)
    assert f"{gpus} CUDA devices, by torch 9.8+cpu" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("name", "device"), [("cuda", "cuda:0"), ("cuda:0", "cuda:0"), ("cuda:1", "cuda:1")])
def test_a_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch, name: str, device: str) -> None:
    pretend(monkeypatch, 2)
    assert resolve_device(name) == device


@pytest.mark.parametrize(("driver", "gpus", "device"), [(True, 1, "cuda:0"), (True, None, "cpu"), (False, 1, "cpu")])
def test_automatic(monkeypatch: pytest.MonkeyPatch, driver: bool, gpus: int | None, device: str) -> None:
    pretend(monkeypatch, gpus)
    monkeypatch.setattr(devices, "gpu_driver", lambda: driver)
    assert resolve_device("auto") == device


def test_kernels_are_cold_until_triton_has_compiled_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert gpu_kernels_are_cold()
    folder = tmp_path / ".triton" / "cache"
    folder.mkdir(parents=True)
    assert gpu_kernels_are_cold()
    (folder / "a").touch()
    assert not gpu_kernels_are_cold()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert gpu_kernels_are_cold()


def test_what_the_system_says_of_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  900 kB\nMemAvailable:     300 kB\n")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Quick 9000: the fast one\n")
    monkeypatch.setattr(devices, "Path", lambda _proc, file: tmp_path / file)
    assert (available_memory(), processor_name()) == (300 * 1024, "Quick 9000: the fast one")
    (tmp_path / "meminfo").unlink()
    (tmp_path / "cpuinfo").unlink()
    assert available_memory() is None
    assert processor_name()


def test_free_memory_is_what_cgroups_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available_memory", lambda: 10_000)
    assert devices.free_memory(tmp_path) == 10_000
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/one\n3:cpuset:/\n0::/two\n")
    for folder, limit, usage in (("memory/one", "memory.limit_in_bytes", "memory.usage_in_bytes"),):
        place = tmp_path / "sys/fs/cgroup" / folder
        place.mkdir(parents=True)
        (place / limit).write_text("9000\n")
        (place / usage).write_text("5000\n")
        (place / "memory.stat").write_text("inactive_file 300\nactive_file 200\nrss 4500\n")
    assert devices.free_memory(tmp_path) == 4500
    place = tmp_path / "sys/fs/cgroup/two"
    place.mkdir()
    (place / "memory.current").write_text("100\n")
    (place / "memory.max").write_text("max\n")
    assert devices.free_memory(tmp_path) == 4500
    (place / "memory.max").write_text("3100\n")
    (place / "memory.stat").write_text("inactive_file 0\n")
    assert devices.free_memory(tmp_path) == 3000
