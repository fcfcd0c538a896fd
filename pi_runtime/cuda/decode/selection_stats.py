"""What selection reads and leaves out where a model is examined.

A decoded token counts the rows it reads and the neurons it keeps; which others would have fired it does not know. So
the program of an examined token also sends the host what each layer's FFN was given, and when somebody asks, all
neurons are computed for these inputs, a block of tokens at a time.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pi_runtime.cuda.decode.device_ops import Side
from pi_runtime.cuda.decode.host_ops import Host
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.execution.cpu import Ints
from pi_runtime.kernels.data.workspace import BLOCK_TOKENS


class Examined:
    """The tokens of one block. Make it within `device.at_work()`."""

    def __init__(self, side: Side, host: Host, device: Device) -> None:
        d = side.decoder
        self._side, self._host = side, host
        self._token_LD = device.pinned(d.n_layers * d.d_model, side.b.x_D.dtype).view(d.n_layers, d.d_model)
        self._given_LTD = np.empty((d.n_layers, BLOCK_TOKENS, d.d_model), np.float32)
        self._rows_L2 = np.zeros((d.n_layers, 2), np.int64)
        self._tokens = 0

    def there(self, layer: int) -> None:
        """Keep the FFN's input of a layer whose attention is on the GPU."""
        self._token_LD[layer].copy_(self._side.b.parcel.x_D, non_blocking=True)

    def here(self, layer: int) -> None:
        """The same on the CPU."""
        self._token_LD[layer].numpy()[:] = self._host.b.normed_TD[0]

    def clear(self) -> None:
        """Begin a block."""
        self._tokens = 0
        self._rows_L2[:] = 0

    def add(self, rows_L2: Ints) -> None:
        """A token has run, reading and keeping so many rows."""
        self._given_LTD[:, self._tokens] = self._token_LD.numpy()
        self._rows_L2 += rows_L2
        self._tokens += 1

    def tally(self, fires: Callable[[int, npt.NDArray[np.float32]], int], at_once: int) -> Ints:
        """(layers, 3): neurons that fire, rows of `first` read, and neurons that fire and are kept.

        `fires` counts the neurons of a layer that fire for inputs [T, D], at most `at_once` of them at a time.
        """
        tally_L3 = np.zeros((len(self._rows_L2), 3), np.int64)
        tally_L3[:, 1:] = self._rows_L2
        for layer, how in enumerate(self._side.layers):
            tally_3 = tally_L3[layer]
            if how.rung == "gate":
                tally_3[0] = tally_3[2]
                continue
            for low in range(0, self._tokens, at_once):
                tally_3[0] += fires(layer, self._given_LTD[layer, low : min(self._tokens, low + at_once)])
            if how.rung == "dense":  # it keeps what does not fire too
                tally_3[2] = tally_3[0]
        return tally_L3
