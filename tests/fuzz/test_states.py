"""State machines: caches and their pages, a store that is killed and tampered with, tasks that workers leave, commands.

hypothesis finds the shortest sequence of steps that breaks a rule. `--minutes` takes others for its time.
"""

import shutil
from collections import Counter
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from runtime.engine.test_prefix_tree import CONTEXT, Markers, Positions, held, new_pool, split
from support.fuzz.cases import Cases

from pi_runtime.engine.prefix_tree import PrefixTree
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.pages import PagesExhausted

PAGES = 12
TEXTS = st.lists(st.tuples(st.integers(0, 1), st.booleans()), min_size=1, max_size=4).flatmap(
    lambda some: st.integers(1, 30).map(lambda count: (some * count)[:70])
)


def explore(machine: type[RuleBasedStateMachine], cases: Cases, examples: int, steps: int = 25) -> None:
    """Run a machine: so many sequences, the same every time; with minutes, others as long as its share lasts."""
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    for _, rng in cases(1, 0.4):
        run_state_machine_as_test(seed(rng.randrange(1 << 32))(machine), settings=chosen)


class CachePages(RuleBasedStateMachine):
    """Caches that grow, fork, share and end over a small pool, and a tree that keeps what they computed."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.markers = new_pool(PAGES), Markers()
        self.tree, self.live = PrefixTree(self.pool), list[KVCache]()

    def some(self, n: int) -> KVCache:
        return self.live[n % len(self.live)]

    def extended(self, cache: KVCache, positions: Positions) -> None:
        before = held(cache), cache.pages
        try:
            self.markers.run(cache, positions[: cache.room])
        except PagesExhausted:
            assert (held(cache), cache.pages) == before

    @rule(text=TEXTS)
    def join(self, text: Positions) -> None:
        prefix = self.tree.longest(*split(text))
        self.markers.check(self.pool, prefix.runs, text[: prefix.length])
        cache = KVCache(self.pool, CONTEXT)
        cache.adopt(prefix.runs, *split(text[: prefix.length]))
        self.live.append(cache)
        self.extended(cache, text[prefix.length :])

    @precondition(lambda self: self.live)
    @rule(n=st.integers(0, 20), text=TEXTS)
    def append(self, n: int, text: Positions) -> None:
        self.extended(self.some(n), text)

    @precondition(lambda self: self.live)
    @rule(n=st.integers(0, 20))
    def fork(self, n: int) -> None:
        self.live.append(self.some(n).fork())

    @precondition(lambda self: self.live)
    @rule(n=st.integers(0, 20), length=st.integers(0, CONTEXT))
    def truncate(self, n: int, length: int) -> None:
        self.some(n).truncate(length)

    @precondition(lambda self: self.live)
    @rule(n=st.integers(0, 20))
    def insert(self, n: int) -> None:
        cache = self.some(n)
        self.tree.insert(cache)
        assert self.tree.longest(cache.tokens, cache.selected).length == cache.length

    @precondition(lambda self: self.live)
    @rule(n=st.integers(0, 20))
    def close(self, n: int) -> None:
        self.live.pop(n % len(self.live)).close()

    @rule(pages=st.integers(1, PAGES))
    def evict(self, pages: int) -> None:
        before = self.pool.free
        assert self.tree.evict(pages * self.pool.page_nbytes) == self.pool.free - before
        live = {page for cache in self.live for page in cache.held_pages}
        assert self.pool.free >= min(pages, PAGES - len(live))

    @rule()
    def clear(self) -> None:
        self.tree.clear()

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        wanted = Counter(page for cache in self.live for page in cache.held_pages) + Counter(self.tree.pages)
        assert {page: self.pool.references(page) for page in wanted} == wanted
        assert (self.pool.in_use, self.pool.free) == (len(wanted), PAGES - len(wanted))
        for cache in self.live:
            self.markers.check(self.pool, cache.runs, held(cache))


def test_pages_of_caches(cases: Cases) -> None:
    explore(CachePages, cases, 30, 40)


class InFolder(RuleBasedStateMachine):
    """A machine with a folder of its own."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(mkdtemp(prefix="pi-states-"))

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)


