"""A token as a flat list of calls, made once from the plan.

What the GPU does between two hand-overs is one captured graph, so that one call starts it. Of a layer whose residual
is on the GPU and whose neurons are on both sides:

    graph      attention, predictor, the parcel on its way to pinned memory
    record     an event behind it
    graph      the hot neurons
    wait       for the event: the parcel is there
    cold       the CPU's neurons, while the GPU is at its own
    graph      fetches the CPU's sum, adds both, and goes on with the next layer

A layer wholly on the residual's side adds to the open graph, or is calls on the CPU, and hands over nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from pi_runtime.artifact.schema import Plan
from pi_runtime.cuda.decode.device_ops import Side
from pi_runtime.cuda.decode.host_ops import Host
from pi_runtime.cuda.decode.selection_stats import Examined
from pi_runtime.cuda.memory.devices import Device, Event, Op
from pi_runtime.cuda.plan_layout import GPU


@dataclass(frozen=True)
class Call:
    """One call of the token, and what it is: `gpu`, `record`, `wait`, `cpu`, `cold`, and the layer it ends in."""

    kind: str
    layer: int
    run: Op


@dataclass
class Program:
    """Calls in their order, and the operations of the graph that is still open."""

    device: Device
    calls: list[Call] = field(default_factory=list)
    layer: int = -1
    _open: list[Op] = field(default_factory=list)

    def gpu(self, *ops: Op) -> None:
        self._open.extend(ops)

    def cpu(self, op: Op, kind: str = "cpu") -> None:
        self.close()
        op()  # buffers hold zeros: this compiles, and takes the path that tokens take
        self.calls.append(Call(kind, self.layer, op))

    def record(self) -> Event:
        self.close()
        event = self.device.event()
        event.record()
        self.calls.append(Call("record", self.layer, event.record))
        return event

    def wait(self, event: Event) -> None:
        self.close()
        event.synchronize()
        self.calls.append(Call("wait", self.layer, event.synchronize))

    def close(self) -> None:
        """End the open graph: it starts here."""
        if self._open:
            self.calls.append(Call("gpu", self.layer, self.device.replayable(tuple(self._open))))
            self._open.clear()


def program_of(plan: Plan, side: Side, host: Host, device: Device, examined: Examined | None = None) -> Sequence[Call]:
    """The calls of one decoded token; `examined` keeps what FFNs are given. Call it within `device.at_work()`; it runs
    everything once."""
    p = Program(device)
    gpu = GPU in (plan.embedding, plan.head, *plan.attention) or any(plan.cuts)
    if gpu:
        p.gpu(side.start)
    where = plan.embedding
    _on(p, where, side.embed, host.embed)
    for layer, attention in enumerate(plan.attention):
        p.layer = layer
        where = _cross(p, where, attention, side, host)
        _on(p, where, partial(side.attention, layer), partial(host.attention, layer))
        if examined is not None:
            _on(p, where, partial(examined.there, layer), partial(examined.here, layer))
        if where == GPU:
            _ffn_on_gpu(p, side, host, layer)
        else:
            _ffn_on_cpu(p, side, host, layer)
    p.layer += 1
    where = _cross(p, where, plan.head, side, host)
    _on(p, where, side.head, host.head)
    if gpu:
        p.gpu(side.tell_rows)
        p.wait(p.record())
    return tuple(p.calls)


def _on(p: Program, where: str, here: Op, there: Op) -> None:
    if where == GPU:
        p.gpu(here)
    else:
        p.cpu(there)


def _cross(p: Program, where: str, to: str, side: Side, host: Host) -> str:
    """Bring the residual to where it is wanted."""
    if where == GPU and to != GPU:
        p.gpu(side.cross_out)
        p.wait(p.record())
        p.cpu(host.cross_in)
    elif where != GPU and to == GPU:
        p.cpu(host.cross_out)
        p.gpu(side.cross_in)
    return to


def _ffn_on_gpu(p: Program, side: Side, host: Host, layer: int) -> None:
    predicted, hot, cold = side.selects(layer), side.cuts[layer].hot, side.cuts[layer].cold
    if predicted:
        p.gpu(partial(side.reduce, layer))
    if cold:
        if predicted:
            p.gpu(partial(side.predict_cold, layer))
        p.gpu(partial(side.hand_over, cold if predicted else None))
        sent = p.record()
    if hot:
        if predicted:
            p.gpu(partial(side.predict_hot, layer))
        p.gpu(partial(side.hot, layer))
    if cold:
        p.wait(sent)
        p.cpu(partial(host.cold_for_gpu, layer), "cold")
        p.gpu(side.take)
    p.gpu(partial(side.merge, layer, hot=hot > 0, cold=cold > 0))


def _ffn_on_cpu(p: Program, side: Side, host: Host, layer: int) -> None:
    hot = side.cuts[layer].hot
    if not hot:
        p.cpu(partial(host.whole, layer))
        return
    predicted = side.selects(layer)
    p.cpu(host.hand_over)
    if predicted:
        p.cpu(partial(host.predict, layer))
    p.gpu(partial(side.receive, hot if predicted else None), partial(side.hot, layer), side.give_sum)
    ready = p.record()
    p.cpu(partial(host.cold, layer), "cold")
    p.wait(ready)
    p.cpu(partial(host.merge, layer))
