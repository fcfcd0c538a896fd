"""Ways to divide the rows of a layer: those that are worth a choice, and what they are said to read."""

from dataclasses import replace

import numpy as np
import pytest
from support.placeable import machine, random_workload

from pi_compile.cost_model import row_options
from pi_compile.cost_model.row_options import RowModel, RowOptions
from pi_compile.machine import Disk

DISK = Disk(name="d", sizes_kib=[4, 64], depths=[1, 16], read_mb_per_s=[[40.0, 200.0], [400.0, 1000.0]])


@pytest.fixture(scope="module")
def model() -> RowModel:
    alone = machine(gpu=None, link=None).model_copy(update={"disk": DISK})
    return RowModel(work=random_workload(np.random.default_rng(8), groups=96), machine=alone)


def test_an_option_is_kept_unless_another_has_fewer_bytes_and_less_time(
    model: RowModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = model.options(0, gpu=False)
    monkeypatch.setattr(row_options, "_non_dominated", lambda options: np.arange(len(options.cuts)))
    every = replace(model).options(0, gpu=False)  # keeps nothing that was found before

    def costs(options: RowOptions) -> list[tuple[int, int]]:
        return list(zip(options.nbytes.tolist(), (options.cpu_ps + options.disk_ps).tolist(), strict=True))

    best = {
        (nbytes, ps)
        for nbytes, ps in costs(every)
        if not any(b <= nbytes and p <= ps and (b, p) != (nbytes, ps) for b, p in costs(every))
    }
    assert len(best) > 2
    assert set(costs(kept)) == best


def test_what_is_missed_is_read_in_whole_sectors(model: RowModel) -> None:
    layers = range(model.work.decoder.n_layers)
    found = [(model.options(n, gpu=False), n) for n in layers if model.work.layers[n].kind.needs_all_first]
    for options, _ in found:
        some = options.first
        spanned = model.reads.spanned(model.row_nbytes[1])
        np.testing.assert_array_equal(options.read[some], -(-options.missed[some] * spanned >> row_options.ROW_BITS))
        assert (options.read[some] > 0).any()
    assert found