STAGES, KEYS = st.sampled_from(("profile", "train")), st.sampled_from(("a" * 64, "b" * 64))


class Results(InFolder):
    """A store whose stages are made, killed, changed and thrown away, by two builds."""

    def begin_builds(self) -> None:
        from pi_compile.pipeline.store import Store
        from pi_compile.workers import Worker

        self.workers = {name: Worker(self.folder / "workers", build=name) for name in ("one", "two")}
        self.stores = {name: Store(self.folder / "store", worker) for name, worker in self.workers.items()}
        self.joined: set[str] = set()

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.begin_builds()

    @rule(build=st.sampled_from(("one", "two")))
    def come_or_go(self, build: str) -> None:
        worker = self.workers[build]
        if build in self.joined:
            worker.__exit__()
        else:
            self.begin_worker(build)
        self.joined ^= {build}

    def begin_worker(self, build: str) -> None:
        from pi_compile.pipeline.store import Store
        from pi_compile.workers import Worker

        self.workers[build] = Worker(self.folder / "workers", build=build).__enter__()
        self.stores[build] = Store(self.folder / "store", self.workers[build])

    @precondition(lambda self: self.joined)
    @rule(stage=STAGES, key=KEYS, which=st.integers(0, 1), dies=st.sampled_from(("", "", "before", "after", "error")))
    def get(self, stage: str, key: str, which: int, dies: str) -> None:
        store = self.stores[sorted(self.joined)[which % len(self.joined)]]
        path = store.folder / f"{stage}-{key[:16]}.txt"
        was_there = path.exists()

        def make(work: Any) -> str:
            part = work.path / "part"
            if part.exists():
                assert part.read_text() == f"{stage} {key}", "another stage's scratch"
            part.write_text(f"{stage} {key}")
            if dies in ("before", "error"):
                raise (KeyboardInterrupt if dies == "before" else OSError(28, "No space left on device"))
            return part.read_text()

        def save(text: str, to: Path) -> None:
            to.write_text(text)
            if dies == "after":
                raise KeyboardInterrupt

        from pi_runtime.errors import PiError

        try:
            found, made = store.result(stage, key, make=make, save=save, load=Path.read_text, suffix=".txt")
        except (KeyboardInterrupt, OSError, PiError):
            assert dies
            assert not was_there
            return
        assert (found, made) == (f"{stage} {key}", not was_there)

    @rule(stage=STAGES, key=KEYS)
    def throw_away(self, stage: str, key: str) -> None:
        (self.folder / "store" / f"{stage}-{key[:16]}.txt").unlink(missing_ok=True)

    def teardown(self) -> None:
        for build in getattr(self, "joined", ()):
            self.workers[build].__exit__()
        super().teardown()


def test_results_of_stages(cases: Cases) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    explore(Results, cases, 12)


NAMES = ("a", "b.npz", "layer-3.npz")


class Tasks(InFolder):
    """A folder in which workers that are gone left claims, failures and halves of names; then one works on."""

    @rule(
        name=st.sampled_from(NAMES),
        number=st.integers(0, 5),
        kind=st.sampled_from(("claim", "failed")),
        text=st.sampled_from(("", "gone-1-00", "{}", '{"worker": "gone", "final": true}', "not JSON", "[1]")),
    )
    def leave(self, name: str, number: int, kind: str, text: str) -> None:
        (self.folder / f"{name}.{kind}-{number}").write_text(text)

    @rule(name=st.sampled_from((".b.npz.77-1.tmp", "x.claim-", "y.failed-z", ".nfs0001", "a~")))
    def litter(self, name: str) -> None:
        (self.folder / name).write_text("")

    @rule(name=st.sampled_from(NAMES))
    def finish(self, name: str) -> None:
        (self.folder / name).write_text(name)

    @rule(fails=st.integers(0, 2))
    def work(self, fails: int) -> None:
        from pi_compile.workers import Worker, WorkFolder

        left = [fails]

        def task(name: str) -> None:
            if left[0]:
                left[0] -= 1
                raise OSError(5, "Input/output error")
            (self.folder / name).write_text(name)

        with Worker(self.folder.with_name(f"{self.folder.name}-workers"), heartbeat=0.02) as worker:
            WorkFolder(self.folder, worker).run({name: lambda name=name: task(name) for name in NAMES})
        assert [(self.folder / name).read_text() for name in NAMES] == list(NAMES)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder.with_name(f"{self.folder.name}-workers"), ignore_errors=True)
        super().teardown()


