"""Every stage with a write, sync, rename or opening that fails, or ends the process, at each place in turn.

Afterwards the older file is there, or the new one whole; the next run of the command makes the same bytes, and nothing
hidden is left. `--minutes` takes places at random, `--long` every one, the short form two.
"""

import hashlib
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from support import hf, sparsifying
from support.fuzz.cases import Cases
from support.fuzz.faults import Fault, Outcome, Server, has_compiler, server
from support.small_project import small_project, small_recipe
from support.synthetic import random_artifact, small_decoder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(0),
    pytest.mark.skipif(not has_compiler(), reason="faults need Linux and a C compiler"),
]
PROJECT = "project"


@dataclass(frozen=True)
class Stage:
    """A command, the stage whose state it begins from, and what it writes, as patterns."""

    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    after: str = ""
    app: str = "pi-compile"


STAGES = {
    "init": Stage(("init", "model", "-o", "new.toml", "--force"), ("new.toml",)),
    "profile": Stage(("profile", "small.toml"), (".pi-build/small/*.npz",)),
    "train": Stage(("train", "small.toml"), (".pi-build/small/*.npz",), "profile"),
    "export": Stage(("train", "small.toml", "--export", "activations.npz"), ("activations.npz",), "train"),
    "place": Stage(("place", "placed.toml", "--lock"), ("placed.lock",), "export"),
    "pack": Stage(("pack", "small.toml", "-o", "small.pi"), ("small.pi",), "train"),
    "build": Stage(("build", "small.toml", "-o", "small.pi"), ("small.pi", ".pi-build/small/*.npz")),
    "sparsify": Stage(("sparsify", "sparse.toml", "-o", "sparse"), ("sparse/*.safetensors", "sparse/config.json")),
    "prompts": Stage(
        ("random.pi", "--prompts", "prompts.jsonl", "-o", "answers.jsonl", "--max-tokens", "3"),
        ("answers.jsonl",),
        app="pi-run",
    ),
}
OLDER = ("new.toml", "placed.lock", "activations.npz")
"""Outputs of which an older file is there, beside an older artifact."""


