"""Bytes and times of any division of a layer's rows, by the model that `place` chooses with."""

import numpy as np

from pi_compile.cost_model.row_options import RowChoice, RowModel, _Division


def divided(model: RowModel, layer: int, pinned: int, cached: int, first: bool) -> RowChoice:
    """What so many pinned and cached rows of a layer cost without a GPU; `first`: its other rows are all there."""
    curves = model._curves(layer, model._order(layer, gpu=False), np.array([0, pinned]))
    none = np.zeros(1, np.int64)
    division = _Division(none, none + pinned, none + cached)
    needed, missed = (tuple(one.missed(n, none + rows) for one in curves) for n, rows in ((0, 0), (1, cached)))
    return model._timed(layer, division, first, needed, missed).choice(0)
