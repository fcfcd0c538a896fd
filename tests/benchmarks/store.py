"""What the store of prefixes gains and costs.

nox -s bench -- store [--parts evict,tools,agents,restart] [--pages 100000] [--prompt 4000] [--layers 16] …

    evict    time in which a tree of `--pages` pages makes room for a step of 8 sequences
    tools    talks whose turns wait for tools (0.1 to 30 s) among others that people think over or leave: tokens that
             are computed again, and bytes × time, beside dropping what was used longest ago; by a clock of its own,
             with 25, 50 and 100 % of the memory that all of them take
    agents   requests/s of an engine whose `--agents` requests each pause 3 to 28 times for a tool (÷ `--speed`, as a
             small model is faster than a large one), with memory for `--budget` of the longest; beside the same load
             where nothing is found again after a pause
    restart  time to the first token of a prompt of `--prompt` tokens that an engine before has computed, with the
             system's page cache dropped, beside computing it
"""

import argparse
import heapq
import itertools
import math
import os
import random
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.bench_model import VOCABULARY, add_arguments, built, opened, verdict
from support.synthetic import small_decoder

from pi_runtime import Engine, Model, Sampling, load
from pi_runtime.engine.prefix_tree import Entry, Node, PrefixTree
from pi_runtime.execution.kv_cache import KVCache, pages_of
from pi_runtime.execution.pages import PAGE_POSITIONS, PagePool
from pi_runtime.sequence.sequence import Outcome


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="evict,tools,agents,restart")
    for name, default in {
        "pages": 100_000,
        "prompt": 4000,
        "requests": 60,
        "seeds": 5,
        "agents": 12,
        "budget": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--speed", type=float, default=20.0, help="pauses are so many times shorter")
    parser.add_argument("--folder", help="where `restart` keeps its pages; else a folder for temporary files")
    add_arguments(parser)
    return parser.parse_args()


def small_pool(pages: int | None) -> PagePool:
    manifest: Any = SimpleNamespace(
        decoder=small_decoder(n_layers=1, head_dim=2, n_kv_heads=1, n_heads=1), formats={"attention": "f32"}
    )
    return PagePool(manifest, None if pages is None else pages * PagePool(manifest).page_nbytes)


def filled(tree: PrefixTree, pool: PagePool, tokens: list[int], outcome: Outcome | None, prompt: int = 0) -> None:
    """Let a tree have pages for these tokens, as a sequence leaves them that has ended."""
    cache = KVCache(pool, len(tokens))
    prefix = tree.longest(tokens, [False] * len(tokens))
    cache.adopt(prefix.runs, tokens[: prefix.length], [False] * prefix.length)
    lacking = cache.lacking_nbytes(len(tokens) - prefix.length, len(tokens))
    tree.evict(lacking)
    cache.reserve(len(tokens) - prefix.length)
    cache.append(np.array(tokens[prefix.length :], np.int64), select=False)
    tree.insert(cache, outcome, prompt)
    cache.close()


def evict(a: argparse.Namespace) -> list[str]:
    """Paths of 1,000 to 4,000 tokens, a third of which ended in a call; then steps of 8 sequences, a page each."""
    rng, pool = random.Random(0), small_pool(a.pages)
    tree = PrefixTree(pool)
    while tree.size < a.pages - 200:
        outcome = Outcome(in_call=rng.random() < 1 / 3)
        filled(tree, pool, [rng.randrange(1000) for _ in range(rng.randrange(1000, 4000))], outcome)
    held, times = [], []
    for _ in range(500):
        began = time.perf_counter()
        tree.evict(8 * pool.page_nbytes)
        times.append(time.perf_counter() - began)
        held.append(pool.take(8))
    median_us, most_ms = np.median(times) * 1e6, max(times) * 1e3
    print(f"evict: {tree.size:,} pages; room for a step in {median_us:.0f} µs (median), at most {most_ms:.2f} ms")
    return [verdict("evict, ms of a step, most of 500", most_ms, at_most=1.0)]


class LeastRecentlyUsed(PrefixTree):
    """Drops what was used longest ago, whatever it is."""

    def _heap(self, _: Node) -> list[Entry]:
        return self._others


@dataclass(order=True)
class Talk:
    """A talk, and when its next turn comes."""

    at: float
    number: int
    tokens: list[int] = field(compare=False)
    turns: list[tuple[float, int, bool]] = field(compare=False)
    """For each turn that is left the seconds before it, its new tokens, and whether its answer ends in a call."""


ANSWER, TOKEN_S, ANSWER_TOKEN_S = 40, 0.004, 0.03


def talks(rng: random.Random, count: int, share: float) -> list[Talk]:
    """Talks of which so many are an agent's, whose turns wait for tools; people leave the others at any turn."""

    def seconds(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    found, at = [], 0.0
    for n in range(count):
        at += rng.expovariate(0.5)
        is_agent = rng.random() < share
        turns = rng.randint(3, 28) if is_agent else 1 + min(9, int(rng.expovariate(0.5)))
        waits = [seconds(0.1, 30) if is_agent else seconds(5, 120) for _ in range(turns)]
        news = [rng.randrange(20, 400) for _ in range(turns)]
        calls = [is_agent and k < turns - 1 for k in range(turns)]
        tokens = [n % 3] * 64 + [rng.randrange(1000) for _ in range(rng.randrange(100, 1500))]
        found.append(Talk(at, n, tokens, list(zip([0.0, *waits[1:]], news, calls, strict=True))))
    return found


def simulated(
    tree_of: type[PrefixTree], seed: int, a: argparse.Namespace, share: float, pages: int
) -> tuple[int, float]:
    """Tokens computed again, and pages × seconds, of talks that are answered one after the other."""
    rng, now = random.Random(seed), 0.0
    waiting = talks(rng, a.requests, share)
    pool = small_pool(pages)
    tree = tree_of(pool, clock=lambda: now)
    heapq.heapify(waiting)
    again, waste, computed = 0, 0.0, dict[int, int]()
    while waiting:
        talk = heapq.heappop(waiting)
        before, now = now, max(now, talk.at)
        _, new, calls = talk.turns.pop(0)
        talk.tokens += [rng.randrange(1000) for _ in range(new)]
        prompt = len(talk.tokens)
        stored = tree.longest(talk.tokens[:-1], [False] * (prompt - 1)).length
        again += max(0, computed.get(talk.number, 0) - stored)
        waste += pool.in_use * (now - before)
        began = now
        now += TOKEN_S * (prompt - stored) + ANSWER_TOKEN_S * ANSWER
        talk.tokens += [rng.randrange(1000) for _ in range(ANSWER)]
        filled(tree, pool, talk.tokens[:-1], Outcome(in_call=calls), prompt)
        waste += pool.in_use * (now - began)
        computed[talk.number] = (len(talk.tokens) - 1) // PAGE_POSITIONS * PAGE_POSITIONS
        if talk.turns:
            talk.at = now + talk.turns[0][0]
            heapq.heappush(waiting, talk)
    return again, waste


def tools(a: argparse.Namespace) -> list[str]:
    lines = []
    for share in (0.0, 0.5, 1.0):
        for part in (0.25, 0.5, 1.0):
            sums = {LeastRecentlyUsed: [0.0, 0.0], PrefixTree: [0.0, 0.0]}
            for seed in range(a.seeds):
                pages = int(part * most_pages(seed, a, share))
                for tree_of, found in sums.items():
                    again, waste = simulated(tree_of, seed, a, share, pages)
                    found[0], found[1] = found[0] + again, found[1] + waste
            (lru_again, lru_waste), (again, waste) = sums.values()
            what = f"tools, {share:.0%} agents, {part:.0%} of the memory"
            print(f"{what}: {again:,.0f} tokens again, least recently used {lru_again:,.0f}")
            if lru_again:
                lines.append(
                    verdict(f"{what}, tokens computed again ÷ least recently used", again / lru_again, at_most=1.0)
                )
            lines.append(verdict(f"{what}, bytes × time ÷ least recently used", waste / lru_waste, at_most=1.0))
    return lines


def most_pages(seed: int, a: argparse.Namespace, share: float) -> int:
    """Pages of all talks that are under way at once, at most: what would keep all of them."""
    rng, events, held = random.Random(seed), [], {}
    for talk in talks(rng, a.requests, share):
        at, tokens = talk.at, len(talk.tokens)
        for wait, new, _ in talk.turns:
            at, tokens = at + wait, tokens + new + ANSWER
            events.append((at, talk.number, tokens))
        events.append((at, talk.number, 0))
    most = 0
    for _, number, tokens in sorted(events):
        held[number] = -(-tokens // PAGE_POSITIONS)
        most = max(most, sum(held.values()))
    return most


def agents(a: argparse.Namespace) -> list[str]:
    with opened(a) as model:
        kept, dropped = (load_of_agents(model, a, drops=drops) for drops in (False, True))
    return [verdict("agents, requests/s ÷ those with nothing kept at a pause", kept / dropped, at_least=1.5)]


def load_of_agents(model: Model, a: argparse.Namespace, *, drops: bool) -> float:
    """Requests per second."""
    rng, longest = random.Random(2), 28 * 56 + 200
    budget = a.budget * pages_of(longest) * model.executor.new_pool().page_nbytes
    plans, at = [], 0.0
    for _ in range(a.agents):
        at += rng.expovariate(2 * a.speed)
        waits = [math.exp(rng.uniform(math.log(0.1), math.log(30))) / a.speed for _ in range(rng.randint(3, 28))]
        plans.append((at, some(rng, 200), [(wait, some(rng, 40)) for wait in waits]))
    salts = itertools.count()
    with Engine(model, kv_budget=budget, speculate="off") as engine:

        def answer(tokens: list[int]) -> list[int]:
            salt = str(next(salts)) if drops else ""
            stream = engine.generate(tokens, max_tokens=16, sampling=Sampling(), cache_salt=salt)
            stream.expect_back()
            "".join(stream)
            return [*tokens, *stream.token_ids]

        def request(at: float, prompt: list[int], turns: list[tuple[float, list[int]]]) -> None:
            time.sleep(at)
            tokens = answer(prompt)
            for wait, result in turns:
                time.sleep(wait)
                tokens = answer([*tokens, *result])

        threads = [threading.Thread(target=request, args=plan) for plan in plans]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds, found = time.perf_counter() - began, engine.stats
    kept = found.cached_tokens / found.prompt_tokens
    print(
        f"agents, {'nothing kept' if drops else 'least waste':12}: {a.agents} requests in {seconds:.1f} s, busy "
        f"{found.busy_s:.1f} s; preemptions {found.preemptions}; of prompts {kept:.0%} were kept"
    )
    return float(a.agents / seconds)


def some(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(300, VOCABULARY) for _ in range(count)]


def restart(a: argparse.Namespace) -> list[str]:
    rng = random.Random(1)
    prompt = some(rng, a.prompt)
    folder = Path(tempfile.mkdtemp(dir=a.folder))
    times, read = [], 0
    try:
        with built(a) as path:
            for _ in range(2):
                with load(path, mode=a.mode, context=8192, threads=a.threads, device="cpu") as model:
                    model.warm_up()
                    with Engine(model, speculate="off", kv_disk=folder) as engine:
                        drop(folder)
                        stream = engine.generate(prompt, max_tokens=2, sampling=Sampling())
                        "".join(stream)
                        times.append(stream.stats.first_token_s)
                        read = engine.stats.kv_disk_tokens
                        engine.close(60)
        nbytes = sum(file.stat().st_size for file in folder.glob("*.pages"))
    finally:
        shutil.rmtree(folder)
    print(
        f"restart: first token of {a.prompt} tokens: computed {times[0]:.2f} s, found again {times[1]:.3f} s "
        f"({read} tokens, {nbytes / 2**20:.0f} MiB from disk)"
    )
    return [verdict("restart, computing a prompt ÷ finding it again", times[0] / times[1], at_least=10)]


def drop(folder: Path) -> None:
    """Let the system's page cache drop the files of a folder."""
    for file in folder.glob("*.pages"):
        number = os.open(file, os.O_RDONLY)
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def main() -> None:
    a = arguments()
    parts = {"evict": evict, "tools": tools, "agents": agents, "restart": restart}
    print("\n".join(line for name in a.parts.split(",") for line in parts[name](a)))


if __name__ == "__main__":
    main()
