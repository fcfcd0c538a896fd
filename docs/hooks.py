"""What mkdocs does beside building: pages are made of the command lines, and nothing may come from elsewhere."""

import logging
import re
from pathlib import Path
from typing import Any

import typer
import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import pi_compile.cli.main
import pi_runtime.cli
import pi_runtime.server.cli

LOG = logging.getLogger("mkdocs.hooks.docs")
ROOT = Path(__file__).parents[1]
APPS = {"pi-compile": pi_compile.cli.main.app, "pi-run": pi_runtime.cli.app, "pi-serve": pi_runtime.server.cli.app}
OUTSIDE = {"how-to/contributing.md": "CONTRIBUTING.md", "reference/changelog.md": "CHANGELOG.md"}
"""Pages that lie in the repository's root."""
FOREIGN = re.compile(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="?(?:https?:)?//[^">]+')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    for page, name in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](../")
        files.append(File.generated(config, page, content=text))
    return files


def on_post_page(output: str, page: Any, **_options: Any) -> str:
    """Warn of a page that would load anything from elsewhere; with --strict that ends the build."""
    for found in FOREIGN.findall(output):
        LOG.warning("%s loads %s", page.file.src_uri, found)
    return output


def commands_page() -> str:
    """Every command with its arguments and flags, as `--help` has them."""
    lines = ["# Commands", "", "Made of the command lines themselves. `--help` prints the same."]
    for program, app in APPS.items():
        command: Any = typer.main.get_command(app)
        commands = getattr(command, "commands", {"": command})
        lines += ["", f"## {program}", "", command.help or ""]
        for name, one in commands.items():
            lines += ["", f"### {program} {name}", "", one.help] if name else []
            context = typer.Context(one)
            lines += ["", "| | |", "| --- | --- |", *(row(*p.get_help_record(context)) for p in one.params)]
    return "\n".join(lines) + "\n"


def row(names: str, text: str) -> str:
    """A row of a command's table: how a flag is written, and what it does; defaults and variables in italics."""
    text, bracket, facts = text.partition("  [")
    return f"| `{names}` | {text} {f'*{facts[:-1]}*' if bracket else ''} |"
