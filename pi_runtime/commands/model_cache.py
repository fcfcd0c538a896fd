"""Models that are no artifacts yet: packed once, by `pi-compile` in a process of its own, into the user's cache.

An entry is an artifact, `NAME-KEY.pi`. Its key is the digest of what decides its bytes: the version of this project,
which decides what `init` proposes, and the files of the model. Of each file it takes name, size, times of the last
change (of the content, which a copy may keep, and of the file, which nothing keeps), and samples from all over it:
reading 100 GB would take minutes, at every start. A hub name is a key by itself, so that a model that is packed needs
no network; `rm` forgets it.
"""

import glob
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pi_runtime import console
from pi_runtime.commands.options import KV_DISK
from pi_runtime.errors import PiError, UsageError, size
from pi_runtime.errors.exit_codes import INTERRUPTED
from pi_runtime.files import hold, locked, remove_unfinished, unused, user_cache

if TYPE_CHECKING:
    from pi_runtime.artifact.schema import Manifest
    from pi_runtime.commands.options import SourceOptions
    from pi_runtime.engine.page_files import StoredRun

_GGUF = (b"GGUF", b"PWRI")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?")
_READ = (".gguf", ".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")
"""Endings of the files of a model that packing reads."""
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf", re.DOTALL)
_HEAD = 1 << 20
_SAMPLES, _SAMPLE = 64, 1 << 14
"""Places of a file that a key takes so many bytes of, behind its first MiB."""
_KILL = 9
_PATIENCE_S = 10.0
"""Seconds in which a packer that is to end has removed what it has begun."""

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=console.HELP)


def checked_artifact(options: "SourceOptions") -> Path:
    """The artifact that a command is to run, packed and verified as asked. Raises ArtifactError for a damaged one."""
    path = artifact_of(options.artifact, options.cache_limit)
    if options.verify:
        from pi_runtime.artifact.verification import verify

        with console.progress("verifying") as bar:
            verify(path, bar)
    return path


def artifact_of(model: Path, limit: int | None) -> Path:
    """The artifact of what a command names: the path itself, or of a model its entry in the cache, packed if need be.

    With a `limit` in bytes, what was used longest ago is removed after packing. Ends the command where packing fails,
    which has said why.
    """
    parts = None if model.suffix == ".pi" else _key_parts(model)
    if parts is None:
        return model
    key = hashlib.sha256(os.fsencode("\0".join([version("pi-toolchain"), *parts]))).hexdigest()[:16]
    name = re.sub(r"[^\w.-]", "-", name_of(model))
    target = _folder() / f"{name}-{key}.pi"
    try:
        while True:  # one that was removed before it was held is packed again
            with suppress(OSError):  # a cache that may only be read
                hold(_mark(target))
            if target.exists():
                break
            with locked(target, lambda: console.say(f"{model}: another process is packing it; waiting for that one")):
                if not target.exists():  # the process that was waited for has made it
                    _pack(model, target)
                    _keep_within(limit, target)
        _check_owner(target)
    finally:
        if not target.exists():
            _mark(target).unlink(missing_ok=True)
    return target


def name_of(model: Path) -> str:
    """What a model is called: its file or folder, without the ending of a file of a model."""
    name = model.resolve().name
    return next((name.removesuffix(end) for end in (".pi", ".gguf") if name.endswith(end)), name)


def _check_owner(entry: Path) -> None:
    """Raise UsageError for an entry of somebody who is neither this user nor the folder's owner, nor root."""
    if sys.platform == "win32":
        return
    owner, trusted = entry.stat().st_uid, {os.geteuid(), entry.parent.stat().st_uid, 0}
    if owner not in trusted:
        raise UsageError(
            f"{entry}: a packed model of another user, in a folder that is not theirs",
            expected="one that you, the folder's owner or root made",
            found=f"user {owner}",
            remedy="PI_CACHE_DIR=FOLDER, a folder of your own",
        )


def _mark(path: Path) -> Path:
    """A file whose time is when an entry was used last: reading a file, as `list` does, may change its own."""
    return path.with_name(f".{path.name}.used")


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    _mark(path).unlink(missing_ok=True)


