"""The tensors of a quantised checkpoint by the names that its model has: `NAME.weight` for `NAME.qweight`."""

from math import prod
from pathlib import Path

from pi_compile.checkpoint.quantised.layouts import LAYOUTS, Layout, MxMatrices, QuantisedMatrix, TernaryMatrix
from pi_compile.checkpoint.quantised.scheme import Scheme
from pi_compile.checkpoint.tensors import Array, FolderTensors, RowReader
from pi_compile.errors import CheckpointError

_MOST_READ = 1 << 20
"""Numbers of a bias that are looked at: longer ones are no bias."""


class QuantisedTensors:
    """Tensors of a folder, of which the quantised layers' are dequantised row by row when they are read."""

    described_by = FolderTensors.described_by

    def __init__(self, stored: FolderTensors, scheme: Scheme) -> None:
        """Find the quantised layers among the tensors.

        Raises CheckpointError for a layer whose tensors are incomplete or do not fit together.
        """
        self._stored, self._scheme = stored, scheme
        self._matrices: dict[str, QuantisedMatrix | MxMatrices | TernaryMatrix] = {}
        self._main: dict[str, str] = {}
        self.location, self.files, names = stored.location, stored.files, set(stored.names)
        for layout in LAYOUTS[scheme.method]:
            ending = f".{layout.main}"
            for main in sorted(name for name in stored.names if name.endswith(layout.layers + ending)):
                layer = main.removesuffix(ending)
                if layout.main == "weight" and any(f"{layer}.{name}" not in stored.names for name in layout.beside[:1]):
                    continue  # a layer that is not quantised
                names -= self._add(layer, layout)
        if not self._matrices:
            raise CheckpointError(
                f"{stored.location}: no layer is quantised, though {self.described_by} says that they are",
                expected=f"tensors such as NAME.{LAYOUTS[scheme.method][0].main}",
                found=f"{len(names)} other tensors",
                remedy=f"{self.described_by} and weights are of different checkpoints",
            )
        self.names = frozenset(names | self._matrices.keys())
        self.powers = scheme.method == "mxfp4"
        self.without_effect = frozenset(filter(self._is_zero_bias, names))
        self.block_types = frozenset(map(self.dtype, self._matrices))
        self.notices = self._notices()

    def _add(self, layer: str, layout: Layout) -> set[str]:
        """Open a layer's weight; returns the names of the tensors that make it."""
        names = {part: f"{layer}.{part}" for part in (layout.main, *layout.beside, *layout.optional)}
        found = {part: name for part, name in names.items() if name in self._stored.names}
        missing = [names[part] for part in layout.beside if part not in found]
        path = self._stored.path(names[layout.main])
        if missing:
            raise CheckpointError(
                f"{path}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
                expected=f"all tensors of {layer}",
                remedy="the checkpoint is incomplete: fetch it again",
            )
        try:
            stored = {part: self._stored.tensor(name) for part, name in found.items()}
            matrix = layout.open(stored, self._scheme.of(layer))
        except ValueError as error:
            raise CheckpointError(
                f"{path}: the tensors of {layer} do not fit together",
                expected=error,
                remedy=f"{self.described_by} and weights are of different checkpoints, or a file is damaged",
            ) from None
        name = f"{layer}.{layout.name}"
        self._matrices[name], self._main[name] = matrix, names[layout.main]
        return set(found.values())

    def _is_zero_bias(self, name: str) -> bool:
        """Whether it is a bias that only the quantiser added: it writes zeros where the model has none."""
        if not name.endswith(".bias") or f"{name.removesuffix('.bias')}.weight" not in self._matrices:
            return False
        shape = self._stored.shape(name)
        return len(shape) == 1 and shape[0] <= _MOST_READ and not self._stored.rows(name)[:].any()

    def _notices(self) -> tuple[str, ...]:
        """Lines for the user: how it is quantised, and layers whose columns are permuted across groups."""
        permuted = [name for name, matrix in self._matrices.items() if matrix.is_permuted]
        lines = [f"{len(self._matrices)} layers are quantised ({self._scheme.name}); their values are read as they are"]
        if permuted:
            first = f"{len(permuted)} of them have columns permuted across groups (act-order), such as {permuted[0]}"
            lines.append(f"{first}: no number format of blocks keeps these")
        return (*self._stored.notices, *lines, *self._scheme.notices)

    def alias(self, name: str, existing: str) -> None:
        """Give a tensor another name as well."""
        if existing in self._matrices:
            self._matrices[name], self._main[name] = self._matrices[existing], self._main[existing]
        else:
            self._stored.alias(name, existing)
        self.names |= {name}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._matrices[name].shape if name in self._matrices else self._stored.shape(name)

    def dtype(self, name: str) -> str:
        """Number format of a tensor; for a quantised layer the method and its bits, which no number format keeps."""
        if name not in self._matrices:
            return self._stored.dtype(name)
        return f"{self._scheme.method} of {self._matrices[name].bits} bits"

    def bits(self, name: str) -> float:
        """Stored bits of one value, scales included."""
        if name not in self._matrices:
            return self._stored.bits(name)
        return 8 * self._matrices[name].nbytes / prod(self.shape(name))

    def tensor(self, name: str) -> Array:
        """A mapped tensor, or a quantised layer's values, in memory."""
        return self._matrices[name][:] if name in self._matrices else self._stored.tensor(name)

    def rows(self, name: str) -> RowReader:
        return self._matrices[name] if name in self._matrices else self._stored.rows(name)

    def path(self, name: str) -> Path:
        """File that holds a tensor."""
        return self._stored.path(self._main.get(name, name))
