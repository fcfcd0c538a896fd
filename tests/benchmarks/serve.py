"""Servers under load: pi-serve beside llama-server, with as many slots, in the same rounds.

nox -s bench -- serve [--parts load,alone,health,cancel,overload] [--clients 1,2,4,8,16,32,64] [--rounds 3] [--quick]
                      [--format q8] [--slots 8] [--prompts 32,128,256] [--answer 128] [--json PATH] [--layers 16] …

    load      closed loops of 1 to 64 clients, and open loops at shares of what llama-server (or ours) does with as many
              clients as slots: tokens/s, time to the first token, time between tokens
    alone     one client beside the engine without a server, in the same rounds
    health    `/health` while a prompt of 8,000 tokens is read
    cancel    1,000 clients who leave at random moments: pages that nobody holds any more
    overload  ten times as many requests as can be answered: statuses, and memory

A synthetic Llama whose neurons fire at a set density (recipes/demo/sparse_model); llama-server has random weights of
the same shape and bits. Prompts are token ids that no other prompt begins with. Answers are greedy and have a fixed
length; nothing is guessed. Where llama-server is missing or fails, its rows say so.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx
import psutil
from serving.load import Load, Prompts, ask, closed, opened, run
from serving.servers import OURS, PEER, Server, llama_server, our_server
from serving.table import LoadRow, load_row, percentile, print_rows
from side_by_side.batches import Target, print_targets
from side_by_side.gguf_file import write_gguf
from side_by_side.llama_cpp_build import SERVER
from side_by_side.process import EngineError, Worker, threads
from side_by_side.shape import add_shape, decoder_of
from side_by_side.table import print_activity
from sparse_model import Spec, build
from support.synthetic import number_tokenizer

from pi_runtime.artifact.sizes import PARTS

LONG_PROMPT, CONTEXT, PEER_CONTEXT = 8000, 8320, 1024
PART_NAMES = ("load", "alone", "health", "cancel", "overload")
LOADS = (0.5, 0.9)
"""Of the open loops: shares of the rate that a closed loop with a client a slot reaches."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PART_NAMES))
    parser.add_argument("--clients", default="1,2,4,8,16,32,64")
    parser.add_argument("--prompts", default="32,128,256", help="lengths, drawn at random")
    parser.add_argument("--format", default="q8")
    parser.add_argument("--predictor-format", default="q4")
    parser.add_argument("--mode", default="predicted")
    parser.add_argument("--peer", type=Path, default=SERVER, help="the program llama-server")
    parser.add_argument("--folder", type=Path, help="for the models, some GB; default: a temporary one")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--quick", action="store_true", help="one round of few clients, and short parts")
    for name, default in {"slots": 8, "rounds": 3, "answer": 128, "requests": 4, "cancels": 1000}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--overload-seconds", type=float, default=60.0)
    add_shape(parser)
    a = parser.parse_args()
    if a.quick:
        a.clients, a.rounds, a.cancels, a.overload_seconds = "1,8", 1, 100, 15.0
    return a


