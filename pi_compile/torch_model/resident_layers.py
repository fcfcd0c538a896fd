"""Weights that stay in memory between tasks, and the threads that tasks compute with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pi_compile.checkpoint import Checkpoint
from pi_compile.torch_model import decoder as td

Weights = dict[str, torch.Tensor]


class ResidentLayers:
    """Weights of one range of layers; asking for another frees them first.

    A worker goes through the layers in their order, so it reads each weight once.
    """

    def __init__(self, checkpoint: Checkpoint, device: str) -> None:
        self._checkpoint, self._device = checkpoint, device
        self._layers, self._weights = range(0), list[Weights]()
        self._embedding: Weights = {}

    def weights(self, layers: range) -> list[Weights]:
        """The weights of each layer of a range."""
        if layers != self._layers:
            self._weights, self._embedding = [], {}
            self._weights = [td.layer_weights(self._checkpoint, n, self._device) for n in layers]
            self._layers = layers
        return self._weights

    def embed(self, ids_NT: torch.Tensor) -> torch.Tensor:
        """Hidden states before the first layer; the embedding stays until other layers are asked for."""
        if not self._embedding:
            self._embedding = td.embedding_weights(self._checkpoint, self._device)
        return td.embed(self._checkpoint.decoder, self._embedding, ids_NT.to(self._device))


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Compute with a number of threads: the last bits of a sum depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
