"""How long a look at the cost of rounding will take, as it is said beforehand."""

import pytest

pytest.importorskip("torch")

from support.synthetic import small_decoder

from pi_compile.calibration.quantising import loss
from pi_compile.torch_model import layer_parameters


def test_time_goes_with_products_and_rounded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "flops_per_s", lambda *_: 1e9)
    d = small_decoder(n_layers=3)
    read = 3 * layer_parameters(d, 1) + d.vocab_size * d.d_model
    once, twice, none = (loss.seconds_of_a_pass(d, n, 16) for n in (1, 2, 0))
    assert twice - once == pytest.approx(2 * 16 * read / 1e9)
    assert none == pytest.approx(loss._ROUNDING * 3 * layer_parameters(d, 1) / 1e9)
