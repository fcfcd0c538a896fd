"""Executors on a GPU, or on Triton's interpreter in its place, and models for them."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pi_runtime.artifact.gpu_buffers import gpu_prompt_block
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer, Manifest, Plan
from pi_runtime.cuda.executor import CudaExecutor
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.execution.executor import Executor
from pi_runtime.execution.host_executor import HostExecutor
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.plan_choice import allocation
from pi_runtime.execution.plan_layout import placed_arrays
from support.steps import step
from support.synthetic import random_artifact, small_decoder, stored_plan

CONTEXT = 48
ROOM = 1 << 40
NEVER = 10**6
"""More tokens than a prompt has: cold weights are not streamed."""
LAYERS, NEURONS = 3, 200
EXPERTS = {"n_experts": 3, "experts_per_token": 2}


PREDICTED = (Layer(rung="predicted", rank=7), Layer(rung="gate"), Layer(rung="predicted", rank=9))
"""Predictors that select about half of the neurons."""
OTHERS = (Layer(rung="predicted", rank=3), Layer(rung="threshold", threshold=0.1), Layer(rung="dense"))


def model(
    path: Path,
    family: str = "llama",
    fmt: str = "f32",
    layers: tuple[Layer, ...] = PREDICTED,
    plans: tuple[Plan, ...] = (),
    **shape: Any,
) -> Path:
    """A random model of three layers."""
    fields = {"n_layers": LAYERS, "d_ff": NEURONS, "d_model": 40, "n_heads": 5, "n_kv_heads": 1, **shape}
    ranks = [layer.rank for layer in layers]
    decoder = small_decoder(family, **fields)
    return random_artifact(path, decoder, format=fmt, ranks=ranks, scale=2.0, layers=layers, plans=plans)


def model_with_plan(path: Path, cuts: tuple[int, ...], **shape: Any) -> Path:
    """A model in q4, whose kernels are the longest; the middle layer's attention is on the CPU."""
    plans = (plan_of(["gpu", "cpu", "gpu"], cuts),)
    return model(path, fmt="q4", layers=(*PREDICTED[:2], OTHERS[0]), plans=plans, **shape)


def plan_of(sides: Sequence[str], cuts: tuple[int, ...], ends: str = "gpu-gpu") -> Plan:
    """A plan; `ends` are the sides of embedding and head."""
    embedding, head = ends.split("-")
    return stored_plan(cuts, 1, 1, attention=tuple(sides), embedding=embedding, head=head)


ALL_ON_GPU = plan_of(["gpu"] * LAYERS, (NEURONS,) * LAYERS)
SPLIT = plan_of(["gpu"] * LAYERS, (128, 64, 70))


@contextmanager
def running(path: Path, plan: Plan, gpu: Device, mode: str = "auto", **more: Any) -> Iterator[CudaExecutor]:
    options = {"stream_from": NEVER, **more}
    artifact = Artifact.open(path)
    taken = allocation(artifact.manifest, plan, options.pop("context", CONTEXT), options.pop("budget", ROOM))
    executor = CudaExecutor(artifact, mode, 1, taken, gpu, **options)
    try:
        yield executor
    finally:
        executor.close()


def of_size(gpu: Device, memory: int, **more: Any) -> Device:
    """The same device with so much memory free, and with further attributes."""
    kind = type("Sized", (type(gpu),), {"free_bytes": lambda _self: memory, **more})
    found: Device = copy.copy(gpu)
    found.__class__ = kind
    return found


def weight_bytes(manifest: Manifest, plan: Plan) -> int:
    """Bytes of the arrays and rows that a plan puts on the GPU."""
    return sum(array.nbytes for array in placed_arrays(manifest, plan))


def allocated_bytes(executor: CudaExecutor) -> int:
    """Bytes of device memory that an executor holds, from the tensors themselves."""
    ops, prefill = executor._all_device_ops, executor._prefill
    buffers = {name: getattr(prefill._on_device._buffers, name) for name in gpu_prompt_block(ops.decoder, 1)}
    streamed = [] if prefill._streamer is None else [chunk.arrays for chunk in prefill._streamer._buffers]
    held = _tensors([ops.workspace, ops.cache, ops.weights.arrays, buffers, streamed])
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in held)}.values())


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in dataclasses, dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value):
        yield from _tensors([getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def read(executor: Executor, cache: KVCache, ids: Sequence[int]) -> np.ndarray:
    """Logits after a prompt."""
    return step(executor, ids, cache, select=False).logits_TV[0]


def decoded(executor: Executor, cache: KVCache, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits after each token, and the rows read and kept."""
    found = [step(executor, [token], cache, select=True) for token in ids]
    return np.stack([f.logits_TV[0] for f in found]), np.stack([f.rows_L2 for f in found])


def assert_same_answers(
    one: HostExecutor, two: CudaExecutor, prompt: Sequence[int], going_on: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Compare after a prompt, then token by token; returns the rows that each read and kept."""
    caches = [two.new_cache() for _ in range(2)]
    assert_same(read(two, caches[1], prompt), read(one, caches[0], prompt))
    (wanted, wanted_rows), (found, rows) = (decoded(e, c, going_on) for e, c in zip((one, two), caches, strict=True))
    assert_same(found, wanted)
    return wanted_rows, rows


def assert_same(found: np.ndarray, wanted: np.ndarray, error: float = 1e-4) -> None:
    assert np.abs(found - wanted).max() <= error * np.abs(wanted).max()
    np.testing.assert_array_equal(found.argmax(-1), wanted.argmax(-1))
