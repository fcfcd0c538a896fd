"""Requests with prompts of token ids, in closed and open loops; when each piece of each answer came."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from side_by_side.process import EngineError

from serving.servers import Server

LIMIT_S = 1200.0
"""Time for one loop; what is not done then is a failure."""


@dataclass(frozen=True)
class Prompts:
    """Prompts of several lengths, none of which begin alike, so that nothing stored helps."""

    lengths: Sequence[int]
    vocabulary: int
    answer: int
    """Tokens of each answer."""

    def prompt(self, seed: object) -> list[int]:
        """The prompt of a number, the same for all servers."""
        rng = random.Random(str(seed))
        # The first ids are special ones in the one vocabulary or the other.
        return [rng.randrange(300, self.vocabulary) for _ in range(rng.choice(self.lengths))]


@dataclass
class Answer:
    """What came of a request, and when."""

    began: float
    status: int = 0
    times: list[float] = field(default_factory=list)
    """Of its pieces."""
    ended: float = 0.0

    @property
    def first_s(self) -> float:
        return self.times[0] - self.began

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True)
class Load:
    """What a loop measured."""

    tokens_per_s: float
    requests_per_s: float
    first_s: tuple[float, ...]
    gaps_s: tuple[float, ...]


async def ask(http: httpx.AsyncClient, server: Server, prompt: Sequence[int], tokens: int) -> Answer:
    """Ask for one answer as a stream."""
    body: dict[str, Any] = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0.0, "stream": True}
    answer = Answer(time.perf_counter())
    async with http.stream("POST", f"{server.url}/v1/completions", json=body | server.body) as response:
        answer.status = response.status_code
        async for line in response.aiter_lines():
            if line.startswith("data: {") and any(c["text"] for c in json.loads(line[6:])["choices"]):
                answer.times.append(time.perf_counter())
    answer.ended = time.perf_counter()
    return answer


def run(server: Server, loop: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
    """Run a loop against a server. Raises EngineError where the server fails."""
    server.check()

    async def bounded() -> Any:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(timeout=LIMIT_S, limits=limits) as http, asyncio.timeout(LIMIT_S):
            return await loop(http)

    try:
        return asyncio.run(bounded())
    except (httpx.HTTPError, TimeoutError) as error:
        time.sleep(0.5)  # a process that dies may take that long to be gone
        server.check()
        server.failure = f"{server.name} failed: {type(error).__name__}: {error}"
        raise EngineError(server.failure) from error


def closed(server: Server, prompts: Prompts, clients: int, requests: int, seed: object) -> Load:
    """So many clients, each of whom asks again when it has its answer."""

    async def loop(http: httpx.AsyncClient) -> Load:
        numbers = iter(range(requests))

        async def client() -> list[Answer]:
            return [await ask(http, server, prompts.prompt(f"{seed} {n}"), prompts.answer) for n in numbers]

        began = time.perf_counter()
        found = await asyncio.gather(*(client() for _ in range(clients)))
        return _load(server, [answer for answers in found for answer in answers], prompts, began)

    return run(server, loop)  # type: ignore[no-any-return]


def opened(server: Server, prompts: Prompts, rate: float, requests: int, seed: object) -> Load:
    """Requests that arrive at a rate, whether those before have their answers or not (a Poisson process)."""

    async def loop(http: httpx.AsyncClient) -> Load:
        rng, tasks, began = random.Random(str(seed)), [], time.perf_counter()
        for n in range(requests):
            tasks.append(asyncio.create_task(ask(http, server, prompts.prompt(f"{seed} {n}"), prompts.answer)))
            await asyncio.sleep(rng.expovariate(rate))
        return _load(server, await asyncio.gather(*tasks), prompts, began)

    return run(server, loop)  # type: ignore[no-any-return]


def _load(server: Server, answers: Sequence[Answer], prompts: Prompts, began: float) -> Load:
    seconds = max(answer.ended for answer in answers) - began
    wrong = [answer for answer in answers if answer.status != 200 or not answer.times]
    if wrong:
        raise EngineError(f"{server.name}: {len(wrong)} of {len(answers)} requests failed, status {wrong[0].status}")
    return Load(
        tokens_per_s=len(answers) * prompts.answer / seconds,
        requests_per_s=len(answers) / seconds,
        first_s=tuple(answer.first_s for answer in answers),
        gaps_s=tuple(gap for answer in answers for gap in answer.gaps_s),
    )
