"""Sessions: a text in turns is the text that the model gives at once, whatever becomes of its pages between them."""

import errno
import gc
import random
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.requests import found_by
from support.synthetic import random_artifact, small_decoder, stored_plan

from pi_runtime import Engine, Model, Sampling, load
from pi_runtime.engine.caches import EngineCaches
from pi_runtime.engine.generation import Generation
from pi_runtime.engine.session_state import SessionState
from pi_runtime.engine.sessions import suspended as paused
from pi_runtime.engine.sessions.session import Session
from pi_runtime.engine.stream import Stream
from pi_runtime.errors import InputError, PromptError, UsageError
from pi_runtime.execution.executor import SequenceResult, SequenceStep
from pi_runtime.sequence.speculation import StepTimes

SAMPLED = Sampling(temperature=1.0, seed=3)


@pytest.fixture
def model(random_path: Path) -> Iterator[Model]:
    """The random model, with selection in two layers."""
    with load(random_path, mode="predicted", device="cpu") as model:
        yield model


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    with Engine(model, slots=4) as engine:
        yield engine


def at_once(model: Model, tokens: Sequence[int], selected: Sequence[bool], **settings: Any) -> Generation:
    """The answer after these tokens, with all of them computed anew."""
    given = {"max_tokens": None, "sampling": None, "stop": (), **settings}
    answer = model.new_answer(tokens, selected=selected, **given)
    return Generation(model.executor, model.new_cache(), answer, model.speculation("off", StepTimes()))


