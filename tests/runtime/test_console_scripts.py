"""What every command has: `--version`, and completion for shells."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMMANDS = {
    "pi-run": "pi_runtime.commands.run",
    "pi-serve": "pi_runtime.commands.serve",
    "pi-compile": "pi_compile.cli.main",
}


def started(command: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The console script `command`, as pip writes it."""
    code = f"import sys; sys.argv[0] = {command!r}; from {COMMANDS[command]} import main; main()"
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_these_are_all_commands() -> None:
    assert PROJECT["scripts"] == {name: f"{module}:main" for name, module in COMMANDS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_version_is_that_of_the_project(command: str) -> None:
    done = started(command, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"pi-toolchain {PROJECT['version']}\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("pi-run --cache-f", ["--cache-format"]),
        ("pi-serve --ssl", ["--ssl-certfile", "--ssl-keyfile"]),
        ("pi-compile pl", ["place", "plan"]),
        ("pi-compile place --lock", ["--lock", "--locked"]),
    ],
)
def test_a_shell_completes_commands_and_flags(words: str, wanted: list[str]) -> None:
    command = words.split(maxsplit=1)[0]
    variables = {
        f"_{command.upper().replace('-', '_')}_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    done = started(command, **variables)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, wanted, "")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_takes_the_script_that_is_installed(tmp_path: Path) -> None:
    command = tmp_path / "pi-run"
    command.write_text(f"#!{sys.executable}\nimport sys\nfrom pi_runtime.commands.run import main\nmain()\n")
    command.chmod(0o755)
    script = started("pi-run", _PI_RUN_COMPLETE="source_bash").stdout
    asked = "COMP_WORDS=(pi-run --see); COMP_CWORD=1; _pi_run_completion pi-run; echo ${COMPREPLY[@]}"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{asked}"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "--seed\n", "")
