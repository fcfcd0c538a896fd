"""Classes of layers, and what their pages take."""

import pytest
from support.synthetic import small_decoder

from pi_runtime.artifact.buffers import kv_page, kv_pages
from pi_runtime.artifact.layer_classes import layer_classes, layer_nbytes, sequence_nbytes

CASES = {
    # Layers, each how many-th sees all; heads, their width, window; MiB of windows and of masks alone in float16.
    "3 of 4, long": (32, 4, 4, 128, 4096, 326, 512),
    "3 of 4, short": (32, 4, 4, 128, 1024, 182, 512),
    "5 of 6": (26, 6, 1, 256, 512, 46, 208),
    "every other": (24, 2, 8, 64, 128, 198, 384),
}


@pytest.mark.parametrize("case", CASES)
def test_what_windows_save_in_a_whole_context(case: str) -> None:
    """The figures of docs/explanation/kernels.md."""
    layers, every, heads, width, window, own, whole = CASES[case]
    windowed = tuple(n for n in range(layers) if (n + 1) % every)
    fields = {"n_layers": layers, "n_kv_heads": heads, "n_heads": heads, "head_dim": width}
    decoder = small_decoder(**fields, window=window, windowed_layers=windowed)
    classes = layer_classes(decoder, "f16")
    assert {one.window: one.layers for one in classes}[window] == windowed
    assert round(sequence_nbytes(classes, 8192, 64) / 2**20) == own
    assert kv_pages(8192) * kv_page(decoder, "f16", layers).nbytes == whole << 20


def test_layers_that_are_alike_are_one_class() -> None:
    for fields in ({}, {"window": 9, "windowed_layers": (0, 1, 2)}):
        decoder = small_decoder(n_layers=3, **fields)
        (one,) = layer_classes(decoder, "q8")
        assert (one.layers, one.window) == ((0, 1, 2), fields.get("window", 0))
        assert one.page == kv_page(small_decoder(n_layers=3), "q8", 3)
    assert one.pages(100) == range(2, 4)
    assert layer_nbytes(decoder, "q8", 1000, 64) == (5 * one.page.nbytes // 3,) * 3


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 100])
@pytest.mark.parametrize("step", [1, 7, 64, 90])
def test_most_pages_are_those_of_the_worst_steps(window: int, step: int) -> None:
    (of,) = layer_classes(small_decoder(n_layers=1, window=window, windowed_layers=(0,)), "f16")
    for positions in (step, 40, 300):
        found = [
            kv_pages(length + count) - of.kept_from(length)
            for length in range(positions)
            for count in range(1, min(step, positions - length) + 1)
        ]
        assert max(found) == of.most_pages(positions, step)
