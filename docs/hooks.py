"""What mkdocs does beside building: pages are made of the command lines, and nothing may come from elsewhere."""

import inspect
import logging
import re
from pathlib import Path
from typing import Any

import typer
import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import pi_compile.cli.main
import pi_runtime.commands.flood
import pi_runtime.commands.model_cache
import pi_runtime.commands.run
import pi_runtime.commands.serve
from pi_runtime import console

LOG = logging.getLogger("mkdocs.hooks.docs")
ROOT = Path(__file__).parents[1]
APPS = {
    "pi-compile": (pi_compile.cli.main.app,),
    "pi-run": (pi_runtime.commands.run.app, pi_runtime.commands.model_cache.app, pi_runtime.commands.flood.app),
    "pi-serve": (pi_runtime.commands.serve.app,),
}
API = {
    "Compiling": (
        "pi_compile.checkpoint.open_checkpoint",
        *(f"pi_compile.pipeline.stages.{name}" for name in ("read_corpus", "profile", "train", "place", "pack")),
        "pi_compile.evaluation.fidelity.evaluate",
    ),
    "Running": (
        *("pi_runtime.engine.loading.load", "pi_runtime.engine.model.Model", "pi_runtime.sequence.sampling.Sampling"),
        *("pi_runtime.engine.engine.Engine", "pi_runtime.text.grammar.Grammar"),
    ),
}
"""The public names, where they are defined."""
OUTSIDE = {
    "index.md": "README.md",
    "how-to/contributing.md": "CONTRIBUTING.md",
    "reference/changelog.md": "CHANGELOG.md",
}
"""Pages that lie in the repository's root."""
FOREIGN = re.compile(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="?(?:https?:)?//[^">]+')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    for page, name in OUTSIDE.items():
        up = "../" * page.count("/")
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", f"]({up}")
        for other, linked in OUTSIDE.items():
            text = text.replace(f"]({linked}", f"]({up}{other}")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_options: Any) -> str:
    """Put the docstrings of the public names behind the page on Python; README is the first page."""
    markdown = markdown.replace("](../../README.md", "](../index.md")
    return markdown + api() if page.file.src_uri == "reference/python.md" else markdown


def on_post_page(output: str, page: Any, **_options: Any) -> str:
    """Warn of a page that would load anything from elsewhere; with --strict that ends the build."""
    for found in FOREIGN.findall(output):
        LOG.warning("%s loads %s", page.file.src_uri, found)
    return output


def commands_page() -> str:
    """Every command with its arguments and flags, as `--help` has them."""
    lines = ["# Commands", "", "Made of the command lines themselves. `--help` prints the same."]
    for program, apps in APPS.items():
        commands: list[Any] = [typer.main.get_command(app) for app in apps]
        lines += ["", f"## {program}", "", commands[0].help or ""]
        alone = [{"" if command is commands[0] else command.name: command} for command in commands]
        pairs = zip(commands, alone, strict=True)
        named = [pair for command, one in pairs for pair in getattr(command, "commands", one).items()]
        for name, one in named:
            lines += ["", f"### {program} {name}", "", one.help] if name else []
            records = [console.help_record(parameter, typer.Context(one)) for parameter in one.params]
            rows = [row(*record) for record in records if record is not None]
            lines += ["", "| argument or flag | meaning |", "| --- | --- |", *rows]
            examples = inspect.cleandoc((one.epilog or "").partition("Examples:")[2].partition("More:")[0])
            lines += ["", "```console", examples, "```"] if examples else []
    return "\n".join(lines) + "\n"


def api() -> str:
    """The public functions and classes, which mkdocstrings fills in from their docstrings."""
    parts = [f"## {title}\n\n" + "\n\n".join(f"::: {name}" for name in names) for title, names in API.items()]
    return "\n" + "\n\n".join(parts) + "\n"


def row(names: str, text: str) -> str:
    """A row of a command's table: how a flag is written, and what it does; defaults and variables in italics."""
    text, bracket, facts = text.partition("  [")
    return f"| `{names}` | {text} {f'*{facts[:-1]}*' if bracket else ''} |"
