"""An engine that cannot be opened: the server says so, and keeps why."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

from pi_runtime.errors import UsageError
from pi_runtime.server.errors import ApiError
from pi_runtime.server.service import MOST_OF_ONE, REMEMBERED, SLOW_S, WORKERS, Preparation, Service
from pi_runtime.server.settings import ServerSettings


def test_why_an_engine_is_not_opened_is_kept() -> None:
    def broken() -> None:
        raise UsageError("no such model")

    async def opened() -> Service:
        service, failed = Service(broken, ServerSettings()), asyncio.Event()  # type: ignore[arg-type]
        service.on_failure = failed.set
        service.start()
        async with asyncio.timeout(30):
            await failed.wait()
        return service

    service = asyncio.run(opened())
    assert (service.phase, service.health) == ("failed", (False, "failed"))
    assert "no such model" in str(service.failure)
    assert not service.is_held_up


LIMIT_S = 60.0


class Held:
    """Work that goes on until it is let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gate = threading.Event()

    def work(self, name: str, body: object = None) -> Callable[[], str]:
        def call() -> str:
            self.begun.append(name)
            assert self.gate.wait(LIMIT_S)
            return name if body is None else f"{name} of {body!r}"

        return call


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not true():
            await asyncio.sleep(0.001)


def run(preparation: Preparation, held: Held, client: str, name: str) -> asyncio.Task[str]:
    return asyncio.create_task(preparation.run(client, held.work(name)))


def test_one_client_leaves_a_thread_to_others() -> None:
    async def all_of_it() -> None:
        preparation, held = Preparation(LIMIT_S), Held()
        many = [run(preparation, held, "many", f"many {n}") for n in range(10)]
        await until(lambda: len(held.begun) == MOST_OF_ONE)
        other = run(preparation, held, "other", "other")
        await until(lambda: "other" in held.begun)
        assert len(held.begun) == MOST_OF_ONE + 1 == WORKERS
        held.gate.set()
        assert await asyncio.gather(*many, other) == [*(f"many {n}" for n in range(10)), "other"]
        await until(lambda: preparation.waiting == 0)
        preparation.close()

    asyncio.run(all_of_it())


def test_clients_take_turns() -> None:
    async def all_of_it() -> None:
        preparation, held, one, rest = Preparation(LIMIT_S), Held(), Held(), Held()
        busy = [run(preparation, held, f"busy {n}", "busy") for n in range(WORKERS - 1)]
        busy.append(run(preparation, one, "one", "one"))
        await until(lambda: len(held.begun) + len(one.begun) == WORKERS)
        rest.gate.set()
        clients = ["many", "many", "many", "a", "a", "b"]
        tasks = [run(preparation, rest, client, client) for client in clients]
        await until(lambda: preparation.waiting == len(clients))
        one.gate.set()  # so one thread does all that waits
        await asyncio.gather(*tasks)
        assert rest.begun == ["many", "a", "b", "many", "a", "many"]
        held.gate.set()
        await asyncio.gather(*busy)
        preparation.close()

    asyncio.run(all_of_it())


def test_what_waits_is_dropped_with_its_body_when_its_client_leaves() -> None:
    class Body:
        pass

    async def all_of_it() -> None:
        preparation, held = Preparation(LIMIT_S), Held()
        busy = [run(preparation, held, f"busy {n}", "busy") for n in range(WORKERS)]
        await until(lambda: len(held.begun) == WORKERS)
        body = Body()
        told = weakref.ref(body)
        task = asyncio.create_task(preparation.run("left", held.work("left", body)))
        del body
        await until(lambda: preparation.waiting == 1)
        task.cancel()
        await asyncio.wait({task})
        del task
        gc.collect()
        assert told() is None
        assert preparation.waiting == 0
        held.gate.set()
        await asyncio.gather(*busy)
        assert "left" not in held.begun
        preparation.close()

    asyncio.run(all_of_it())


