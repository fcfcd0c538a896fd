"""Bytes of a neuron, and the fewest neurons of a layer that are worth a hand-over. Integers throughout."""

from collections.abc import Mapping

from pi_compile.machine_file import Machine, whole
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.sizes import FfnBytes

_PICO = 10**12


def neuron_bytes(d: Decoder, formats: Mapping[str, str], rank: int | None) -> int:
    """Stored bytes of one neuron: its rows of `first` and `rest`, its biases, its predictor row and bias."""
    neuron = FfnBytes.of(d, formats)
    predictor = 0 if rank is None else neuron.predictor_row(rank)
    return neuron.first + neuron.rest + neuron.biases + predictor


def least_neurons(machine: Machine, nbytes: int) -> int | None:
    """C_l: the fewest neurons of `nbytes` each for which the GPU pays for its hand-over; None where it never does.

    From C · T_GPU + T_sync ≤ C · T_CPU with T = nbytes ÷ bandwidth (PowerInfer, section 6.3):

        C = ⌈T_sync / (T_CPU − T_GPU)⌉ = ⌈T_sync · cpu · gpu / (nbytes · (gpu − cpu))⌉

    with the bandwidths cpu and gpu in bytes a second and T_sync in picoseconds; nothing is rounded but the result.
    """
    if machine.gpu is None or machine.link is None:
        return None
    cpu, gpu = (whole(unit.bandwidth_gb_per_s, 10**9) for unit in (machine.cpu, machine.gpu))
    if gpu <= cpu:
        return None
    return -(-whole(machine.link.sync_us, 10**6) * cpu * gpu // (nbytes * (gpu - cpu) * _PICO))
