"""Bytes of a neuron, and the fewest neurons of a layer that are worth a hand-over. Integers throughout."""

from collections.abc import Mapping

from pi_compile.machine_file import Machine
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import FORMATS

_PICO = 10**12


def neuron_bytes(d: Decoder, formats: Mapping[str, str], rank: int | None) -> int:
    """Stored bytes of one neuron: its rows of `first` and `rest`, its biases, its predictor row and bias."""
    row = FORMATS[formats["ffn"]].nbytes((1, d.d_model))
    rows = 3 if d.ffn == "gated" else 2
    biases = 4 * (rows - 1) if d.ffn_bias else 0
    predictor = 0 if rank is None else FORMATS[formats["predictor"]].nbytes((1, rank)) + 4
    return rows * row + biases + predictor


def least_neurons(machine: Machine, nbytes: int) -> int | None:
    """C_l: the fewest neurons of `nbytes` each for which the GPU pays for its hand-over; None where it never does.

    From C · T_GPU + T_sync ≤ C · T_CPU with T = bytes ÷ bandwidth (PowerInfer, section 6.3), in picoseconds:
    C = ⌈T_sync / (T_CPU − T_GPU)⌉.
    """
    if machine.gpu is None or machine.link is None:
        return None
    cpu, gpu = (nbytes * _PICO // round(unit.bandwidth_gb_per_s * 10**9) for unit in (machine.cpu, machine.gpu))
    sync = round(machine.link.sync_us * 10**6)
    return None if cpu <= gpu else -(-sync // (cpu - gpu))
