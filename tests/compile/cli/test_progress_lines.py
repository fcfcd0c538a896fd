"""Where there is no terminal, something that takes minutes says how long, and goes on saying where it is."""

from pi_compile.cli.artifact import ProgressLines


def told(steps: list[tuple[float, int]], total: int) -> list[str]:
    """What is said when so much is done at these times."""
    lines: list[str] = []
    times = iter([0.0, *(at for at, _ in steps)])
    progress = ProgressLines("scoring", "windows", lines.append, lambda: next(times))
    for _, done in steps:
        progress(done, total)
    return lines


def test_the_time_is_told_after_the_first_piece() -> None:
    assert told([(30.0, 0), (32.0, 1)], 24) == ["scoring: 24 windows, about 48 s"]


def test_a_line_every_ten_seconds() -> None:
    steps = [(0.0, 0), *((3.0 * n, n) for n in range(1, 9))]
    assert told(steps, 8) == ["scoring: 8 windows, about 24 s", "scoring: 5 of 8 windows, about 9 s left"]


def test_a_single_slow_piece_has_its_time() -> None:
    assert told([(0.0, 0), (25.0, 1)], 1) == ["scoring: 1 windows, about 25 s"]
