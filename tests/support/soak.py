"""Many clients on a few slots, half of them leaving: each answer is the model's own, and nothing grows.

Every client asks again and again, for whole answers or streams. Some leave: while they wait, before the first token, or
after some. What is compared was computed by the model alone before.
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from pi_runtime import Model, Sampling
from support.serve_process import ServeProcess

READ_AHEAD = 0.2
"""Share of the requests of whose prompt a part is read ahead."""
CANCELLED = 0.5
"""Share of the requests whose client leaves."""
WARM_UP = 0.2
"""Share of the time after which memory must no longer grow."""


@dataclass(frozen=True)
class Question:
    """A request, and the answer that the model gives it alone."""

    settings: Mapping[str, Any]
    text: str
    finish_reason: str


@dataclass
class Found:
    """What became of all requests."""

    answered: int = 0
    cancelled: int = 0
    wrong: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    """Of all answers of which something came."""
    resident: list[tuple[float, int]] = field(default_factory=list)
    """Memory of the server's process, by the share of the time that had passed."""

    @property
    def drift(self) -> float:
        """How much memory grew between the end of the warm-up and the end."""
        settled = [(at, nbytes) for at, nbytes in self.resident if at >= WARM_UP]
        third = WARM_UP + (1 - WARM_UP) / 3
        first = statistics.median(nbytes for at, nbytes in settled if at < third)
        return statistics.median(nbytes for at, nbytes in settled if at > 1 - (third - WARM_UP)) / first - 1


def questions(model: Model, count: int, rng: random.Random) -> list[Question]:
    """Requests of many lengths; some begin alike. Most are greedy, the others have a seed."""
    letters = "etaoin shrdlu"
    beginnings = ["".join(rng.choices(letters, k=rng.randint(1, 60))) for _ in range(count // 4)]
    found = []
    for n in range(count):
        prompt = rng.choice(beginnings) + "".join(rng.choices(letters, k=rng.randint(1, 30)))
        sampled = {"temperature": 1.0, "seed": n} if n % 4 == 0 else {"temperature": 0.0}
        settings = {"prompt": prompt, "max_tokens": rng.randint(1, 60), **sampled}
        sampling = Sampling.from_generation_config(model.manifest.generation, **sampled)
        answer = model.generate(prompt, max_tokens=settings["max_tokens"], sampling=sampling)
        text = "".join(answer)
        found.append(Question(settings, text, "length" if answer.finish_reason == "length" else "stop"))
    return found


def soak(served: ServeProcess, asked: Sequence[Question], *, clients: int, seconds: float, seed: int = 0) -> Found:
    """Ask for so long, then see that the server comes to rest."""
    return asyncio.run(_soak(served, asked, clients, seconds, seed))


async def _soak(served: ServeProcess, asked: Sequence[Question], clients: int, seconds: float, seed: int) -> Found:
    found, began = Found(), time.monotonic()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits) as http:

        async def client(number: int) -> None:
            rng = random.Random(f"{seed} {number}")
            while time.monotonic() - began < seconds:
                await _Request(http, served.name, rng.choice(asked), rng, found).run()

        async def watch() -> None:
            while (passed := time.monotonic() - began) < seconds:
                found.resident.append((passed / seconds, served.resident_bytes))
                await asyncio.sleep(min(1.0, seconds / 100))

        await asyncio.gather(watch(), *(client(n) for n in range(clients)))
    return found


class _Request:
    """One request, to its end or until its client leaves."""

    def __init__(self, http: httpx.AsyncClient, model: str, asked: Question, rng: random.Random, found: Found) -> None:
        self._http, self._asked, self._rng, self._found = http, asked, rng, found
        self._leaves = rng.random() < CANCELLED
        self._streams = rng.random() < 0.5
        self._body = {"model": model, "stream": self._streams, **asked.settings}

    async def run(self) -> None:
        """Ask, and note what is wrong with the answer."""
        try:
            if self._rng.random() < READ_AHEAD:
                await self._read_ahead()
            # Spread from those who wait in the queue to those who have read some of their answer.
            async with asyncio.timeout(self._rng.expovariate(4.0) if self._leaves else None):
                await (self._stream() if self._streams else self._whole())
            self._found.answered += 1
        except TimeoutError:
            self._found.cancelled += 1
        except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
            self._found.wrong.append(f"{type(error).__name__}: {error}"[:500])

    async def _read_ahead(self) -> None:
        """Let a part of the prompt be read ahead, for as long as somebody types; beside others it may never run."""
        text = self._body["prompt"]
        begun = self._body | {"prompt": text[: self._rng.randint(1, len(text))], "max_tokens": 0, "stream": False}
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rng.expovariate(20.0)):
                response = await self._http.post("/v1/completions", json=begun)
                assert response.json()["usage"]["completion_tokens"] == 0, response.text

    async def _whole(self) -> None:
        response = await self._http.post("/v1/completions", json=self._body)
        assert response.status_code == 200, response.text
        told = response.json()
        self._found.ids.append(told["id"])
        (choice,) = told["choices"]
        self._compare(choice["text"], choice["finish_reason"])

    async def _stream(self) -> None:
        ids, text, reasons, marks = set(), "", [], 0
        async with self._http.stream("POST", "/v1/completions", json=self._body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                assert not marks, "an event after the last one"
                if line == "data: [DONE]":
                    marks += 1
                    continue
                told = json.loads(line.removeprefix("data: "))
                if told["id"] not in ids:
                    ids.add(told["id"])
                    self._found.ids.append(told["id"])
                for choice in told["choices"]:
                    assert not reasons, "text after the end"
                    text += choice["text"]
                    assert self._asked.text.startswith(text), (text, self._asked.text)
                    reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        assert (len(ids), len(reasons), marks) == (1, 1, 1)
        self._compare(text, reasons[0])

    def _compare(self, text: str, finish_reason: str) -> None:
        wanted = (self._asked.text, self._asked.finish_reason)
        assert (text, finish_reason) == wanted, ((text, finish_reason), wanted)


def check(served: ServeProcess, found: Found, largest_drift: float | None) -> dict[str, float]:
    """Raise AssertionError for whatever is wrong; the server's figures at the end. Without a limit memory may grow."""
    assert not found.wrong, (len(found.wrong), found.wrong[:5])
    assert len(found.ids) == len(set(found.ids))
    assert found.answered
    assert found.cancelled
    figures = served.wait_until_idle()
    assert figures["kv_pages_used"] == figures["kv_pages_kept"]
    if largest_drift is not None:
        assert found.drift < largest_drift, found.drift
    return figures
