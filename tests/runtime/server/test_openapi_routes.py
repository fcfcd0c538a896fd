"""The OpenAPI document speaks of the routes that there are, and of no others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from starlette.routing import Route
from support.serving import Served, serving

from pi_runtime.server import figures
from pi_runtime.server.api.openapi import OPERATIONS, document

Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def served(alphabet: Path) -> Any:
    with serving(alphabet) as served:
        yield served


def test_every_route_is_described(served: Served) -> None:
    app: Any = served.server.config.app
    routes = {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or {"POST"}) - {"HEAD"}
    }
    assert {(operation.method, operation.path) for operation in OPERATIONS} == routes


def test_what_the_routes_answer_follows_the_document(served: Served) -> None:
    described = served.get("/openapi.json").json()
    assert described["components"]["schemas"]["ChatRequest"]["properties"]["model"]["enum"] == [served.name]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            url = served.url + path.replace("{name}", served.name).replace("{id}", "none")
            answer = httpx.request(method, url, json={} if method == "post" else None)
            found = operation["responses"][str(answer.status_code)]["content"]
            media = answer.headers["content-type"].partition(";")[0]
            assert media in found, (path, media)
            if media == "application/json":
                schema = {**found[media].get("schema", {}), "components": described["components"]}
                jsonschema.Draft202012Validator(schema).validate(answer.json())


def test_the_document_is_made_once(serve: Serve, alphabet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(name: str, **options: Any) -> dict[str, Any]:
        made.append(name)
        return document(name, **options)

    monkeypatch.setattr(figures, "document", counted)
    served = serve(alphabet)
    assert served.get("/openapi.json").json() == served.get("/openapi.json").json()
    assert made == [served.name]
