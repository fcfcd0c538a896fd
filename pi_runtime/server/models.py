"""The routes that say which models there are, of which there is one, in the forms of OpenAI and Ollama."""

from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pi_runtime.server.api.ollama_models import ollama_version, running, tags
from pi_runtime.server.api.plain import list_models, retrieve_model
from pi_runtime.server.api.served import Served


class Host(Protocol):
    """What the routes need of the application."""

    @property
    def served(self) -> Served:
        """The model as answers speak of it."""


class Models:
    """What each route does."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def listed(self, _: Request) -> Response:
        """OpenAI's list."""
        return JSONResponse(list_models(self._host.served))

    async def one(self, request: Request) -> Response:
        """The model that the path names."""
        return JSONResponse(retrieve_model(request.path_params["name"], self._host.served))

    async def tagged(self, _: Request) -> Response:
        """Ollama's list."""
        return JSONResponse(tags(self._host.served))

    async def running(self, _: Request) -> Response:
        """Ollama's list of what is loaded."""
        return JSONResponse(running(self._host.served))

    async def version(self, _: Request) -> Response:
        """The version of Ollama's forms."""
        return JSONResponse(ollama_version())


def model_routes(host: Host) -> list[Route]:
    """All routes of models that are answered at once."""
    models = Models(host)
    return [
        Route("/v1/models", models.listed),
        Route("/v1/models/{name:path}", models.one),
        Route("/api/tags", models.tagged),
        Route("/api/ps", models.running),
        Route("/api/version", models.version),
    ]
