"""The manifest as canonical JSON: written, read, and checked as it is read."""

import reprlib
from itertools import islice

from pi_runtime.artifact.checks import contradictions
from pi_runtime.artifact.decoding import MOST_PROBLEMS, canonical_json, decode, parse_json
from pi_runtime.artifact.schema import FORMAT_NAME, FORMAT_VERSION, REMEDY, Manifest
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
    if value.get("version") != FORMAT_VERSION:
        raise wrong_version(where, value.get("version"))
    problems: list[str] = []
    manifest: Manifest = decode(Manifest, value, "manifest", problems)
    problems = problems or list(islice(contradictions(manifest), MOST_PROBLEMS))
    if problems:
        raise ArtifactError(f"{where}: invalid manifest", found=_shortened(problems), remedy=REMEDY)
    if not _is_canonical(manifest, data):
        raise ArtifactError(f"{where}: the manifest is not in canonical JSON", remedy=REMEDY)
    return manifest


def wrong_version(where: str, version: object) -> ArtifactError:
    """The error for an artifact of another format version."""
    return ArtifactError(
        f"{where}: artifact format version {reprlib.repr(version)}",
        expected=f"version {FORMAT_VERSION}",
        remedy="pack it again with `pi-compile build`, or use the release that wrote it",
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
