"""Runs tests on arm64 under QEMU's user emulation: a Debian of that architecture, with wheels of that architecture.

    python tests/support/arm64.py FOLDER [PYTEST ARGUMENTS …]

Needs root on Debian, and its packages `debootstrap` and `qemu-user-static`. FOLDER keeps the Debian and the compiled
kernels: the second run needs no network. The repository is mounted there, in a mount namespace of the run's own.
"""

import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUITE, PYTHON, QEMU = "bookworm", "3.11", "/usr/bin/qemu-aarch64-static"
"""A release of Debian, the Python that it has, and the emulator."""
PACKAGES = "python3,libgomp1"
PLATFORMS = [f"manylinux{name}_aarch64" for name in ("2014", "_2_17", "_2_24", "_2_26", "_2_27", "_2_28")]
HEADER = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
"""How an executable for arm64 begins, as the kernel's table of interpreters names it."""
MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
TABLE = Path("/proc/sys/fs/binfmt_misc")
TESTS = ["tests/runtime/kernels", "tests/runtime/execution", "tests/runtime/artifact"]


def register_emulator() -> None:
    """Have the kernel start executables for arm64 with QEMU, which is opened now: it need not lie in the Debian."""
    if not (TABLE / "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", TABLE], check=True)
    if not (TABLE / "qemu-aarch64").exists():
        (TABLE / "register").write_text(f":qemu-aarch64:M::{HEADER}:{MASK}:{QEMU}:F")


def install(debian: Path) -> None:
    """Make the Debian, and put what the runtime and its tests import into it. Wheels are taken by this Python's pip."""
    if not (debian / "usr" / "bin" / "python3").exists():
        command = ["debootstrap", "--arch=arm64", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(debian)]
        subprocess.run(command, check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["test"]]
    stamp = debian / "opt" / "wanted.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(wanted):
        platforms = [f"--platform={name}" for name in PLATFORMS]
        target = [
            "--target",
            str(debian / "opt" / "site"),
            "--upgrade",
            "--only-binary=:all:",
            "--python-version",
            PYTHON,
        ]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *platforms, *target, *wanted], check=True)
        stamp.write_text("\n".join(wanted))


def run(debian: Path, command: Sequence[str]) -> int:
    """Run a command in the Debian, in the repository; returns its exit status."""
    variables = {
        "HOME": "/root", "PATH": "/usr/bin:/bin", "PYTHONPATH": "/opt/site:/src:/src/tests", "LC_ALL": "C.UTF-8",
        "PI_CACHE_DIR": "/opt/kernels", "NUMBA_NUM_THREADS": "2", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    mounts = [("--bind", str(ROOT), "src"), ("-t proc", "proc", "proc"), ("--rbind", "/dev", "dev")]
    lines = ["set -e"]
    for how, what, where in mounts:
        (debian / where).mkdir(exist_ok=True)
        lines.append(f"mount {how} {shlex.quote(what)} {shlex.quote(str(debian / where))}")
    settings = shlex.join(f"{name}={value}" for name, value in variables.items())
    lines.append(f"exec chroot {shlex.quote(str(debian))} env -i -C /src {settings} {shlex.join(command)}")
    return subprocess.run(["unshare", "--mount", "sh", "-c", "\n".join(lines)], check=False).returncode


def main() -> int:
    if os.geteuid() or not Path(QEMU).exists():
        print("needs root, and `apt-get install debootstrap qemu-user-static`", file=sys.stderr)
        return 2
    debian, asked = Path(sys.argv[1]).absolute(), sys.argv[2:] or TESTS
    register_emulator()
    debian.mkdir(parents=True, exist_ok=True)
    install(debian)
    # A test that compiles kernels takes longer than the suite's limit there.
    return run(debian, ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=7200", *asked])


if __name__ == "__main__":
    sys.exit(main())
