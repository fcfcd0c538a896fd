"""What messages quote."""

import pytest

from pi_compile.errors import nearest, shown


@pytest.mark.parametrize(("length", "cut"), [(78, False), (79, True)])
def test_a_long_value_is_cut(length: int, cut: bool) -> None:
    value = "v" * length
    assert shown(value) == (repr(value)[:80] + "…" if cut else repr(value))


def test_the_nearest_name() -> None:
    assert nearest("predictd", ["dense", "predicted"]) == "predicted"
    assert nearest("xyz", ["dense", "predicted"]) is None
