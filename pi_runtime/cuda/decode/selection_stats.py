"""Counts of what selection reads and what it leaves out, for evaluation.

A decoded token counts the rows it reads and the neurons it keeps; it does not know which others would have fired. So
the schedule of a token whose stats are kept also sends each FFN's input to the host. When the stats are asked for, all
neurons are computed for these inputs, a block of tokens at a time.

Shape letters: L layers, T tokens of a block, D model width.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.cuda.decode.device_ops import DeviceOps
from pi_runtime.cuda.decode.host_ops import HostOps
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.execution.cpu_ops import token_blocks
from pi_runtime.execution.executor import Ints


class SelectionStats:
    """Stats of the tokens of one block. Make it within `device.stream()`."""

    def __init__(self, device_ops: DeviceOps, host_ops: HostOps, device: Device) -> None:
        d = device_ops.decoder
        self._device_ops, self._host_ops = device_ops, host_ops
        dtype = device_ops.workspace.x_MD.dtype
        self._input_LD = device.pinned(d.n_layers * d.d_model, dtype).view(d.n_layers, d.d_model)
        self._inputs_LTD = np.empty((d.n_layers, BLOCK_TOKENS, d.d_model), np.float32)
        self._rows_L2 = np.zeros((d.n_layers, 2), np.int64)
        self._tokens = 0

    def keep_device_input(self, layer: int) -> None:
        """Keep the FFN's input of a layer whose attention is on the GPU."""
        self._input_LD[layer].copy_(self._device_ops.workspace.handover.x_MD[0], non_blocking=True)

    def keep_host_input(self, layer: int) -> None:
        """Keep the FFN's input of a layer whose attention is on the CPU."""
        self._input_LD[layer].numpy()[:] = self._host_ops.model.workspace.normed_TD[0]

    def clear(self) -> None:
        """Begin a block."""
        self._tokens = 0
        self._rows_L2[:] = 0

    def add(self, rows_L2: Ints) -> None:
        """Add a token that has run, and the rows that it read and kept."""
        self._inputs_LTD[:, self._tokens] = self._input_LD.numpy()
        self._rows_L2 += rows_L2
        self._tokens += 1

    def tally(self, count_firing: Callable[[int, npt.NDArray[np.float32]], int], block_tokens: int) -> Ints:
        """(layers, 3): neurons that fire, rows of `first` read, and neurons that fire and are kept.

        `count_firing` counts the neurons of a layer that fire for inputs [T, D], for at most `block_tokens` of them.
        """
        tally_L3 = np.zeros((len(self._rows_L2), 3), np.int64)
        tally_L3[:, 1:] = self._rows_L2
        for layer, how in enumerate(self._device_ops.layers):
            tally_3, rung = tally_L3[layer], RUNGS[how.rung]
            if rung.exact and not rung.dense:  # it keeps just what fires
                tally_3[0] = tally_3[2]
                continue
            for part in token_blocks(self._tokens, block_tokens):
                tally_3[0] += count_firing(layer, self._inputs_LTD[layer, part])
            if rung.dense:  # it keeps what does not fire too
                tally_3[2] = tally_3[0]
        return tally_L3
