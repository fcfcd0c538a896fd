"""The manifest as canonical JSON: written, read, and checked as it is read."""

import reprlib
from collections.abc import Mapping
from itertools import islice
from typing import Any

from pi_runtime.artifact.checks import contradictions
from pi_runtime.artifact.decoding import MOST_PROBLEMS, canonical_json, decode, parse_json
from pi_runtime.artifact.features import FEATURES
from pi_runtime.artifact.schema import FORMAT_NAME, FORMAT_VERSION, Manifest
from pi_runtime.errors import ArtifactError

LARGEST = 4 << 20
"""Most bytes of a manifest: as Python objects they may take fifty times as much memory."""


def read_manifest(data: bytes, where: str) -> Manifest:
    """Parse and check a manifest. `where` names the file in messages. Raises ArtifactError listing every problem."""
    if len(data) > LARGEST:
        raise ArtifactError(f"{where}: the manifest has {len(data):,} bytes", expected=f"at most {LARGEST:,}")
    try:
        value = parse_json(data)
    except ValueError as error:
        raise ArtifactError(f"{where}: the manifest is not JSON", found=error) from None
    if not isinstance(value, dict) or value.get("format") != FORMAT_NAME:
        raise ArtifactError(f"{where}: not a {FORMAT_NAME} manifest")
    _check_version(value, where)
    problems: list[str] = []
    manifest: Manifest = decode(Manifest, value, "manifest", problems)
    problems = problems or list(islice(contradictions(manifest), MOST_PROBLEMS))
    if problems:
        raise ArtifactError(f"{where}: invalid manifest", found=_shortened(problems))
    if not _is_canonical(manifest, data):
        raise ArtifactError(f"{where}: the manifest is not in canonical JSON")
    return manifest


def _check_version(value: Mapping[str, Any], where: str) -> None:
    """Refuse another version, and a feature that this release lacks: whatever else such a file may say is not read."""
    version, features = value.get("version"), value.get("features")
    if type(version) is not int or version != FORMAT_VERSION:
        raise wrong_version(where, version)
    named = {name for name in features if type(name) is str} if isinstance(features, list) else set()
    lacking = sorted(named - FEATURES.keys())
    if lacking:
        raise ArtifactError(
            f"{where}: the file uses what this release lacks",
            expected=f"features among: {', '.join(sorted(FEATURES)) or 'none'}",
            found=_shortened([", ".join(lacking)]).strip(),
            remedy="use the release that wrote it, or a later one; or pack the model again with `pi-compile build`",
        )


def wrong_version(where: str, version: object) -> ArtifactError:
    """The error for an artifact of another format version."""
    return ArtifactError(
        f"{where}: artifact format version {reprlib.repr(version)}",
        expected=f"version {FORMAT_VERSION}",
        remedy="pack it again: `pi-compile build RECIPE -o FILE`, or `pi-compile pack --plain MODEL -o FILE`",
    )


def _shortened(problems: list[str]) -> str:
    """One problem a line. They may quote a hostile file, so nothing unprintable stays, and the text is limited."""
    lines = ["".join(c if c.isprintable() else "�" for c in p[:300]) for p in problems[:50]]
    more = [f"… and {len(problems) - 50} more"] if len(problems) > 50 else []
    return "".join(f"\n    {line}" for line in (*lines, *more))


def _is_canonical(manifest: Manifest, data: bytes) -> bool:
    """Whether `data` is the canonical JSON of the manifest."""
    try:
        return canonical_json(manifest) == data
    except ValueError:  # lone surrogates
        return False
