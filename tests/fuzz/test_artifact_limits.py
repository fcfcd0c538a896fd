"""The largest lies that an artifact's manifest and directory can hold: refused in little time and memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.forge import Forged, change_manifest, put_together, refusal, refused, take_apart
from support.fuzz.watched import watched
from support.paths import GOLDEN

from pi_runtime.artifact.reader import Artifact

LARGEST = 4 << 20
OTHER_BYTES = 1 << 16
"""Room for the rest of the manifest."""


def listed(element: str) -> str:
    return f"[{','.join([element] * ((LARGEST - OTHER_BYTES) // (len(element) + 1)))}]"


# What a manifest holds in place of a value: written as text, because a list of a million lists takes memory here.
LISTS: dict[str, str] = {
    "problems": listed("0"),
    "lists": listed("[]"),
    "objects": listed('{"":0}'),
    "numbers": listed("1e9"),
    "keys": "{" + ",".join(f'"{n:06x}":0' for n in range((LARGEST - OTHER_BYTES) // 11)) + "}",
    "depth": "[" * (LARGEST // 2 - OTHER_BYTES) + "]" * (LARGEST // 2 - OTHER_BYTES),
}


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("key", ["layers", "generation", "recipe", "arrays"])
def test_a_manifest_full_of_it(tmp_path: Path, key: str, kind: str) -> None:
    entries = take_apart(GOLDEN)
    change_manifest(entries, lambda manifest: manifest.update({key: "HERE"}))
    entries[-1].data = entries[-1].data.replace(b'"HERE"', LISTS[kind].encode())
    assert LARGEST - 3 * OTHER_BYTES < len(entries[-1].data) < LARGEST
    path = tmp_path / "a.pi"
    path.write_bytes(put_together(entries))
    with watched(f"{kind} in {key}"):
        if (key, kind) == ("recipe", "keys"):  # a recipe may hold anything
            Artifact.open(path).close()
        else:
            assert len(refusal(path)) < 32_000


def test_a_manifest_that_is_too_large(tmp_path: Path) -> None:
    entries = take_apart(GOLDEN)
    change_manifest(entries, lambda manifest: manifest.update(recipe={"x": "y" * LARGEST}))
    assert "manifest.json" in refused(tmp_path / "a.pi", put_together(entries))


SIZES = ("vocab_size", "d_model", "d_embedding", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "n_experts")


@pytest.mark.parametrize("name", SIZES)
def test_a_decoder_that_claims_millions(tmp_path: Path, name: str) -> None:
    """No size takes memory before the arrays have confirmed it. A list of 8 Mi elements would show, and hurt nobody."""
    entries = take_apart(GOLDEN)
    change_manifest(entries, lambda manifest: manifest["decoder"].update({name: 8 << 20}))
    data = put_together(entries)
    with watched(name):
        refused(tmp_path / "a.pi", data)


DIRECTORIES: dict[str, Callable[[int], bytes]] = {
    "short names": lambda n: b"%x" % n,
    "the same name": lambda _: b"embedding/c/0/0",
    "no names": lambda _: b"",
}


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_a_directory_full_of_entries(tmp_path: Path, kind: str) -> None:
    """As many records as 16 MiB hold, where the manifest has a few."""
    entries: list[Any] = take_apart(GOLDEN)
    size = 46 + len(DIRECTORIES[kind](1 << 16))
    entries[-1:-1] = [Forged(DIRECTORIES[kind](n), b"") for n in range((16 << 20) // size - 3 * len(entries))]
    data = put_together(entries, count=0xFFFF)
    with watched(kind):
        refused(tmp_path / "a.pi", data)
