"""Artifacts with lies that their checksums do not betray: refused as such, in little time and memory, or sound."""

from contextlib import suppress
from pathlib import Path

import pytest
from support.fuzz.artifacts import Forger, Lie
from support.fuzz.cases import Cases
from support.fuzz.watched import watched
from support.paths import GOLDEN
from support.synthetic import counted_artifact, random_artifact, small_decoder

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.verification import verify
from pi_runtime.errors import ArtifactError, DoesNotFitError, PromptError
from pi_runtime.execution.plan_choice import choose_plan
from pi_runtime.text.tokenizer import Tokenizer

SHORT = 400


@pytest.fixture(scope="module")
def forgers(tmp_path_factory: pytest.TempPathFactory) -> list[Forger]:
    folder = tmp_path_factory.mktemp("sound")
    experts = small_decoder(n_experts=3, experts_per_token=2)
    paths = [
        GOLDEN,
        random_artifact(folder / "opt.pi", small_decoder("opt"), format="f16", ranks=[2, None], profiled=True),
        random_artifact(folder / "experts.pi", experts, format="q8"),
        counted_artifact(folder / "groups.pi", small_decoder(d_model=256, n_heads=8, head_dim=32, d_ff=256), "q6_k"),
    ]
    return [Forger(path) for path in paths]


def opens(path: Path) -> bool:
    """Whether the structure is sound; then all that reads it without running it must cope with it."""
    try:
        artifact = Artifact.open(path)
    except ArtifactError:
        return False
    with artifact:
        look_at(artifact)
    return True


def look_at(artifact: Artifact) -> None:
    manifest = artifact.manifest
    with suppress(ArtifactError, PromptError):
        tokenizer = Tokenizer(artifact.file("tokenizer.json"), manifest.text, vocab_size=manifest.decoder.vocab_size)
        tokenizer.decode(tokenizer.encode("Once upon a time, é → 😀\0")[:20])
    for budget in (0, 1 << 16, 1 << 40):
        with suppress(DoesNotFitError):
            choose_plan(artifact, min(64, manifest.decoder.context_length), budget)


def passes(path: Path) -> bool:
    """Whether `verify` finds nothing."""
    try:
        verify(path)
    except ArtifactError:
        return False
    return True


def check(path: Path, case: str, lie: Lie) -> None:
    path.write_bytes(lie.data)
    with watched(case):
        opened = opens(path)
    with watched(case):
        passed = passes(path)
    assert opened or not passed, case
    if lie.damages_data:
        assert opened, case
        assert not passed, case


@pytest.mark.timeout(0)
def test_lies_are_refused_or_harmless(forgers: list[Forger], cases: Cases, tmp_path: Path) -> None:
    for case, rng in cases(SHORT):
        lie = rng.choice(forgers).lie(rng)
        try:
            check(tmp_path / "a.pi", case, lie)
        except Exception as error:
            error.add_note(f"{case}: {lie.what[:2000]}")
            raise
