"""Two processes that have one artifact open share its pages in memory."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.synthetic import random_artifact, small_decoder

from pi_runtime.artifact.reader import Artifact

pytestmark = pytest.mark.slow

READ = """
import sys
from pi_runtime.artifact.reader import Artifact
artifact = Artifact.open(__import__("pathlib").Path(sys.argv[1]))
sum(int(artifact.array(name).view("u1").sum()) for name in artifact.manifest.arrays)
print("read", flush=True)
sys.stdin.readline()
"""


def kilobytes(smaps: Path, file: Path) -> dict[str, int]:
    """Sums over the mappings of one file in /proc/PID/smaps."""
    sums: dict[str, int] = {}
    ours = False
    for line in smaps.read_text().splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            ours = line.endswith(str(file))
        elif ours and values[-1:] == ["kB"]:
            sums[key] = sums.get(key, 0) + int(values[0])
    return sums


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_processes_share_the_pages_of_one_artifact(tmp_path: Path) -> None:
    path = random_artifact(tmp_path / "a.pi", small_decoder(d_model=256, d_ff=1024))
    with Artifact.open(path) as artifact:
        for name in artifact.manifest.arrays:
            artifact.array(name).sum()
        with subprocess.Popen(
            [sys.executable, "-c", READ, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "read\n"
            found = kilobytes(Path(f"/proc/{other.pid}/smaps"), path)
            other.communicate("\n")
    assert found["Rss:"] * 1024 > path.stat().st_size // 2
    assert found["Private_Clean:"] + found["Private_Dirty:"] < found["Rss:"] // 10