def test_a_thread_whose_client_left_is_busy_until_its_work_ends() -> None:
    async def all_of_it() -> None:
        preparation, held, more = Preparation(LIMIT_S), Held(), Held()
        left = [run(preparation, held, f"left {n}", "left") for n in range(WORKERS)]
        await until(lambda: len(held.begun) == WORKERS)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        more.gate.set()
        waits = run(preparation, more, "next", "next")
        await until(lambda: preparation.waiting == 1)
        held.gate.set()
        assert await waits == "next"
        preparation.close()

    asyncio.run(all_of_it())


def test_one_that_leaves_as_its_turn_comes_gives_the_thread_back() -> None:
    async def all_of_it() -> None:
        preparation, held = Preparation(LIMIT_S), Held()
        held.gate.set()
        for _ in range(3 * WORKERS):
            task = run(preparation, held, "left", "left")
            await asyncio.sleep(0)  # its turn has come, and it has not noticed
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert await run(preparation, held, "left", "stays") == "stays"
        preparation.close()

    asyncio.run(all_of_it())


def test_one_that_leaves_while_a_thread_becomes_free_takes_nothing_with_it() -> None:
    async def all_of_it() -> None:
        preparation, held, one, rest = Preparation(LIMIT_S), Held(), Held(), Held()
        loop, is_free = asyncio.get_running_loop(), threading.Event()
        busy = [run(preparation, held, f"busy {n}", "busy") for n in range(WORKERS - 1)]
        busy.append(run(preparation, one, "one", "one"))
        await until(lambda: len(held.begun) + len(one.begun) == WORKERS)
        left, stays, other = (run(preparation, rest, name[:4], name) for name in ("left", "left too", "other"))
        await until(lambda: preparation.waiting == 3)
        tell = loop.call_soon_threadsafe

        def told(*args: Any, **options: Any) -> asyncio.Handle:
            handle = tell(*args, **options)
            is_free.set()
            return handle

        loop.call_soon_threadsafe = told  # type: ignore[method-assign,assignment]
        one.gate.set()
        assert is_free.wait(LIMIT_S)  # the loop knows of it next
        left.cancel()
        rest.gate.set()
        assert await asyncio.gather(stays, other) == ["left too", "other"]
        held.gate.set()
        await asyncio.gather(*busy)
        assert left.cancelled()
        more = [run(preparation, held, f"more {n}", "more") for n in range(WORKERS)]
        assert await asyncio.gather(*more) == ["more"] * WORKERS
        preparation.close()

    asyncio.run(all_of_it())


def test_what_takes_too_long_and_what_never_began() -> None:
    async def all_of_it() -> None:
        preparation, held = Preparation(0.05), Held()
        tasks = [run(preparation, held, f"client {n}", "work") for n in range(WORKERS + 1)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        codes = [(error.status, error.code) for error in found if isinstance(error, ApiError)]
        assert codes == [(400, "too_complex")] * WORKERS + [(429, "queue_full")]
        held.gate.set()
        preparation.close()

    asyncio.run(all_of_it())


def test_a_client_whose_requests_take_long_has_one_thread() -> None:
    """Until they take less again: it is the mean of the latest ones that counts."""

    async def all_of_it() -> None:
        preparation = Preparation(LIMIT_S)
        for _ in range(5):
            preparation._end("slow", 2 * SLOW_S)
            preparation._end("quick", 0.001)
            preparation._busy.clear()
        held = Held()
        many = [run(preparation, held, client, client) for client in ("slow",) * 5 + ("quick",) * 5]
        await until(lambda: len(held.begun) == WORKERS)
        assert sorted(held.begun) == ["quick"] * MOST_OF_ONE + ["slow"]
        held.gate.set()
        await asyncio.gather(*many)
        await until(lambda: not preparation._busy)
        assert preparation._most_of("slow") == MOST_OF_ONE
        for n in range(2 * REMEMBERED):
            preparation._end(str(n), 1.0)
        assert len(preparation._mean_s) == REMEMBERED
        preparation.close()

    asyncio.run(all_of_it())
