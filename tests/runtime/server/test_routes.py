"""What the routes answer is what the OpenAPI document, which is made of the same table, says of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from support.serving import Served, serving

from pi_runtime.server import routes
from pi_runtime.server.openapi import document

Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def served(alphabet: Path) -> Any:
    with serving(alphabet) as served:
        yield served


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

    def counted(name: str, *routes: Any, **options: Any) -> dict[str, Any]:
        made.append(name)
        return document(name, *routes, **options)

    monkeypatch.setattr(routes, "document", counted)
    routes._document.cache_clear()
    served = serve(alphabet)
    assert served.get("/openapi.json").json() == served.get("/openapi.json").json()
    assert made == [served.name]