def _key_parts(model: Path) -> list[str] | None:
    """What tells this model from others; None where it is no model that can be packed."""
    if model.is_dir():
        files = sorted(path for path in model.iterdir() if path.suffix in _READ and path.is_file())
        if not any(path.name == "config.json" or path.suffix == ".gguf" for path in files):
            return None
        return [model.resolve().name, *map(_file_key, files)]
    if model.is_file():
        with model.open("rb") as file:
            if model.suffix != ".gguf" and not file.read(4).startswith(_GGUF):
                return None
        part = _PART.fullmatch(model.name)
        # Brackets in a name are no pattern.
        pattern = f"{glob.escape(part[1])}-?????-of-{part[2]}.gguf" if part else ""
        return list(map(_file_key, sorted(model.parent.glob(pattern)) if part else [model]))
    is_hub_name = _HUB_NAME.fullmatch(model.as_posix()) and not model.parent.exists()
    return [model.as_posix()] if is_hub_name else None


def _file_key(path: Path) -> str:
    found = path.stat()
    with path.open("rb") as file:
        sampled = hashlib.sha256(file.read(_HEAD))
        for n in range(1, _SAMPLES + 1 if found.st_size > _HEAD else 1):
            file.seek(max(_HEAD, (found.st_size - _SAMPLE) * n // _SAMPLES))
            sampled.update(file.read(_SAMPLE))
    return f"{path.name} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {sampled.hexdigest()}"


def _folder() -> Path:
    """Where packed models are kept. Raises UsageError where there can be no such folder."""
    try:
        folder = user_cache() / "models"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        raise UsageError("no folder for packed models", found=error, remedy="PI_CACHE_DIR=FOLDER") from None
    return folder


def _pack(model: Path, target: Path) -> None:
    """Have `pi-compile` pack a model, and say what came of it."""
    console.say(f"{model}: not packed yet; packing it once, as `pi-compile init` proposes")
    began = time.perf_counter()
    # -P: nothing is imported from the working folder.
    command = [sys.executable, "-P", "-m", "pi_compile", "pack", "--plain", model.as_posix(), "-o", str(target)]
    remove_unfinished(target.parent)
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    with _ended_with(child):
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.wait()  # Ctrl-C went to it too: it removes what it has begun, and says so
            raise SystemExit(INTERRUPTED) from None
    if code < 0:
        why = ", as the system does with what takes more memory than there is" if code == -_KILL else ""
        console.say(f"{model}: packing was ended by {signal.Signals(-code).name}{why}")
        raise typer.Exit(128 - code)
    if code != 0:
        raise typer.Exit(code)
    entry = Entry.read(target)
    seconds = time.perf_counter() - began
    console.say(f"{model}: packed in {seconds:.1f} s, {size(entry.nbytes)} in {entry.formats}: {target}")


@contextmanager
def _ended_with(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """See to it that who ends this process by a signal ends the child too, which removes what it has begun."""

    def end(number: int, _frame: object) -> None:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            child.kill()
        raise SystemExit(128 + number)

    before = {}
    if sys.platform != "win32" and threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Entry:
    """One packed model of the cache."""

    path: Path
    nbytes: int
    used_s: float
    """When it was used last, in seconds since 1970."""
    manifest: "Manifest | None"
    """None where it can no longer be read."""

    @classmethod
    def read(cls, path: Path) -> "Entry":
        """The entry of a file."""
        from pi_runtime.artifact.reader import Artifact

        try:
            artifact = Artifact.open(path)
        except PiError:
            manifest = None
        else:
            manifest = artifact.manifest
            artifact.close()
        mark = _mark(path)
        return cls(path, path.stat().st_size, (mark if mark.exists() else path).stat().st_mtime, manifest)

    @property
    def model(self) -> str:
        """What was packed, as it was called."""
        source = self.manifest.recipe.get("model", {}) if self.manifest else {"path": "(unreadable)"}
        return str(source.get("path", ""))

    @property
    def formats(self) -> str:
        """Number formats, and the parts in each."""
        named = self.manifest.formats if self.manifest else {}
        formats = {part: name for part, name in named.items() if "/" not in part}  # single matrices are not told
        parts = {name: [part for part in formats if formats[part] == name] for name in dict.fromkeys(formats.values())}
        return ", ".join(f"{name} ({', '.join(of)})" if len(parts) > 1 else name for name, of in parts.items())


def _entries() -> list[Entry]:
    """All packed models, the one used last first."""
    found = []
    remove_unfinished(_folder())
    for path in _folder().glob("*.pi"):
        with suppress(FileNotFoundError):  # another process removes it
            found.append(Entry.read(path))
    return sorted(found, key=lambda entry: -entry.used_s)


def _keep_within(limit: int | None, used: Path) -> None:
    """Remove what was used longest ago until all is within the limit; `used` stays."""
    entries = _entries() if limit is not None else []
    total = sum(entry.nbytes for entry in entries)
    for entry in reversed([entry for entry in entries if entry.path != used]):
        if limit is None or total <= limit:
            break
        with unused(_mark(entry.path)) as free:
            if not free:
                continue
            _remove(entry.path)
            total -= entry.nbytes
            console.say(f"--cache-limit {size(limit)}: {entry.path.name} ({entry.model}) was removed")


_EPILOG = """
Examples:
  pi-run list
  pi-run list --kv-disk prefixes
  pi-run rm NAME

More: docs/how-to/operate.md
"""


@app.command("list", cls=console.GroupedCommand, epilog=_EPILOG)
def show(
    kv_disk: Annotated[Path | None, KV_DISK] = None,
    as_json: Annotated[bool, console.JSON] = False,
    debug: Annotated[bool, console.DEBUG] = False,
) -> None:
    """List the models that were packed into the cache, and the keys and values in a folder of --kv-disk, the one used
    last first."""
    models = [_row(entry) for entry in _entries()]
    stored = [_run_row(run) for run in _stored(kv_disk)]
    found: dict[str, Any] = {"folder": str(_folder()), "bytes": sum(row["bytes"] for row in models), "models": models}
    if kv_disk is not None:
        found["kv_disk"] = {"folder": str(kv_disk), "bytes": sum(row["bytes"] for row in stored), "runs": stored}
    if as_json:
        console.print_json(found)
        return
    tables = [[{**row, "bytes": size(row["bytes"])} for row in rows] for rows in (models, stored) if rows]
    if tables:
        typer.echo(console.text_of(*(console.table(rows, left=("model", "formats", "mode")) for rows in tables)))
    console.say(f"{len(models)} packed models, {size(found['bytes'])}, in {_folder()}")
    if kv_disk is not None:
        console.say(f"keys and values of {len(stored)} runs, {size(found['kv_disk']['bytes'])}, in {kv_disk}")


def _row(entry: Entry) -> dict[str, Any]:
    found = {"name": entry.path.stem, "model": entry.model, "formats": entry.formats, "bytes": entry.nbytes}
    return {**found, "used": _shown_time(entry.used_s)}


def _run_row(run: "StoredRun") -> dict[str, Any]:
    words = {"model": run.run.get("name", "(unreadable)"), "mode": run.run.get("mode", "")}
    return {"name": run.name, **words, "bytes": run.nbytes, "used": _shown_time(run.used_s)}


def _shown_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _stored(folder: Path | None) -> "list[StoredRun]":
    """The keys and values in a folder of `--kv-disk`, run by run."""
    from pi_runtime.engine.page_files import stored_runs

    return [] if folder is None else stored_runs(folder)


@app.command("rm", cls=console.GroupedCommand, epilog=_EPILOG)
def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="As `pi-run list` has it.", show_default=False)],
    kv_disk: Annotated[Path | None, KV_DISK] = None,
    debug: Annotated[bool, console.DEBUG] = False,
) -> None:
    """Remove packed models from the cache, or keys and values from a folder of --kv-disk; their sources stay."""
    entries, runs = _entries(), _stored(kv_disk)
    for name in names:
        found = [entry for entry in entries if name in (entry.path.name, entry.path.stem)]
        found = found or [entry for entry in entries if name == entry.model]
        stored = [] if found else [run for run in runs if name in (run.name, run.run.get("name"))]
        there = ", ".join([entry.path.stem for entry in found or entries] + [run.name for run in stored or runs])
        if not found and not stored:
            raise UsageError(f"{name}: no such packed model", found=there or "none", remedy="pi-run list")
        if len(found) > 1:
            raise UsageError(f"{name}: several packed models", found=there, remedy="name each of those to be removed")
        for entry in found:
            _remove(entry.path)
        for run in stored:
            for path in run.paths:
                path.unlink(missing_ok=True)
        nbytes = sum(entry.nbytes for entry in found) + sum(run.nbytes for run in stored)
        console.say(f"{found[0].path.stem if found else name}: removed, {size(nbytes)}")
