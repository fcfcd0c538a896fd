"""Machine profiles: read strictly, written back unchanged."""

import re
from pathlib import Path
from typing import Any

import pytest

from pi_compile.errors import ProfileError
from pi_compile.machine.profile import Cpu, Disk, Gpu, Link, Machine, bundled_machines, read_machine, to_units

WHOLE = Machine(
    name='a "quoted" \\ name\n\x7f\u2028é🙂',
    source="s",
    cpu=Cpu(name="c", cores=8, ram_gib=23.5, bandwidth_gb_per_s=67.2),
    gpu=Gpu(name="g", vram_gib=24.0, bandwidth_gb_per_s=1000.0),
    link=Link(pcie_gb_per_s=32.0, sync_us=0.1),
)


def test_published_figures() -> None:
    """The bundled profiles have the figures of the published machines."""
    high, low = read_machine(bundled_machines() / "pc-high.toml"), read_machine(bundled_machines() / "pc-low.toml")
    assert high.gpu is not None and low.gpu is not None  # noqa: PT018
    figures = [(m.cpu.bandwidth_gb_per_s, m.gpu.bandwidth_gb_per_s, m.gpu.vram_gib) for m in (high, low)]  # type: ignore[union-attr]
    assert figures == [(67.2, 1000.0, 24.0), (38.4, 616.0, 11.0)]


@pytest.mark.parametrize("name", ["pc-high", "pc-low"])
def test_published_machines_pick_rows_of_blocks_more_slowly(name: str) -> None:
    found = read_machine(bundled_machines() / f"{name}.toml")
    assert found.gpu is not None
    for section in (found.cpu, found.gpu):
        picked = section.gather_gb_per_s
        assert [picked[fmt] < min(picked["f16"], section.format_gb_per_s[fmt]) for fmt in ("q8", "q4")] == [True] * 2


def test_integers_are_the_written_decimals() -> None:
    """Values are decimal: in floating point 4.35 · 100 is 434.99…, and 0.1 · 10⁶ picoseconds must not lose one."""
    assert (to_units(4.35, 100), to_units(67.2, 10**9), to_units(0.1, 10**6), to_units(1e-7, 10**6)) == (
        435,
        67_200_000_000,
        10**5,
        0,
    )


def test_what_is_written_is_read_back_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    disk = Disk(name="d", sizes_kib=[4, 64], depths=[1, 16], read_mb_per_s=[[40.5, 200.0], [400.0, 1000.0]])
    changes: list[dict[str, Any]] = [{}, {"gpu": None, "link": None}, {"disk": disk}]
    for found in (WHOLE.model_copy(update=update) for update in changes):
        path.write_text(found.to_toml(), encoding="utf-8")
        assert read_machine(path) == found


GOOD = Machine(name="n", source="s", cpu=WHOLE.cpu, gpu=WHOLE.gpu, link=WHOLE.link).to_toml()


@pytest.mark.parametrize(
    ("old", "new", "problems"),
    [
        ("sync_us", "sync_ms", ["link.sync_ms: unknown key; did you mean sync_us?", "link.sync_us: Field required"]),
        ("ram_gib", "ram_gb", ["cpu.ram_gb: unknown key; did you mean ram_gib?", "cpu.ram_gib: Field required"]),
        ("[gpu]", "[gpus]", ["gpus: unknown key; did you mean gpu?"]),
        ('source = "s"', "colour = 1", ["source: Field required", "colour: unknown key"]),
        ("cores = 8", "cores = 8.5", ["cpu.cores: Input should be a valid integer"]),
        ("cores = 8", "cores = 0", ["cpu.cores: Input should be greater than or equal to 1"]),
        ("vram_gib = 24.0", "vram_gib = nan", ["gpu.vram_gib: Input should be a finite number"]),
        ("vram_gib = 24.0", 'vram_gib = "24"', ["gpu.vram_gib: Input should be a valid number"]),
        ("= 67.2", "= 67200000000.0", ["cpu.bandwidth_gb_per_s: Input should be less than or equal to 1000000"]),
        ("sync_us = 0.1", "sync_us = -1.0", ["link.sync_us: Input should be greater than or equal to 0"]),
        (
            "[gpu]",
            "[cpu.format_gb_per_s]\nq9 = 3.0\n[gpu]",
            [
                "cpu.format_gb_per_s.q9: Input should be 'f32', 'f16', 'bf16', 'q8', 'q4', 'q5', 'q6', 'q4_1', 'q4z', "
                "'q5_1', 'q4_k', 'q5_k', 'q6_k', 'iq4_nl', 'iq4_xs', 'mxfp4' or 'nvfp4' "
                "(found 'q9'); "
                "did you mean q8?"
            ],
        ),
        (
            "[gpu]",
            "[cpu.gather_gb_per_s]\nf32 = 3.0\nf16 = 3.0\nbf16 = 3.0\n[gpu]",
            ["cpu.gather_gb_per_s: no rate for q8, q4; expected every format, or none"],
        ),
        (GOOD[GOOD.index("[link]") :], "", ["gpu and link go together: both or neither"]),
        (GOOD[GOOD.index("[cpu]") : GOOD.index("[gpu]")], "", ["cpu: Field required"]),
    ],
)
def test_every_problem_of_a_profile_is_named(old: str, new: str, problems: list[str], tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text(GOOD.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ProfileError) as caught:
        read_machine(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: invalid machine profile")
    assert [problem for problem in problems if f"\n    {problem}" not in message] == [], message


@pytest.mark.parametrize(("line", "found"), [("", "none"), ("version = 1\n", "1")])
def test_a_profile_of_another_version_is_refused(line: str, found: str, tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text(GOOD.replace("version = 2\n", line, 1), encoding="utf-8")
    with pytest.raises(ProfileError) as caught:
        read_machine(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: a machine profile of another version")
    for part in ("expected: version = 2", f"found: {found}", "pi-compile machine -o m.toml", "gather_gb_per_s"):
        assert part in message


def test_whole_numbers_will_do_for_decimals(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text(GOOD.replace("= 1000.0", "= 1000"), encoding="utf-8")
    assert read_machine(path).gpu == WHOLE.gpu


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ("sizes_kib = [64, 4]\ndepths = [1]\nread_mb_per_s = [[1.0, 2.0]]", "sizes_kib: expected rising values"),
        ("sizes_kib = [4, 64]\ndepths = [1]\nread_mb_per_s = [[1.0]]", "read_mb_per_s: expected a list for each"),
        ("sizes_kib = [4]\ndepths = [1]\nread_mb_per_s = [[0.0]]", "disk.read_mb_per_s.0.0"),
        ("sizes_kib = [4]\ndepth = [1]\nread_mb_per_s = [[1.0]]", "disk.depth: unknown key; did you mean depths?"),
    ],
)
def test_a_disk_has_a_rate_for_each_depth_and_size(values: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text(GOOD + f'[disk]\nname = "d"\n{values}\n')
    with pytest.raises(ProfileError, match=re.escape(problem)):
        read_machine(path)


def test_without_a_disk_a_profile_is_described_as_before_there_were_disks() -> None:
    assert WHOLE.described() == {k: v for k, v in WHOLE.model_dump().items() if k != "disk"}
