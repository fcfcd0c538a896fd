"""An engine that cannot be opened: the server says so, and keeps why."""

import asyncio

from pi_runtime.errors import UsageError
from pi_runtime.server.service import Service
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