def test_tasks_that_workers_left(cases: Cases) -> None:
    pytest.importorskip("torch")
    explore(Tasks, cases, 25, 8)


class Commands(InFolder):
    """Commands in any order, over files that come, go and are damaged in between: each ends with the code it should."""

    original: Path

    @initialize()
    def begin(self) -> None:
        super().begin()
        shutil.copytree(self.original, self.folder / "model")
        self.whole = False

    @property
    def recipe(self) -> Path:
        return self.folder / "r.toml"

    @property
    def artifact(self) -> Path:
        return self.folder / "r.pi"

    def run(self, *arguments: object, app: str = "pi_compile") -> int:
        from pi_compile.cli.main import app as pi_compile
        from pi_runtime import console
        from pi_runtime.commands.run import app as pi_run

        return console.run({"pi_compile": pi_compile, "pi_run": pi_run}[app], [str(a) for a in arguments])

    @rule(force=st.booleans())
    def init(self, force: bool) -> None:
        there = self.recipe.exists()
        code = self.run("init", self.folder / "model", "-o", self.recipe, *(["--force"] if force else []))
        assert code == (2 if there and not force else 0)

    @rule()
    def pack(self) -> None:
        there, other = self.recipe.exists(), self.artifact.exists() and b"embedding/c" not in self.artifact.read_bytes()
        code = self.run("pack", "--plain", self.recipe, "-o", self.artifact)
        assert code == (2 if there and other else code if other else 0 if there else 3)
        self.whole |= code == 0

    @rule(command=st.sampled_from(("inspect", "verify")))
    def look(self, command: str) -> None:
        code = self.run(command, self.artifact)
        assert code == (0 if self.whole else 3)

    @rule(text=st.sampled_from(("a", "", "a" * 500)))
    def generate(self, text: str) -> None:
        code = self.run(self.artifact, "--prompt", text, "--max-tokens", 2, "--device", "cpu", app="pi_run")
        assert code == 3 if not self.whole or len(text) > 100 else code in (0, 3)

    @rule()
    def status(self) -> None:
        assert self.run("status", self.recipe) in ((0, 2, 3) if self.recipe.exists() else (2, 3))

    @rule(keep=st.integers(0, 3000))
    def damage(self, keep: int) -> None:
        if self.artifact.exists():
            self.artifact.write_bytes(self.artifact.read_bytes()[:keep])
            self.whole = False

    @rule()
    def remove(self) -> None:
        self.artifact.unlink(missing_ok=True)
        self.whole = False

    @rule(which=st.sampled_from(("artifact", "recipe")))
    def lose_the_recipe(self, which: str) -> None:
        if which == "recipe":
            self.recipe.unlink(missing_ok=True)

    @invariant()
    def nothing_hidden_is_left(self) -> None:
        if hasattr(self, "folder"):
            assert not list(self.folder.glob(".*.tmp"))


def test_commands_in_any_order(cases: Cases, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from support.hf import random_llama

    random_llama(tmp_path / "model", num_hidden_layers=1)
    Commands.original = tmp_path / "model"
    explore(Commands, cases, 6, 12)
    out, err = capsys.readouterr()
    assert "internal error" not in out + err
    assert "Traceback" not in out + err
