"""What sessions gain: resumed turns, many tools under little memory, and prompts that are read while they are typed.

nox -s bench -- sessions [--parts resume,tools,typed] [--requests 12] [--budget 3] [--speed 20] [--layers 4] …

    resume   time to the first token of a resumed session, beside the time of the step that its new tokens take
    tools    requests/s where each request pauses 3 to 28 times for 0.1 to 30 s (÷ `--speed`, as a small model is faster
             than a large one), arrivals are a Poisson process, and memory holds `--budget` of the longest contexts;
             beside the same load with caches dropped at each pause
    typed    time to the first token of a prompt that was typed, beside one that is sent whole

Greedy answers of a random model; no guesses, so that both sides of a comparison have the same steps.
"""

import argparse
import math
import random
import statistics
import threading
import time
from collections.abc import Sequence

import numpy as np
from support.bench_model import VOCABULARY, add_arguments, opened, verdict

from pi_runtime import Engine, Model, Sampling
from pi_runtime.engine.session_state import SessionState
from pi_runtime.engine.sessions.session import Session
from pi_runtime.engine.stream import Stream
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.execution.kv_cache import KVCache, pages_of

GREEDY = Sampling()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="resume,tools,typed")
    for name, default in {"prompt": 1000, "new": 64, "requests": 12, "budget": 3, "slots": 8, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s that arrive, × --speed")
    parser.add_argument("--speed", type=float, default=20.0, help="pauses are so many times shorter")
    parser.add_argument("--typing", type=float, default=50.0, help="tokens/s that are typed")
    add_arguments(parser)
    return parser.parse_args()


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(300, VOCABULARY) for _ in range(count)]


def first_token_s(stream: Stream) -> float:
    "".join(stream)
    return stream.stats.first_token_s


def settle(engine: Engine) -> None:
    while engine.stats.running or engine.stats.waiting:
        time.sleep(0.001)


def resume(model: Model, a: argparse.Namespace) -> list[str]:
    """A paused session goes on with `--new` tokens; the same step is timed without an engine."""
    rng, found, plain = random.Random(1), [], []
    with Engine(model, speculate="off", piece=64) as engine:
        session = engine.session()
        "".join(session.generate(tokens(rng, a.prompt), max_tokens=8, sampling=GREEDY))
        for _ in range(a.repeats):
            settle(engine)
            new, cache = tokens(rng, a.new), model.new_cache()
            for start in range(0, len(session.tokens), 64):
                block = np.array(session.tokens[start : start + 64])
                model.executor.step([SequenceStep(cache=cache, tokens=block, select=False)])
            began = time.perf_counter()
            for start in range(0, a.new, 64):
                model.executor.step([SequenceStep(cache=cache, tokens=np.array(new[start : start + 64]), select=False)])
            plain.append(time.perf_counter() - began)
            found.append(first_token_s(session.generate(new, max_tokens=8, sampling=GREEDY)))
    ratio = statistics.median(r / p for r, p in zip(found, plain, strict=True))
    print(
        f"resume: first token of {a.new} new tokens after {a.prompt}: {statistics.median(found) * 1e3:.1f} ms; "
        f"their prefill alone {statistics.median(plain) * 1e3:.1f} ms"
    )
    return [verdict("resumed, time to first token ÷ prefill of the new tokens", ratio, at_most=1.1)]


def dropping(engine: Engine) -> None:
    """Let an engine drop the cache of a session at each pause, with what the prefix tree has of it."""
    sessions, pause = engine._sessions, engine._sessions.suspend

    def drop(session: SessionState, cache: KVCache | None) -> None:
        if cache is not None:
            cache.close()
        engine._memory._tree.clear()
        pause(session, None)

    sessions.suspend = drop  # type: ignore[method-assign]


def load_of_tools(model: Model, a: argparse.Namespace, *, drops: bool) -> float:
    """Requests per second of the simulated load."""
    rng, longest = random.Random(2), 28 * 56 + 200
    budget = a.budget * pages_of(longest) * model.executor.new_pool().page_nbytes
    plans, at = [], 0.0
    for _ in range(a.requests):
        at += rng.expovariate(a.rate * a.speed)
        pauses = rng.randint(3, 28)
        waits = [math.exp(rng.uniform(math.log(0.1), math.log(30))) / a.speed for _ in range(pauses)]
        plans.append((at, tokens(rng, 200), [(wait, tokens(rng, 40)) for wait in waits]))
    with Engine(model, slots=a.slots, kv_budget=budget, speculate="off") as engine:
        if drops:
            dropping(engine)

        def request(at: float, prompt: Sequence[int], turns: Sequence[tuple[float, Sequence[int]]]) -> None:
            time.sleep(at)
            session = Session(engine)
            "".join(session.generate(prompt, max_tokens=16, sampling=GREEDY))
            for wait, result in turns:
                time.sleep(wait)
                "".join(session.generate(result, max_tokens=16, sampling=GREEDY))
            session.close()

        threads = [threading.Thread(target=request, args=plan) for plan in plans]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds, found = time.perf_counter() - began, engine.stats
    print(
        f"tools, {'caches dropped' if drops else 'least waste':14}: {a.requests} requests in {seconds:.1f} s, busy "
        f"{found.busy_s:.1f} s; sessions written {found.written_sessions}, dropped {found.dropped_sessions}; "
        f"preemptions {found.preemptions}; of prompts {found.cached_tokens / found.prompt_tokens:.0%} were kept"
    )
    return a.requests / seconds


def tools(model: Model, a: argparse.Namespace) -> list[str]:
    least_waste, dropped = (load_of_tools(model, a, drops=drops) for drops in (False, True))
    return [verdict("tools, requests/s ÷ those with caches dropped", least_waste / dropped, at_least=1.5)]


def typed(model: Model, a: argparse.Namespace) -> list[str]:
    """A prompt of `--prompt` tokens, typed at `--typing` tokens/s: a token is a byte here, so words come at once."""
    rng, whole, ahead = random.Random(3), [], []
    for _ in range(a.repeats):
        text = "".join(chr(rng.randrange(97, 123)) if n % 6 else " " for n in range(a.prompt))
        with Engine(model, speculate="off") as engine:
            whole.append(first_token_s(engine.generate(text, max_tokens=1, sampling=GREEDY)))
        with Engine(model, speculate="off") as engine:
            session = engine.session()
            for at in range(0, len(text), 6):
                session.type(text[at : at + 6])
                time.sleep(6 / a.typing)
            ahead.append(first_token_s(session.answer(max_tokens=1, sampling=GREEDY)))
    sooner = 1 - statistics.median(ahead) / statistics.median(whole)
    print(
        f"typed: first token of {a.prompt} tokens: {statistics.median(ahead) * 1e3:.1f} ms; "
        f"sent whole {statistics.median(whole) * 1e3:.1f} ms"
    )
    return [verdict("typed, share of the time to first token that is saved", sooner, at_least=0.8)]


def main() -> None:
    a = arguments()
    parts = {"resume": resume, "tools": tools, "typed": typed}
    with opened(a) as model:
        lines = [line for name in a.parts.split(",") for line in parts[name](model, a)]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
