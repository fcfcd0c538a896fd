"""The schedule of decoded tokens on both sides: a flat list of calls, made once from the plan's operations.

What the GPU does between two handovers is one captured graph, so that one call starts it. For a layer whose residual is
on the GPU and whose neurons are on both sides the calls are:

    graph      attention, selection, and the handover on its way to pinned memory
    record     an event behind it
    graph      the hot neurons
    wait       for the event: the handover has arrived
    cold       the CPU's neurons, while the GPU computes the hot ones
    graph      fetches the CPU's sum, adds both, and goes on with the next layer

A layer wholly on the residual's side adds to the open graph, or is calls on the CPU, and hands over nothing.

Shape letters: L layers, D model width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.schema import Plan
from pi_runtime.cuda.decode.device_ops import DeviceOps
from pi_runtime.cuda.decode.host_ops import HostOps
from pi_runtime.cuda.memory.devices import Device, Event, Op
from pi_runtime.execution.executor import Floats
from pi_runtime.execution.plan_layout import CPU, GPU
from pi_runtime.execution.schedule import Side, schedule_of


@dataclass(frozen=True)
class Call:
    """One call of a schedule: its kind (`gpu`, `record`, `wait`, `cpu` or `cold`), and the layer that it ends in."""

    kind: str
    layer: int
    run: Op


@dataclass
class CallRecorder:
    """Calls in their order, and what is still open of the next graph."""

    device: Device
    calls: list[Call] = field(default_factory=list)
    layer: int = -1
    _open: list[Op] = field(default_factory=list)

    def gpu(self, *ops: Op) -> None:
        """Add to the open graph."""
        self._open.extend(ops)

    def call(self, kind: str, op: Op) -> None:
        """End the open graph and add a call."""
        self.end_graph()
        op()  # buffers hold zeros: this compiles, and takes the path that tokens take
        self.calls.append(Call(kind, self.layer, op))

    def record(self) -> Event:
        event = self.device.event()
        self.call("record", event.record)
        return event

    def wait(self, event: Event) -> None:
        self.call("wait", event.synchronize)

    def end_graph(self) -> None:
        """Capture the open graph and add the call that starts it."""
        if self._open:
            self.calls.append(Call("gpu", self.layer, self.device.capture(tuple(self._open))))
            self._open.clear()


def build_schedule(
    plan: Plan, device_ops: DeviceOps, host_ops: HostOps, device: Device, inputs: "FfnInputs | None" = None
) -> Sequence[Call]:
    """The calls of tokens that are decoded together; `inputs` keeps the FFNs' of the first one.

    Everything runs once on the way. Use it within `device.stream()`.
    """
    s = CallRecorder(device)
    sides: dict[str, Side] = {GPU: DeviceCalls(s, device_ops, host_ops), CPU: HostCalls(s, device_ops, host_ops)}
    uses_gpu = GPU in (plan.embedding, plan.head, *plan.attention) or any(plan.cuts)
    if uses_gpu:
        s.gpu(device_ops.receive_tokens)
    for operation in schedule_of(plan):
        s.layer = operation.layer
        operation.run(sides)
        if inputs is not None and operation.name == "attention":
            if operation.side == GPU:
                s.gpu(partial(inputs.keep_on_device, s.layer))
            else:
                s.call("cpu", partial(inputs.keep_on_host, s.layer))
    if uses_gpu:
        s.gpu(device_ops.send_rows)
        s.wait(s.record())
    return tuple(s.calls)


class FfnInputs:
    """The inputs (L, D) of a decoded token's FFNs, in pinned memory. Make it within `device.stream()`."""

    def __init__(self, device_ops: DeviceOps, host_ops: HostOps, device: Device) -> None:
        d = device_ops.decoder
        self._device_ops, self._host_ops = device_ops, host_ops
        dtype = device_ops.workspace.x_MD.dtype
        self._input_LD = device.pinned(d.n_layers * d.d_model, dtype).view(d.n_layers, d.d_model)

    @property
    def of_last(self) -> Floats:
        """Those of the token that ran last."""
        found: Floats = self._input_LD.numpy()
        return found

    def keep_on_device(self, layer: int) -> None:
        """Keep that of a layer whose attention is on the GPU."""
        self._input_LD[layer].copy_(self._device_ops.workspace.handover.x_MD[0], non_blocking=True)

    def keep_on_host(self, layer: int) -> None:
        """Keep that of a layer whose attention is on the CPU."""
        self._input_LD[layer].numpy()[:] = self._host_ops.host.workspace.normed_TD[0]


