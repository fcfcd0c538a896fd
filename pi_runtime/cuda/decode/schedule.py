"""The schedule of decoded tokens: a flat list of calls, made once from the plan.

What the GPU does between two handovers is one captured graph, so that one call starts it. For a layer whose residual is
on the GPU and whose neurons are on both sides the calls are:

    graph      attention, selection, and the handover on its way to pinned memory
    record     an event behind it
    graph      the hot neurons
    wait       for the event: the handover has arrived
    cold       the CPU's neurons, while the GPU computes the hot ones
    graph      fetches the CPU's sum, adds both, and goes on with the next layer

A layer wholly on the residual's side adds to the open graph, or is calls on the CPU, and hands over nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from pi_runtime.artifact.schema import Plan
from pi_runtime.cuda.decode.device_ops import DeviceOps
from pi_runtime.cuda.decode.host_ops import HostOps
from pi_runtime.cuda.decode.selection_stats import SelectionStats
from pi_runtime.cuda.decode.selectors import picks
from pi_runtime.cuda.memory.devices import Device, Event, Op
from pi_runtime.execution.plan_layout import GPU


@dataclass(frozen=True)
class Call:
    """One call of a schedule: its kind (`gpu`, `record`, `wait`, `cpu` or `cold`), and the layer that it ends in."""

    kind: str
    layer: int
    run: Op


@dataclass
class Schedule:
    """Calls in their order, and the operations of the graph that is still open."""

    device: Device
    calls: list[Call] = field(default_factory=list)
    layer: int = -1
    _open: list[Op] = field(default_factory=list)

    def gpu(self, *ops: Op) -> None:
        """Add operations to the open graph."""
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
    plan: Plan, device_ops: DeviceOps, host_ops: HostOps, device: Device, stats: SelectionStats | None = None
) -> Sequence[Call]:
    """The calls of tokens that are decoded together; `stats` keeps the inputs of FFNs.

    Everything runs once on the way. Use it within `device.stream()`.
    """
    s = Schedule(device)
    uses_gpu = GPU in (plan.embedding, plan.head, *plan.attention) or any(plan.cuts)
    if uses_gpu:
        s.gpu(device_ops.receive_tokens)
    side = plan.embedding
    _on(s, side, device_ops.embed, host_ops.embed)
    for layer, attention in enumerate(plan.attention):
        s.layer = layer
        side = _move_residual(s, side, attention, device_ops, host_ops)
        _on(s, side, partial(device_ops.attention, layer), partial(host_ops.attention, layer))
        if stats is not None:
            _on(s, side, partial(stats.keep_device_input, layer), partial(stats.keep_host_input, layer))
        if side == GPU:
            _ffn_on_gpu(s, device_ops, host_ops, layer)
        else:
            _ffn_on_cpu(s, device_ops, host_ops, layer)
    s.layer += 1
    side = _move_residual(s, side, plan.head, device_ops, host_ops)
    _on(s, side, device_ops.head, host_ops.head)
    if uses_gpu:
        s.gpu(device_ops.send_rows)
        s.wait(s.record())
    return tuple(s.calls)


def _on(s: Schedule, side: str, on_device: Op, on_host: Op) -> None:
    if side == GPU:
        s.gpu(on_device)
    else:
        s.call("cpu", on_host)


def _move_residual(s: Schedule, side: str, to: str, device_ops: DeviceOps, host_ops: HostOps) -> str:
    """Bring the residual from one side to another; returns the side that has it then."""
    if side == GPU and to != GPU:
        s.gpu(device_ops.send_residual)
        s.wait(s.record())
        s.call("cpu", host_ops.receive_residual)
    elif side != GPU and to == GPU:
        s.call("cpu", host_ops.send_residual)
        s.gpu(device_ops.receive_residual)
    return to


def _ffn_on_gpu(s: Schedule, device_ops: DeviceOps, host_ops: HostOps, layer: int) -> None:
    """An FFN whose residual is on the GPU."""
    selects, cuts = picks(device_ops.layers[layer]), device_ops.cuts[layer]
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
    s.gpu(partial(device_ops.merge, layer, hot=cuts.hot > 0, cold=cuts.cold > 0))


def _ffn_on_cpu(s: Schedule, device_ops: DeviceOps, host_ops: HostOps, layer: int) -> None:
    """An FFN whose residual is on the CPU."""
    hot = device_ops.cuts[layer].hot
    if not hot:
        s.call("cpu", partial(host_ops.whole_ffn, layer))
        return
    selects = picks(device_ops.layers[layer])
    s.call("cpu", host_ops.send_handover)
    if selects:
        s.call("cpu", partial(host_ops.select, layer))
    s.gpu(partial(device_ops.receive_handover, hot if selects else None))
    s.gpu(partial(device_ops.hot_sums, layer), device_ops.send_sum)
    ready = s.record()
    s.call("cold", partial(host_ops.cold_sum, layer))
    s.wait(ready)
    s.call("cpu", partial(host_ops.merge, layer))