@dataclass(frozen=True)
class Rig:
    """A project that is put back to a state before each command, and the server that runs them."""

    folder: Path
    states: Path
    served: Server
    known: dict[str, dict[str, str]] = field(default_factory=dict)
    """What each stage writes when nothing fails."""

    def reset(self, state: str) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.states / (state or "begin"), self.folder)

    def run(self, stage: Stage, fault: Fault | None = None, kill_after: float = 0) -> Outcome:
        return self.served.run(stage.app, list(stage.arguments), fault, kill_after)

    def whole(self, name: str) -> dict[str, str]:
        """What a stage writes when nothing fails. Its state is kept for the stages that begin from it."""
        stage = STAGES[name]
        if name not in self.known:
            if stage.after:
                self.whole(stage.after)
            self.reset(stage.after)
            outcome = self.run(stage)
            self.known[name] = self.outputs(stage)
            assert outcome.code == 0, (name, outcome)
            assert self.known[name], name
            shutil.copytree(self.folder, self.states / name)
        return self.known[name]

    def outputs(self, stage: Stage) -> dict[str, str]:
        """Digests of what the stage wrote."""
        found = sorted(path for pattern in stage.outputs for path in self.folder.glob(pattern))
        return {str(p.relative_to(self.folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}

    def hidden(self) -> list[str]:
        """What is there only while something runs."""
        patterns = (".*.tmp", "*.work", ".step-*", "*.claim-*", "tmp*")
        return sorted(str(p.relative_to(self.folder)) for pattern in patterns for p in self.folder.rglob(pattern))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder, states = tmp_path_factory.mktemp("faults") / PROJECT, tmp_path_factory.mktemp("states")
    begin = small_project(states / "begin")
    hf.random_llama(begin / "base", intermediate_size=64, num_hidden_layers=1)
    sparsifying.write_text(begin / "text.txt")
    recipe = sparsifying.small_recipe("base", corpus={"text": ["text.txt"]}, run={"every": 2})
    (begin / "sparse.toml").write_text(recipe.to_toml())
    (begin / "placed.toml").write_text(small_recipe(place={"activations": "activations.npz"}).to_toml())
    random_artifact(begin / "random.pi", small_decoder())
    random_artifact(begin / "small.pi", small_decoder())
    (begin / "prompts.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(20)))
    for name in OLDER:
        (begin / name).write_text("older")
    with server(folder) as served:
        yield Rig(folder, states, served)


def check(rig: Rig, name: str, fault: Fault | None, kill_after: float = 0) -> Outcome:
    """One fault in one stage, and what must hold afterwards."""
    stage, wanted = STAGES[name], rig.whole(name)
    what = f"{name}, {fault or f'killed after {kill_after:.3f} s'}"
    rig.reset(stage.after)
    before = rig.outputs(stage)
    outcome = rig.run(stage, fault, kill_after)
    assert outcome.code in (-signal.SIGKILL, 0, 2, 3, 4), (what, outcome)
    assert "Traceback" not in outcome.err, (what, outcome)
    if name != "prompts":  # it goes on with the answers that it has
        for path, digest in rig.outputs(stage).items():
            assert digest in (wanted.get(path), before.get(path)), (what, path)
    if outcome.code == 0:
        assert rig.outputs(stage) == wanted, (what, "says that all went well")
    elif name != "sparsify" or rig.outputs(stage) != wanted:  # which refuses a folder that is there
        again = rig.run(stage)
        assert again.code == 0, (what, "again", again)
        assert rig.outputs(stage) == wanted, (what, "again")
    assert not rig.hidden(), what
    return outcome


def places(rig: Rig, name: str, operation: str) -> int:
    """How many calls of an operation a stage makes."""
    rig.whole(name)
    rig.reset(STAGES[name].after)
    return rig.run(STAGES[name], Fault(operation, 0)).calls


KINDS = (
    ("write", "ENOSPC", True),
    ("write", "EIO", False),
    ("write", "short", False),
    ("write", "kill", False),
    ("sync", "EIO", False),
    ("sync", "kill", False),
    ("rename", "EACCES", False),
    ("rename", "EIO", False),
    ("rename", "kill", False),
    ("open", "EACCES", True),
    ("open", "ENOSPC", False),
    ("open", "kill", False),
)
QUICK = ("init", "pack")
"""Stages of the short form; the others take minutes."""


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_with_a_fault_at_each_place(rig: Rig, name: str, long: bool) -> None:
    """Each place with `--long`, which takes hours; else one, another for each stage."""
    if name not in QUICK and not long:
        pytest.skip("--long")
    for operation, kind, lasts in KINDS if long else (Random(name).choice(KINDS),):
        count = places(rig, name, operation)
        numbers = range(1, count + 1) if long else [Random(name).randint(1, count)]
        for number in numbers:
            check(rig, name, Fault(operation, number, kind, lasts))
        print(f"{name}: {kind} at {len(numbers)} of {count} places of {operation}")


@pytest.mark.usefixtures("long_form")
def test_stages_with_faults_at_random(rig: Rig, cases: Cases) -> None:
    counts: dict[tuple[str, str], int] = {}
    for _, rng in cases(100, 2):
        name, (operation, kind, lasts) = rng.choice(list(STAGES)), rng.choice(KINDS)
        if (name, operation) not in counts:
            counts[name, operation] = places(rig, name, operation)
        if counts[name, operation]:
            number = rng.randint(1, counts[name, operation])
            print(name, outcome_of(check(rig, name, fault := Fault(operation, number, kind, lasts))), fault)


@pytest.mark.usefixtures("long_form")
def test_stages_killed_at_random(rig: Rig, cases: Cases) -> None:
    """Beside test_pipeline and test_resume, which kill builds and trainings in the short form too."""
    took: dict[str, float] = {}
    for _, rng in cases(100 * len(STAGES), 1):
        name = rng.choice(list(STAGES))
        if name not in took:
            rig.whole(name)
            rig.reset(STAGES[name].after)
            began = time.monotonic()
            rig.run(STAGES[name])
            took[name] = time.monotonic() - began
        after = rng.uniform(0.01, took[name])
        print(name, outcome_of(check(rig, name, None, after)), f"after {after:.2f} s of {took[name]:.2f}")


def outcome_of(outcome: Outcome) -> str:
    return "killed" if outcome.code == -signal.SIGKILL else f"exit {outcome.code}"