@dataclass(frozen=True)
class DeviceCalls:
    """Records what is to be called for operations on the GPU."""

    s: CallRecorder
    device_ops: DeviceOps
    host_ops: HostOps

    def embed(self, _layer: int) -> None:
        self.s.gpu(self.device_ops.embed)

    def move(self, _layer: int) -> None:
        self.s.call("cpu", self.host_ops.send_residual)
        self.s.gpu(self.device_ops.receive_residual)

    def attention(self, layer: int) -> None:
        self.s.gpu(partial(self.device_ops.attention, layer))

    def ffn(self, layer: int) -> None:
        """Sums of hot neurons on the GPU, while the CPU computes the cold ones' and hands it over."""
        s, device_ops, host_ops = self.s, self.device_ops, self.host_ops
        selects, cuts = RUNGS[device_ops.layers[layer].rung].picks, device_ops.cuts[layer]
        if selects:
            s.gpu(partial(device_ops.prepare_selector, layer))
        if cuts.cold:
            if selects:
                s.gpu(partial(device_ops.select_cold, layer))
            s.gpu(partial(device_ops.send_handover, cuts.cold if selects else None))
            sent = s.record()
        if cuts.hot:
            if selects:
                s.gpu(partial(device_ops.select_hot, layer))
            s.gpu(partial(device_ops.hot_sums, layer))
        if cuts.cold:
            s.wait(sent)
            s.call("cold", partial(host_ops.cold_sum_for_device, layer))
            s.gpu(device_ops.receive_sum)

    def after_ffn(self, layer: int) -> None:
        cuts = self.device_ops.cuts[layer]
        self.s.gpu(partial(self.device_ops.merge, layer, hot=cuts.hot > 0, cold=cuts.cold > 0))

    def head(self, _layer: int) -> None:
        self.s.gpu(self.device_ops.head)


@dataclass(frozen=True)
class HostCalls:
    """Records what is to be called for operations on the CPU."""

    s: CallRecorder
    device_ops: DeviceOps
    host_ops: HostOps

    def embed(self, layer: int) -> None:
        self.s.call("cpu", partial(self.host_ops.embed, layer))

    def move(self, _layer: int) -> None:
        self.s.gpu(self.device_ops.send_residual)
        self.s.wait(self.s.record())
        self.s.call("cpu", self.host_ops.receive_residual)

    def attention(self, layer: int) -> None:
        self.s.call("cpu", partial(self.host_ops.attention, layer))

    def ffn(self, layer: int) -> None:
        """Sums of cold neurons on the CPU, while the GPU computes the hot ones' and hands it over."""
        s, device_ops, host_ops, hot = self.s, self.device_ops, self.host_ops, self.device_ops.cuts[layer].hot
        if not hot:
            s.call("cpu", partial(host_ops.ffn, layer))
            return
        selects = RUNGS[device_ops.layers[layer].rung].picks
        s.call("cpu", host_ops.send_handover)
        if selects:
            s.call("cpu", partial(host_ops.select, layer))
        s.gpu(partial(device_ops.receive_handover, hot if selects else None))
        s.gpu(partial(device_ops.hot_sums, layer), device_ops.send_sum)
        ready = s.record()
        s.call("cold", partial(host_ops.cold_sum, layer))
        s.wait(ready)

    def after_ffn(self, layer: int) -> None:
        hot = self.device_ops.cuts[layer].hot
        self.s.call("cpu", partial(self.host_ops.merge if hot else self.host_ops.after_ffn, layer))

    def head(self, layer: int) -> None:
        self.s.call("cpu", partial(self.host_ops.head, layer))
