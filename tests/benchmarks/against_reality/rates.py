"""What this machine gives at this moment, as the profile that predictions start from."""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from sparse_model import Spec

from pi_compile.machine.profile import Cpu, Gpu, Link, Machine
from pi_runtime.artifact.formats import ROW_FORMATS
from pi_runtime.kernels.benchmarks import (
    attention_bandwidth,
    gather_bandwidth,
    launch_seconds,
    neuron_bandwidth,
    predictor_bandwidth,
    product_bandwidth,
    read_bandwidth,
    timed_matrix,
)

READ_NBYTES, MATRIX_NBYTES, PREDICTOR_NBYTES = 1 << 27, 1 << 28, 1 << 27
"""Large against any cache."""


class Rates:
    """Matrices of a model's formats and widths, held so that their rates can be measured again and again."""

    def __init__(self, spec: Spec) -> None:
        fmt, predictor = spec.formats["ffn"], spec.formats["predictor"]
        self._weights = timed_matrix(fmt, MATRIX_NBYTES, spec.decoder.d_model)
        self._up = timed_matrix(predictor, PREDICTOR_NBYTES, spec.rank)

    def _cpu(self, threads: int) -> Cpu:
        """A few measurements of each, one after the other."""
        w, unit = self._weights, 1e9
        return Cpu(
            name="this one",
            cores=threads,
            ram_gib=1.0,
            bandwidth_gb_per_s=read_bandwidth(READ_NBYTES, threads, 1) / unit,
            launch_us=launch_seconds(w, threads, 3) * 1e6,
            format_gb_per_s={w.fmt: product_bandwidth(w, threads, 1) / unit},
            neurons_gb_per_s={w.fmt: neuron_bandwidth(w, threads, 1) / unit},
            gather_gb_per_s=dict.fromkeys(ROW_FORMATS, gather_bandwidth(w, threads, 3) / unit),
            predictor_gb_per_s={self._up.fmt: predictor_bandwidth(self._up, threads, 1) / unit},
            attention_gb_per_s=attention_bandwidth(threads, 1) / unit,
        )

    def machine(self, threads: int) -> Machine:
        return Machine(name="this machine", source="measured beside the tokens", cpu=self._cpu(threads))

    def stand_in(self, threads: int) -> Machine:
        """Either side by itself on so many threads; a hand-over is the waking of a thread."""
        cpu = self._cpu(threads)
        gpu = Gpu(vram_gib=1.0, **cpu.model_dump(exclude={"cores", "ram_gib", "launch_us"}))
        link = Link(pcie_gb_per_s=1000.0, sync_us=_hand_over_us())
        return Machine(name="stand-in", source="measured beside the tokens", cpu=cpu, gpu=gpu, link=link)


def _hand_over_us(times: int = 50) -> float:
    found = []
    with ThreadPoolExecutor(1) as other:
        for _ in range(times):
            began = time.perf_counter()
            other.submit(int).result()
            found.append(time.perf_counter() - began)
    return statistics.median(found) * 1e6
