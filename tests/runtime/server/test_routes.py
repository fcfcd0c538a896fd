"""What the routes answer is what the OpenAPI document, which is made of the same table, says of them."""

import base64
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from support.serving import Served, serving

from pi_runtime.server import routes
from pi_runtime.server.openapi import document
from pi_runtime.server.routes import chat_page

Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def served(alphabet: Path) -> Any:
    with serving(alphabet) as served:
        yield served


def test_what_the_routes_answer_follows_the_document(served: Served) -> None:
    described = served.get("/openapi.json").json()
    assert described["components"]["schemas"]["ChatRequest"]["properties"]["model"]["anyOf"][0]["enum"] == [served.name]
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

    def counted(names: Any, *routes: Any, **options: Any) -> dict[str, Any]:
        made.extend(names)
        return document(names, *routes, **options)

    monkeypatch.setattr(routes, "document", counted)
    routes._document.cache_clear()
    served = serve(alphabet)
    assert served.get("/openapi.json").json() == served.get("/openapi.json").json()
    assert made == [served.name]


TEXT = chat_page().body.decode()


def directives() -> dict[str, str]:
    policy = chat_page().headers["content-security-policy"]
    return {name: value for name, _, value in (part.partition(" ") for part in policy.split("; "))}


def test_the_policy_allows_the_page_s_own_style_and_script_and_nothing_else() -> None:
    found = directives()
    assert found["default-src"] == "'none'"
    assert found["connect-src"] == "'self'"
    assert "unsafe" not in chat_page().headers["content-security-policy"]
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", TEXT, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert found[directive] == f"'sha256-{digest}'"


def test_the_page_has_no_address_but_its_own() -> None:
    # A name of SVG's, which is never loaded.
    addresses = set(re.findall(r"(?:https?:)?//[\w.]+", TEXT)) - {"http://www.w3.org"}
    assert addresses == set()
    assert not re.findall(r"<(?:link|script|img|iframe)[^>]+(?:src|href)=\"(?!data:)", TEXT)


def test_nothing_that_a_policy_would_refuse() -> None:
    assert not re.findall(r"<[^>]+\s(?:style|on\w+)=", TEXT)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", TEXT)


def test_the_page_is_small_and_its_lines_are_short() -> None:
    assert len(chat_page().body) < 100_000
    assert max(map(len, TEXT.splitlines())) <= 120