def ran(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[SequenceStep]:
    """What the model runs from now on."""
    steps: list[SequenceStep] = []
    step = model.executor.step

    def spy(sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        steps.extend(sequences)
        return step(sequences)

    monkeypatch.setattr(model.executor, "step", spy)
    return steps


def settle(engine: Engine) -> None:
    """Wait until nothing runs."""
    ends = time.monotonic() + 30
    while engine.stats.running or engine.stats.waiting:
        assert time.monotonic() < ends
        time.sleep(0.001)


def until_none_is_paused(engine: Engine) -> None:
    ends = time.monotonic() + 30
    while engine.stats.paused_sessions:
        assert time.monotonic() < ends
        time.sleep(0.001)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_pause_changes_nothing(model: Model, engine: Engine, sampling: Sampling) -> None:
    whole = model.generate([1, 2, 3], max_tokens=40, sampling=sampling)
    "".join(whole)
    with engine.session() as session:
        stops = [whole.token_ids[9], whole.token_ids[20]]
        parts = [session.generate([1, 2, 3], max_tokens=40, sampling=sampling, stop_tokens=stops)]
        "".join(parts[-1])
        assert parts[-1].finish_reason == "stop"
        while len(session.tokens) < 43:
            left = 43 - len(session.tokens)
            parts.append(session.generate(max_tokens=left, sampling=sampling, stop_tokens=stops))
            "".join(parts[-1])
        assert len(parts) > 2
        assert session.tokens == [1, 2, 3, *whole.token_ids]


def test_turns_are_the_same_as_at_once(model: Model, engine: Engine) -> None:
    """Tokens of answers were computed with selection, and stay so; those of turns are dense."""
    session, tokens, selected = engine.session(), list[int](), list[bool]()
    for turn in ([5, 6, 7], [9] * 11, [1, 2]):
        tokens, selected = [*tokens, *turn], [*selected, *[False] * len(turn)]
        wanted = found_by(at_once(model, tokens, selected, max_tokens=9, sampling=SAMPLED))
        assert found_by(session.generate(turn, max_tokens=9, sampling=SAMPLED)) == wanted
        tokens, selected = [*tokens, *wanted[1]], [*selected, *[True] * 9]
        assert session.tokens == tokens


@pytest.mark.parametrize("mode", ["dense", "auto"])
def test_turns_with_a_placement(tmp_path: Path, mode: str) -> None:
    decoder = small_decoder(context_length=96, d_ff=150)
    plan = stored_plan((16, 8), 1 << 20, 20000, context=96)
    path = random_artifact(tmp_path / "a.pi", decoder, ranks=[4, None], scale=3.0, plans=(plan,))
    with load(path, device="stand-in", mode=mode) as model, Engine(model) as engine:
        session = engine.session()
        first = found_by(session.generate(range(9), max_tokens=9))[1]
        tokens, selected = [*range(9), *first, 7, 8], [False] * 9 + [True] * len(first) + [False] * 2
        assert found_by(session.generate([7, 8], max_tokens=9)) == found_by(
            at_once(model, tokens, selected, max_tokens=9)
        )


def test_a_stream_keeps_its_session_open(model: Model, engine: Engine) -> None:
    stream = engine.session().generate([1, 2], max_tokens=30)
    gc.collect()
    assert found_by(stream) == found_by(model.generate([1, 2], max_tokens=30))
    del stream
    gc.collect()
    until_none_is_paused(engine)


def test_a_session_begins_with_tokens(model: Model, engine: Engine) -> None:
    session = engine.session([5, 6, 7])
    assert session.tokens == [5, 6, 7]
    assert found_by(session.generate([8], max_tokens=9)) == found_by(model.generate([5, 6, 7, 8], max_tokens=9))
    with pytest.raises(PromptError):
        engine.session([9999]).generate("a")


def test_threads_that_type_take_turns(engine: Engine) -> None:
    session = engine.session()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(session.type, "abcdefgh" * 4))
    assert sorted(session.draft) == sorted("abcdefgh" * 4)


def test_a_full_context_ends_a_session(model: Model, engine: Engine) -> None:
    session = engine.session()
    stream = session.generate([1] * 90)
    "".join(stream)
    assert stream.finish_reason == "context"
    session.type("more")
    with pytest.raises(PromptError):
        session.answer()


def test_nothing_that_is_kept_is_computed_twice(model: Model, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = engine.session()
    "".join(session.generate(range(40), max_tokens=5))
    settle(engine)
    steps = ran(model, monkeypatch)
    stream = session.generate([8, 9, 10], max_tokens=2)
    "".join(stream)
    settle(engine)
    assert [(s.tokens.tolist(), s.select) for s in steps] == [
        ([8, 9, 10], False),
        ([stream.token_ids[0]], True),
        ([stream.token_ids[1]], True),  # runs while it is paused
    ]
    assert stream.stats.cached_tokens == 45


def test_a_stop_string_pauses(alphabet: Path) -> None:
    with load(alphabet) as model, Engine(model) as engine, engine.session() as session:
        first = session.generate("a", stop=["ef"])
        assert ("".join(first), first.finish_reason) == ("bcd", "stop")
        assert bytes(session.tokens) == b"abcdef"
        assert "".join(session.generate("st", max_tokens=3)) == "uvw"
        last = session.generate()
        assert ("".join(last), last.finish_reason) == ("xyz", "end")
        assert bytes(session.tokens) == b"abcdefstuvwxyz"


def test_one_turn_at_a_time(endless: Path) -> None:
    with load(endless) as model, Engine(model, speculate="off") as engine:
        session = engine.session()
        stream = session.generate("a")
        next(stream)
        for use in (lambda: session.generate("b"), lambda: session.type("b"), lambda: session.save("x")):
            with pytest.raises(UsageError, match="still answering"):
                use()
        stream.cancel()
        assert "".join(session.generate("b", max_tokens=3)) == "aba"
        session.close()
        session.close()
        with pytest.raises(UsageError, match="closed"):
            session.generate("a")
        until_none_is_paused(engine)


def test_mistakes_leave_a_session_as_it_was(engine: Engine) -> None:
    session = engine.session()
    for prompt in ("", [], [999], "a" * 96):
        with pytest.raises(PromptError):
            session.generate(prompt)
    with pytest.raises(PromptError):
        session.generate([1], stop_tokens=[999])
    assert len("".join(session.generate([1], max_tokens=3))) > 0
    with pytest.raises(UsageError, match="position 3 of the draft"):
        session.edit("a", at=3)


def turns_of(rng: random.Random, session: Session, tokens: list[int], selected: list[bool]) -> dict[str, Any]:
    """Settings and tokens of a session's next turn, counted in `tokens` and `selected`."""
    turn = [rng.randrange(250) for _ in range(rng.randint(1, 9))]
    tokens += turn
    selected += [False] * len(turn)
    sampling = Sampling() if rng.random() < 0.5 else Sampling(temperature=1.0, seed=rng.randrange(99))
    return {"prompt": turn, "max_tokens": rng.randint(1, 8), "sampling": sampling}


@pytest.mark.parametrize("way", ["disk", "dropped", "measured"])
@pytest.mark.parametrize("pages", [3, 4, 7])
def test_little_memory_changes_no_session(model: Model, way: str, pages: int, long: bool) -> None:
    rng = random.Random(f"{way} {pages}")
    budget = pages * model.executor.new_pool(None).page_nbytes
    for _ in range(5 if long else 1):
        with Engine(model, slots=3, kv_budget=budget, speculate=rng.choice(["auto", 4])) as engine:
            if way != "measured":
                engine._sessions.disk_s.value = 0 if way == "disk" else 1e9
                engine._sessions.disk_s.count = lambda _: None  # type: ignore[method-assign]
            states = [(engine.session(), list[int](), list[bool]()) for _ in range(5)]
            for _ in range(5):
                rng.shuffle(states)
                begun: list[tuple[Stream, Any, list[int], list[bool]]] = []
                for session, tokens, selected in states:
                    settings = turns_of(rng, session, tokens, selected)
                    prompt = settings.pop("prompt")
                    wanted = found_by(at_once(model, tokens, selected, **settings))
                    begun.append((session.generate(prompt, **settings), wanted, tokens, selected))
                    if rng.random() < 0.3:
                        "".join(engine.generate([rng.randrange(250)] * 30, max_tokens=3))
                for stream, wanted, tokens, selected in begun:
                    assert found_by(stream) == wanted
                    tokens.extend(wanted[1])
                    selected.extend([True] * len(wanted[1]))
            for session, tokens, _ in states:
                assert session.tokens == tokens
            settle(engine)
            found = engine.stats
            assert found.paused_sessions == 5
            if way == "disk":
                assert found.written_sessions > 0
            if way == "dropped":
                assert found.dropped_sessions > 0 == found.written_sessions
        assert engine.stats.pages_used == 0


def test_pages_are_kept_where_that_wastes_least(model: Model, engine: Engine) -> None:
    session, sessions = engine.session(), engine._sessions
    "".join(session.generate(range(40), max_tokens=7))
    settle(engine)
    sessions.pause_s.value, sessions.disk_s.value, sessions.dense_s.value = 0.0, 1e9, 1e9
    assert not sessions.evict([], must=False)
    assert not sessions.evict([], session._state, must=False)
    sessions.pause_s.value = 1e20
    assert sessions.evict([], must=False)
    assert sessions.written + sessions.dropped == 1
    assert not sessions.evict([], must=True)


@pytest.mark.parametrize("fails", ["write_pages", "read_pages"])
def test_a_disk_that_fails_changes_no_text(model: Model, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(paused, fails, full)
    with Engine(model, kv_budget=3 * model.executor.new_pool(None).page_nbytes) as engine:
        engine._sessions.disk_s.value = 0
        session = engine.session()
        first = found_by(session.generate(range(40), max_tokens=7))[1]
        settle(engine)
        "".join(engine.generate([3] * 80, max_tokens=2))
        assert engine.stats.written_sessions == (fails == "read_pages")
        tokens, selected = [*range(40), *first, 4], [False] * 40 + [True] * 7 + [False]
        assert found_by(session.generate([4], max_tokens=9)) == found_by(at_once(model, tokens, selected, max_tokens=9))


def test_a_session_goes_on_in_another_process(random_path: Path, model: Model, tmp_path: Path) -> None:
    saved = tmp_path / "saved.session"
    with Engine(model) as engine:
        session = engine.session()
        "".join(session.generate(range(40), max_tokens=7))
        settle(engine)
        session.save(saved)
        wanted = found_by(session.generate([4, 5], max_tokens=9, sampling=SAMPLED))
    script = (
        "import sys; from pi_runtime import Engine, Sampling, load\n"
        "with load(sys.argv[1], mode='predicted', device='cpu') as model, Engine(model) as engine:\n"
        "    session = engine.load_session(sys.argv[2])\n"
        "    stream = session.generate([4, 5], max_tokens=9, sampling=Sampling(temperature=1.0, seed=3))\n"
        "    print(ascii(''.join(stream)), stream.token_ids, stream.stats.cached_tokens)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, random_path, saved], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"{wanted[0]!a} {wanted[1]} 47"


@pytest.mark.parametrize("cache_format", ["auto", "q8"])
def test_a_session_of_latents_goes_on(tmp_path: Path, cache_format: str) -> None:
    latents = {"n_kv_heads": 1, "latent_rank": 37, "rotary_frequencies": (1.0,), "context_length": 160}
    path, ids = random_artifact(tmp_path / "a.pi", small_decoder(**latents), format="f16"), [*range(1, 60)]
    with load(path, mode="dense", cache_format=cache_format) as model, Engine(model) as engine:
        session = engine.session()
        first = found_by(session.generate(ids, max_tokens=9))[1]
        settle(engine)
        session.save(tmp_path / "saved")
        wanted = found_by(model.generate([*ids, *first, 7], max_tokens=20))
    with load(path, mode="dense", cache_format=cache_format) as model, Engine(model) as engine:
        assert found_by(engine.load_session(tmp_path / "saved").generate([7], max_tokens=20)) == wanted


def test_what_does_not_belong_here_is_not_loaded(random_path: Path, alphabet: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.session"
    with load(random_path, mode="predicted", device="cpu") as model, Engine(model) as engine:
        session = engine.session()
        "".join(session.generate(range(40), max_tokens=7))
        session.save(saved)
        data = saved.read_bytes()
        for wrong, message in (
            (b"", "not a saved session"),
            (data[:9], "not a saved session"),
            (data[:-1], "damaged"),
            (data[:200], "damaged"),
            (data.replace(b"predicted", b"PREDICTED"), "damaged"),
        ):
            (tmp_path / "wrong").write_bytes(wrong)
            with pytest.raises(InputError, match=message):
                engine.load_session(tmp_path / "wrong")
        with pytest.raises(InputError, match="cannot be read"):
            engine.load_session(tmp_path / "none")
        with pytest.raises(UsageError, match="cannot be written"):
            session.save(tmp_path / "no" / "folder")
        (tmp_path / "folder").mkdir()
        with pytest.raises(UsageError, match="cannot be written"):
            session.save(tmp_path / "folder")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "saved.session", "wrong"]
    for path, options, named in (
        (alphabet, {}, "artifact"),
        (random_path, {"mode": "dense"}, "mode"),
        (random_path, {"mode": "predicted", "cache_format": "q8"}, "cache format"),
    ):
        with (
            load(path, device="cpu", **options) as other,
            Engine(other) as engine,
            pytest.raises(UsageError, match=f"another model or run: .*{named}"),
        ):
            engine.load_session(saved)


def test_a_session_on_disk_can_be_saved(model: Model, tmp_path: Path) -> None:
    budget = 3 * model.executor.new_pool(None).page_nbytes
    with Engine(model, kv_budget=budget) as engine:
        engine._sessions.disk_s.value = 0
        session = engine.session()
        "".join(session.generate(range(40), max_tokens=7))
        settle(engine)
        "".join(engine.generate([3] * 80, max_tokens=2))
        assert engine.stats.written_sessions == 1
        session.save(tmp_path / "saved")
        wanted = found_by(session.generate([4, 5], max_tokens=9))
        again = engine.load_session(tmp_path / "saved")
        stream = again.generate([4, 5], max_tokens=9)
        assert found_by(stream) == wanted
        assert stream.stats.cached_tokens == 47


def test_a_session_that_nobody_refers_to_is_closed(model: Model, engine: Engine) -> None:
    session = engine.session()
    "".join(session.generate([1], max_tokens=3))
    settle(engine)
    assert engine.stats.paused_sessions == 1
    del session
    gc.collect()
    until_none_is_paused(engine)


TEXTS = ("so it goes", "so it went on, and on", "", "so it went, an", "x")


@pytest.mark.parametrize("seed", range(3))
def test_what_is_typed_is_answered_as_in_one_piece(model: Model, engine: Engine, seed: int) -> None:
    rng = random.Random(seed)
    session, tokens, selected = engine.session(), list[int](), list[bool]()
    for _ in range(3):
        for _ in range(rng.randint(1, 6)):
            if rng.random() < 0.5:
                session.type(rng.choice(TEXTS))
            else:
                session.edit(rng.choice(TEXTS), at=rng.choice([None, rng.randint(0, len(session.draft))]))
            if rng.random() < 0.5:
                settle(engine)
            session.edit(session.draft[:20])
        session.type("!")
        ids = model.tokenizer.encode(session.draft, prefix=not tokens)
        tokens, selected = [*tokens, *ids], [*selected, *[False] * len(ids)]
        wanted = found_by(at_once(model, tokens, selected, max_tokens=5))
        assert found_by(session.answer(max_tokens=5)) == wanted
        assert session.draft == ""
        tokens, selected = [*tokens, *wanted[1]], [*selected, *[True] * 5]


def test_what_is_typed_is_read_while_it_is_typed(model: Model, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = engine.session()
    for letter in "a prompt of some words, typed by hand":
        session.type(letter)
    settle(engine)
    steps = ran(model, monkeypatch)
    session.type("!")
    settle(engine)
    stream = session.answer(max_tokens=1)
    "".join(stream)
    assert stream.stats.cached_tokens >= len(session.tokens) - 3
    assert sum(len(s.tokens) for s in steps) <= 3
    session.edit("other words")
    settle(engine)
    before = len(steps)
    session.edit("other worms")
    session.edit("other words")
    settle(engine)
    assert sum(len(s.tokens) for s in steps[before:]) <= 4


def test_a_draft_longer_than_the_context(model: Model, engine: Engine) -> None:
    session = engine.session()
    session.type("a" * 200)
    settle(engine)
    with pytest.raises(PromptError):
        session.answer()
    session.edit("ab")
    assert found_by(session.answer(max_tokens=3)) == found_by(model.generate("ab", max_tokens=3))


def test_a_draft_under_little_memory(model: Model) -> None:
    page = model.executor.new_pool(None).page_nbytes
    with Engine(model, kv_budget=3 * page) as engine:
        session = engine.session()
        session.type("abc" * 20)
        stream = engine.generate([1] * 60, max_tokens=20)
        session.type("def")
        "".join(stream)
        assert found_by(session.answer(max_tokens=3)) == found_by(model.generate("abc" * 20 + "def", max_tokens=3))


def test_a_draft_that_is_saved_stays_read_and_harms_nobody(model: Model, tmp_path: Path) -> None:
    """Before the first turn none of what was read ahead is part of the session."""
    page = model.executor.new_pool(None).page_nbytes
    with Engine(model, slots=4, kv_budget=3 * page) as engine:
        session = engine.session()
        session.type("abc" * 20)
        settle(engine)
        session.save(tmp_path / "saved")
        assert len(session._state.suspended.cache.tokens) > 50  # type: ignore[union-attr]
        streams = [engine.generate([97 + n] * 60, max_tokens=30) for n in range(2)]
        for n, stream in enumerate(streams):
            assert found_by(stream) == found_by(model.generate([97 + n] * 60, max_tokens=30))
        assert engine.ended is None
        again = engine.load_session(tmp_path / "saved")
        assert again.tokens == []
        assert found_by(again.generate([4], max_tokens=3)) == found_by(model.generate([4], max_tokens=3))


def test_a_session_that_holds_nothing_has_nothing_to_evict(model: Model, engine: Engine) -> None:
    engine._inbox.call(lambda: engine._sessions.suspend(SessionState(), model.executor.new_cache(engine._memory.pool)))
    assert engine.stats.paused_sessions == 1
    assert not engine._sessions.evict([], must=True)


def test_a_dropped_session_can_be_saved(model: Model, engine: Engine, tmp_path: Path) -> None:
    session = engine.session()
    "".join(session.generate(range(40), max_tokens=7))
    settle(engine)
    engine._sessions.disk_s.value = 1e9
    engine._inbox.call(lambda: engine._sessions.evict([], must=True))
    assert engine.stats.dropped_sessions == 1
    session.save(tmp_path / "saved")
    again = engine.load_session(tmp_path / "saved")
    assert again.tokens == session.tokens
    assert found_by(again.generate([4], max_tokens=3)) == found_by(session.generate([4], max_tokens=3))


@pytest.mark.parametrize("cache_format", ["auto", "q8"])
def test_what_is_written_holds_nothing_of_others(random_path: Path, tmp_path: Path, cache_format: str) -> None:
    """The pages held other texts before; what is behind a session's positions is written as zeros."""
    found: list[bytes] = []
    with load(random_path, mode="predicted", device="cpu", cache_format=cache_format) as model:
        page = model.executor.new_pool(None).page_nbytes
        for stranger in (None, [3] * 60, [7] * 60):
            with Engine(model, kv_budget=3 * page, speculate="off") as engine:
                if stranger is not None:
                    "".join(engine.generate(stranger, max_tokens=30))
                session = engine.session()
                "".join(session.generate([97, 98], max_tokens=3))
                settle(engine)
                session.save(tmp_path / "kept")
                engine._sessions.disk_s.value = 0
                engine._inbox.call(lambda engine=engine: engine._sessions.evict([], must=True))
                assert engine.stats.written_sessions == 1
                pause = session._state.suspended
                assert pause is not None
                assert pause.file is not None
                session.save(tmp_path / "written")
                kept = (tmp_path / "kept").read_bytes()
                assert (tmp_path / "written").read_bytes() == kept
                assert pause.file.read_bytes() == kept[-32 - page : -32]
                found.append(kept)
    assert len(set(found)) == 1
    assert sum(byte == 0 for byte in found[0]) > page // 2


@pytest.mark.skipif(sys.platform == "win32", reason="no such modes")
def test_a_saved_session_is_its_owners_alone(engine: Engine, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.touch(0o644)
    session = engine.session([1, 2])
    session.save(saved)
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600


def test_a_machine_without_a_folder_for_files_changes_no_text(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(**_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", none)
    with Engine(model, kv_budget=3 * model.executor.new_pool(None).page_nbytes) as engine:
        engine._sessions.disk_s.value = 0
        session = engine.session()
        "".join(session.generate(range(40), max_tokens=7))
        settle(engine)
        assert found_by(engine.generate([3] * 80, max_tokens=2)) == found_by(model.generate([3] * 80, max_tokens=2))
        assert (engine.stats.dropped_sessions, engine.ended) == (1, None)


def test_a_session_is_dropped_while_its_engine_is_locked(model: Model, engine: Engine) -> None:
    """As the garbage collector does it: the thread that runs a finalizer may wait for another that holds the lock."""
    sessions = [engine.session()]
    "".join(sessions[0].generate([1], max_tokens=3))
    settle(engine)
    dropping = threading.Thread(target=sessions.clear, daemon=True)
    with engine._inbox._lock:
        dropping.start()
        dropping.join(30)
        assert not dropping.is_alive(), "a finalizer waits for a lock"
    until_none_is_paused(engine)


def test_a_pause_that_lasts_gives_its_pages_to_those_who_wait(endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At first keeping them wastes least. Time goes by, beside an answer that goes on, and then it no longer does."""
    now, steps = [0.0], list[tuple[float, list[int]]]()
    with load(endless, device="cpu", context=1024) as model:
        step = model.executor.step

        def stepped(sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
            now[0] += 1.0
            steps.append((now[0], [len(s.tokens) for s in sequences]))
            return step(sequences)

        with Engine(model, kv_budget=24 * model.executor.new_pool(None).page_nbytes, speculate="off") as engine:
            sessions, session = engine._sessions, engine.session()
            "".join(session.generate("ab" * 192, max_tokens=1))
            settle(engine)
            for measured in (sessions.disk_s, sessions.dense_s, sessions.selected_s):
                monkeypatch.setattr(measured, "count", lambda _: None)
            sessions.disk_s.value, sessions.dense_s.value, sessions.selected_s.value = 1e9, 0.1, 0.1
            pause = session._state.suspended
            assert pause is not None
            assert pause.cache is not None
            sessions.clock, pause.began = lambda: now[0], 0.0
            own, again_s = len(pause.cache.held_pages), 0.1 * len(pause.tokens)
            monkeypatch.setattr(model.executor, "step", stepped)
            running = engine.generate("b", max_tokens=300)
            next(running)
            "".join(engine.generate("a" * 384, max_tokens=1))
            "".join(running)
            joined = next(at for at, tokens in steps[1:] if max(tokens) > 1)
            assert (own + 1) * again_s / own < joined < (own + 4) * again_s / own + 2
            assert len(steps) > 290
            assert engine.stats.dropped_sessions == 1


def test_a_turn_that_ends_with_the_engine_is_heard_of(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(_: EngineCaches, session: SessionState) -> None:
        raise MemoryError(session)

    monkeypatch.setattr(EngineCaches, "_newest_of", no_memory)
    with Engine(model, speculate="off") as engine:
        stream = engine.session([1, 2, 3]).generate([4], max_tokens=4)
        while not (output := stream._sequence.outputs.get(timeout=30)).ended:
            pass
        assert isinstance(output.error, MemoryError)
        assert stream._sequence.done.is_set()
