"""The probes of a GPU, on a stand-in for torch whose every operation takes a known time."""

from math import prod
from types import SimpleNamespace
from typing import Any

import pytest

from pi_compile.machine import measurement
from pi_compile.machine.measurement import LAUNCHES, RESIDUAL, WIDTH, probe
from pi_runtime.errors import DoesNotFitError


class Card:
    """torch, as far as the probes use it: work is queued, and done when somebody waits for it."""

    UP, DOWN, INSIDE, LAUNCH, FLOPS = 20e9, 10e9, 500e9, 4e-6, 80e12
    __version__, float16 = "2.0", "float16"

    def __init__(self) -> None:
        self.now, self.queued = 100.0, 0.0
        self.pageable = 0
        self.cuda = SimpleNamespace(
            synchronize=self.wait,
            is_available=lambda: True,
            get_device_properties=lambda _index: SimpleNamespace(name="card", total_memory=24 << 30),
        )

    def wait(self) -> None:
        self.now, self.queued = self.now + self.queued, 0.0

    def ones(self, *shape: int, device: str = "cpu", dtype: str = "float32") -> "Tensor":
        return Tensor(self, prod(shape) * (2 if dtype == "float16" else 4), device)

    zeros = ones

    def mm(self, a: "Tensor", b: "Tensor", out: "Tensor") -> None:
        assert a.nbytes == b.nbytes == out.nbytes == 2 * WIDTH**2
        self.queued += 2 * WIDTH**3 / self.FLOPS

    def empty_like(self, other: "Tensor") -> "Tensor":
        return Tensor(self, other.nbytes, other.device)


class Tensor:
    def __init__(self, card: Card, nbytes: int, device: str, pinned: bool = False) -> None:
        self.card, self.nbytes, self.device, self.pinned = card, nbytes, device, pinned

    def pin_memory(self) -> "Tensor":
        return Tensor(self.card, self.nbytes, self.device, pinned=True)

    def add_(self, _value: int) -> None:
        self.card.queued += Card.LAUNCH

    def copy_(self, source: "Tensor", non_blocking: bool = False) -> None:
        ends = (source.device, self.device)
        rate = {("cpu", "cuda"): Card.UP, ("cuda", "cpu"): Card.DOWN, ("cuda", "cuda"): Card.INSIDE / 2}[ends]
        if ends != ("cuda", "cuda"):
            self.card.pageable += not (non_blocking and (source.pinned or self.pinned))
        self.card.queued += self.nbytes / rate


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: card.now)
    return card


def test_the_rates_are_those_of_the_card(card: Card) -> None:
    gpu, link, how = probe(card)
    assert (gpu.name, gpu.vram_gib, gpu.bandwidth_gb_per_s, gpu.launch_us) == ("card", 24.0, 500.0, 4.0)
    assert gpu.products_gflop_per_s == 80_000
    assert link.pcie_gb_per_s == 10.0  # the slower direction
    assert link.sync_us == pytest.approx(4 * RESIDUAL * (1 / Card.UP + 1 / Card.DOWN) * 1e6, abs=0.05)
    assert "from pinned memory 20.0 and to it 10.0 GB/s" in how
    assert str(LAUNCHES) in how
    assert card.pageable == 0, "the link was timed with memory that is not pinned"


def test_a_card_goes_into_the_profile(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", card)
    monkeypatch.setattr(measurement, "find_spec", lambda _name: True)
    gpu, link, how = measurement._gpu()
    assert gpu is not None
    assert link is not None
    assert how.startswith(" GPU: copies")
    missing: Any = SimpleNamespace(is_available=lambda: False)
    monkeypatch.setattr(card, "cuda", missing)
    assert measurement._gpu() == (None, None, "")


def test_a_card_that_others_use_has_no_room(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA out of memory. Tried to allocate 1024.00 MiB.\nSee documentation")

    monkeypatch.setitem(__import__("sys").modules, "torch", card)
    monkeypatch.setattr(measurement, "find_spec", lambda _name: True)
    monkeypatch.setattr(card, "ones", full)
    with pytest.raises(DoesNotFitError, match=r"found: CUDA out of memory.*MiB\.\n  try: free the GPU"):
        measurement._gpu()

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(card, "ones", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        measurement._gpu()
