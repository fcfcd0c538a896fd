"""The routes that say how the server is, and what it is."""

from functools import cached_property
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pi_runtime.server.api.openapi import document
from pi_runtime.server.api.served import Served
from pi_runtime.server.metrics import MEDIA
from pi_runtime.server.service import Service
from pi_runtime.server.settings import ServerSettings


class Host(Protocol):
    """What the routes need of the application."""

    service: Service
    settings: ServerSettings

    @property
    def served(self) -> Served:
        """The model as answers speak of it."""


class Figures:
    """The routes that say how the server is. They are answered from what is known, at once."""

    def __init__(self, host: Host) -> None:
        self._host, self._service = host, host.service

    async def health(self, _: Request) -> Response:
        """Whether requests are taken; 503 with the reason where they are not."""
        is_well, word = self._service.health
        return JSONResponse({"status": "ok" if is_well else word}, 200 if is_well else 503)

    async def metrics(self, _: Request) -> Response:
        """All figures, for Prometheus."""
        service, engine = self._service, self._service.opened
        text = service.metrics.text(
            None if engine is None else engine.stats,
            slots=service.settings.slots,
            open_requests=service.open_requests,
        )
        return Response(text, media_type=MEDIA)

    async def slots(self, _: Request) -> Response:
        """What runs in each slot: how far it is, and nothing of what it says."""
        context = self._service.engine.model.context
        running = [stream for run in self._service.runs for stream in run.streams if stream.is_running]
        found = []
        for number in range(self._service.settings.slots):
            slot: dict[str, Any] = {"id": number, "n_ctx": context, "is_processing": number < len(running)}
            if number < len(running):
                stats = running[number].stats
                slot |= {"prompt_tokens": stats.prompt_tokens, "cached_tokens": stats.cached_tokens}
                slot |= {"generated_tokens": stats.generated_tokens}
            found.append(slot)
        return JSONResponse(found)

    async def props(self, _: Request) -> Response:
        """What the server is."""
        served, settings = self._host.served, self._host.settings
        model = served.model
        return JSONResponse(
            {
                "model": served.name,
                "context": model.context,
                "mode": model.mode,
                "device": model.device,
                "chat_template": served.template,
                "total_slots": settings.slots,
                "queue": settings.queue,
                "system_fingerprint": served.fingerprint,
                "generation_defaults": dict(model.manifest.generation),
            }
        )

    async def described(self, _: Request) -> Response:
        """The OpenAPI document."""
        return Response(self._document, media_type=JSONResponse.media_type)

    @cached_property
    def _document(self) -> bytes:
        """Made once, for it takes some tenths of a second."""
        settings = self._host.settings
        found = document(settings.model_name, refuses_unknown=settings.unknown_fields == "refuse")
        return bytes(JSONResponse(found).body)