class Bench:
    """Both servers, started."""

    def __init__(self, a: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        self.a, self.artifact = a, folder / "model.pi"
        decoder = replace(decoder_of(a), context_length=CONTEXT)
        formats = {**dict.fromkeys(PARTS, a.format), "predictor": a.predictor_format}
        spec = Spec(decoder=decoder, formats=formats, density=a.density, rank=a.rank)
        activity = build(spec, {1.0: self.artifact}, number_tokenizer(decoder.vocab_size))
        print_activity(a.format, activity[1.0])
        write_gguf(folder / "peer.gguf", decoder, a.format, has_tokenizer=True)
        # As much as one long prompt takes, so that it is soon full: later growth is none of pages.
        kv_bytes = 2 * 2 * decoder.n_layers * decoder.n_kv_heads * decoder.head_dim * (CONTEXT + 64)
        ours = our_server(self.artifact, a.slots, CONTEXT, kv_bytes, a.mode, threads(), folder / "ours.log")
        peer = llama_server(a.peer, folder / "peer.gguf", a.slots, PEER_CONTEXT, threads(), folder / "peer.log")
        self.ours, self.peer = stack.enter_context(ours), stack.enter_context(peer)
        self.prompts = Prompts([int(n) for n in a.prompts.split(",")], decoder.vocab_size, a.answer)
        self._stack = stack
        for server in (self.ours, self.peer):
            with suppress(EngineError):  # the server remembers it
                closed(server, self.prompts, a.slots, a.slots, "first")

    def load(self) -> tuple[list[LoadRow], list[Target]]:
        """All loads on both, in turns."""
        clients, slots = [int(n) for n in self.a.clients.split(",")], self.a.slots
        rows = list(self._compared({f"{n} clients": self._closed(n) for n in clients}))
        base = next((s for s in (self.peer, self.ours) if s.failure is None), self.ours)
        rate = closed(base, self.prompts, slots, 2 * slots, "rate").requests_per_s
        rows += self._compared({f"{rate * s:.2f} requests/s": self._opened(rate * s, 2 * slots) for s in LOADS})
        held = [row.ratios for row in rows if row.server == OURS and row.load == "8 clients"]
        return rows, [Target(what=f"8 clients ÷ {PEER}", wanted=1.5, found=found) for found in held]

    def _closed(self, clients: int) -> Callable[[Server, object], Load]:
        requests = max(self.a.requests, clients)
        return lambda server, seed: closed(server, self.prompts, clients, requests, f"{clients} {seed}")

    def _opened(self, rate: float, requests: int) -> Callable[[Server, object], Load]:
        return lambda server, seed: opened(server, self.prompts, rate, requests, f"{rate} {seed}")

    def _compared(self, loads: dict[str, Callable[[Server, object], Load]]) -> Iterator[LoadRow]:
        """Every load on both servers once a round, the order turned round each time."""
        for name, ask_for in loads.items():
            found: dict[str, list[Load]] = {OURS: [], PEER: []}
            for n in range(self.a.rounds):
                for server in [self.ours, self.peer][:: 1 if n % 2 else -1]:
                    with suppress(EngineError):  # the server remembers it
                        found[server.name].append(ask_for(server, n))
                    if server is self.ours and server.failure is not None:
                        raise EngineError(server.failure)
            both = len(found[PEER]) == len(found[OURS])
            pairs = zip(found[OURS], found[PEER], strict=True) if both else ()
            ratios = [own.tokens_per_s / peer.tokens_per_s for own, peer in pairs]
            rows = [load_row(OURS, name, found[OURS], ratios)]
            if both:
                rows.append(load_row(PEER, name, found[PEER], ()))
            else:
                rows.append(LoadRow(server=PEER, load=name, failure=self.peer.failure or "failed in a round"))
            print_rows(rows)
            yield from rows

    def alone(self) -> list[Target]:
        """One client beside the engine's own answer: to its first token, and all of it."""
        worker = self._stack.enter_context(Worker("engine", "side_by_side.ours"))
        worker.ask("open_model", name="", path=str(self.artifact), mode=self.a.mode, context=CONTEXT)
        first, whole = [], []
        for n in range(max(5, 3 * self.a.rounds) + 1):
            prompt = self.prompts.prompt(f"alone {n}")
            sides: dict[str, tuple[float, float]] = {}
            for side in ("engine", "server")[:: 1 if n % 2 else -1]:
                if side == "engine":
                    own = worker.ask("first_token", name="", prompt=prompt, tokens=self.a.answer)
                    sides[side] = own["first_s"], own["seconds"]
                else:
                    answer = run(self.ours, lambda http, p=prompt: ask(http, self.ours, p, self.a.answer))
                    sides[side] = answer.first_s, answer.times[-1] - answer.began
            if n:  # the first faults pages in
                first.append(sides["engine"][0] / sides["server"][0])
                whole.append(sides["engine"][1] / sides["server"][1])
        return [
            Target(what="1 client, first token: engine ÷ server", wanted=0.97, found=(statistics.median(first),)),
            Target(what="1 client, throughput: server ÷ engine", wanted=0.97, found=(statistics.median(whole),)),
        ]

    def health(self) -> list[Target]:
        """How long `/health` takes while a long prompt is read."""
        rng = random.Random(1)
        prompt = [rng.randrange(300, self.prompts.vocabulary) for _ in range(LONG_PROMPT)]

        async def loop(http: httpx.AsyncClient) -> list[float]:
            long, times = asyncio.create_task(ask(http, self.ours, prompt, 1)), []
            while not long.done():
                began = time.perf_counter()
                (await http.get(f"{self.ours.url}/health")).raise_for_status()
                times.append(time.perf_counter() - began)
                await asyncio.sleep(0.02)
            await long
            return times

        times = run(self.ours, loop)
        p99 = percentile(times, 0.99)
        print(f"health: {len(times)} times during a prompt of {LONG_PROMPT} tokens, p99 {1e3 * p99:.1f} ms")
        return [Target(what="50 ms ÷ p99 of /health during a long prompt", wanted=1.0, found=(0.05 / p99,))]

    def cancel(self) -> list[Target]:
        """Clients who leave at random; pages that neither a request nor the tree of prefixes holds afterwards."""
        rng, left = random.Random(2), 0

        async def loop(http: httpx.AsyncClient) -> None:
            nonlocal left
            numbers = iter(range(self.a.cancels))

            async def client() -> None:
                nonlocal left
                for n in numbers:
                    try:
                        async with asyncio.timeout(rng.expovariate(2.0)):
                            await ask(http, self.ours, self.prompts.prompt(f"cancel {n}"), 256)
                    except TimeoutError:
                        left += 1

            await asyncio.gather(*(client() for _ in range(4 * self.a.slots)))

        run(self.ours, loop)
        figures = self._settled()
        lost = figures["kv_pages_used"] - figures["kv_pages_kept"]
        print(f"cancel: {left} of {self.a.cancels} left; {figures['kv_pages_kept']:.0f} pages kept, {lost:.0f} lost")
        return [Target(what="pages lost after cancellations (0 is reached)", wanted=0.0, found=(-lost,))]

    def overload(self) -> list[Target]:
        """Ten times the rate that can be answered: statuses, and what memory does."""
        assert self.ours.process is not None
        process = psutil.Process(self.ours.process.pid)
        rate = 10 * closed(self.ours, self.prompts, self.a.slots, 2 * self.a.slots, "capacity").requests_per_s
        statuses: dict[int, int] = {}
        resident: list[int] = []

        async def one(http: httpx.AsyncClient, n: int) -> None:
            answer = await ask(http, self.ours, self.prompts.prompt(f"overload {n}"), self.a.answer)
            statuses[answer.status] = statuses.get(answer.status, 0) + 1

        async def loop(http: httpx.AsyncClient) -> None:
            rng, tasks, began = random.Random(3), set(), time.monotonic()
            while (passed := time.monotonic() - began) < self.a.overload_seconds:
                tasks.add(asyncio.create_task(one(http, len(tasks))))
                if passed > 0.3 * self.a.overload_seconds:
                    found = process.memory_info()
                    resident.append(found.rss - found.shared)
                await asyncio.sleep(rng.expovariate(rate))
            await asyncio.gather(*tasks)

        run(self.ours, loop)
        tenth = max(1, len(resident) // 10)
        drift = statistics.median(resident[-tenth:]) / statistics.median(resident[:tenth]) - 1
        told = ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items()))
        print(f"overload: {rate:.1f} requests/s for {self.a.overload_seconds:g} s: {told}; memory {drift:+.1%}")
        errors = sum(count for status, count in statuses.items() if status >= 500)
        return [
            Target(what="server errors under overload (0 is reached)", wanted=0.0, found=(-errors,)),
            Target(what="memory before ÷ after overload", wanted=0.98, found=(1 / (1 + drift),)),
        ]

    def _settled(self) -> dict[str, float]:
        """The server's figures once nothing runs."""
        while True:
            lines = httpx.get(f"{self.ours.url}/metrics", timeout=60).text.splitlines()
            pairs = [line.split() for line in lines if line.startswith("pi_") and "{" not in line]
            figures = {name.removeprefix("pi_"): float(value) for name, value in pairs}
            if not figures["running_answers"] + figures["waiting_answers"] + figures["open_requests"]:
                return figures
            time.sleep(0.05)


@dataclass(frozen=True)
class Results:
    """What was measured."""

    rows: Sequence[LoadRow]
    targets: Sequence[Target]


def main() -> None:
    a = arguments()
    rows: list[LoadRow] = []
    held: list[Target] = []
    with tempfile.TemporaryDirectory(dir=a.folder) as folder, ExitStack() as stack:
        bench = Bench(a, Path(folder), stack)
        for part in a.parts.split(","):
            if part == "load":
                rows, found = bench.load()
            else:
                found = getattr(bench, part)()
            held += found
    print_targets(held)
    if a.json:
        a.json.write_text(json.dumps(asdict(Results(rows, held)), indent=1) + "\n")


if __name__ == "__main__":
    main()
