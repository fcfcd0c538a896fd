"""Every block of commands or of Python in the docs runs, page by page as a reader would, or says why it does not."""

import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.documents import DOCS, Block, blocks, commands
from support.paths import ROOT

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("starlette")
pytest.importorskip("gguf")

from support.gguf_files import write_gguf
from support.serving import serving

from pi_compile.cli.main import app as pi_compile
from pi_compile.recipe import Recipe, read_recipe
from pi_runtime import console
from pi_runtime.commands.run import app as pi_run

PAGES = {path.relative_to(ROOT).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
PAGES |= {name: ROOT / name for name in ("README.md", "CONTRIBUTING.md")}
LANGUAGES = {"console", "python", "text", "toml", "json", "yaml", "nginx"}
CHECKED = ("console", "python")
ADDRESS = "http://127.0.0.1:8080"


def blocks_of(page: str) -> list[Block]:
    return blocks(PAGES[page].read_text(encoding="utf-8"))


def unmarked(page: str) -> list[Block]:
    return [block for block in blocks_of(page) if block.language in CHECKED and not block.mark]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_language(page: str) -> None:
    assert {block.language for block in blocks_of(page)} <= LANGUAGES


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_block_names_is_there(page: str) -> None:
    for block in blocks_of(page):
        if block.mark == "run by":
            path, _, name = block.said.partition("::")
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), block.line


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has: a checkpoint, texts, a recipe and its artifact. It is the bundled model, read in haste."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "recipes" / "demo", folder / "checkpoint", ignore=shutil.ignore_patterns(".*"))
    for name in ("docs", "profiles", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "texts").mkdir()
    shutil.copy(DOCS / "explanation" / "fidelity.md", folder / "texts")
    shutil.copy(DOCS / "explanation" / "pipeline.md", folder / "held-out.txt")
    (folder / "prompts.jsonl").write_text('{"id": "a1", "prompt": "Once upon a time", "max_tokens": 40}\n')
    write_gguf(folder / "checkpoint", folder / "model.gguf", "f32")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PI_THREADS", "1")
        for command in ("pi-compile init checkpoint --corpus texts/ -o model.toml", "pi-compile build model.toml"):
            run_command(command)
    return folder


def make_small(path: Path) -> None:
    """Change a recipe so that it takes a second, not minutes."""
    data = read_recipe(path).model_dump()
    data["corpus"] |= {"fit_tokens": 1024, "tune_tokens": 128, "report_tokens": 128}
    data["profile"] |= {"window": 64, "cofiring_tokens": 64}
    data["train"] |= {"tokens": 256, "steps": 2}
    data["place"] |= {"machine": "stand-in"}  # on which a placement pays for so small a model
    path.write_text(Recipe.model_validate(data).to_toml(), encoding="utf-8")


def run_command(command: str) -> None:
    """One line of a block, in this process."""
    program, *arguments = shlex.split(command)
    if arguments[0] == "init":
        recipe = Path(arguments[arguments.index("-o") + 1])
        recipe.unlink(missing_ok=True)  # a reader begins without one
        assert console.run(pi_compile, arguments) == 0, command
        make_small(recipe)
    elif program in ("pi-compile", "pi-run"):
        assert console.run({"pi-compile": pi_compile, "pi-run": pi_run}[program], arguments) == 0, command
    elif program == "python":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", arguments)
            runpy.run_path(arguments[0], run_name="__main__")
    elif program == "curl":
        subprocess.run([program, "--fail", "--silent", "--show-error", *arguments], check=True)
    else:
        raise AssertionError(f"{command}: run by no test; mark the block and say why")


@pytest.fixture
def run_block(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Block], None]]:
    """Runs blocks one after the other in a copy of the project. A server that one starts runs on for the others."""
    folder, names, address = tmp_path / "project", {}, [ADDRESS]
    shutil.copytree(project, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PI_THREADS", "1")  # tests run side by side, and threads that wait for each other hinder them
    with ExitStack() as servers:

        def run(block: Block) -> None:
            text = block.text.replace(ADDRESS, address[0])
            if block.language == "python":
                exec(compile(text, "block", "exec"), names)  # noqa: S102
                return
            for command in commands(text):
                if command == "pi-serve model.pi":
                    address[0] = servers.enter_context(serving(folder / "model.pi")).url
                else:
                    run_command(command)

        yield run


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if unmarked(page)])
def test_the_blocks_of_a_page_run(page: str, run_block: Callable[[Block], None]) -> None:
    for block in unmarked(page):
        run_block(block)
