"""What a server is started with: keys, logs, pages of other origins, TLS, and the forms of errors."""

import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from support.serving import PATIENCE_S, Served, wait_until

Serve = Callable[..., Served]


def test_a_key_opens_every_route(alphabet: Path, serve: Serve) -> None:
    served = serve(alphabet, api_keys=("secret",))
    for path in ("/v1/models", "/metrics", "/slots", "/props", "/openapi.json"):
        refused = served.get(path)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert served.get(path, headers={"Authorization": "Bearer secret"}).status_code == 200
    assert served.get("/").status_code == served.get("/health").status_code == 200


def test_nothing_of_a_request_is_logged_unless_it_is_asked_for(
    alphabet: Path, serve: Serve, capfd: pytest.CaptureFixture[str]
) -> None:
    quiet = serve(alphabet)
    quiet.complete("private", max_tokens=1)
    quiet.complete("private", temperature="private")
    quiet.get("/private?private")
    served = serve(alphabet, log_requests=True)
    served.complete("private", max_tokens=1)
    served.get("/private?private")
    wait_until(lambda: len(served.lines) == 2)
    assert " POST /v1/completions 200 " in served.lines[0]
    assert " GET other 404 " in served.lines[1]
    assert quiet.lines == []
    assert "private" not in "".join([*served.lines, *capfd.readouterr()])


def test_pages_of_other_origins_are_refused_unless_they_are_allowed(alphabet: Path, serve: Serve) -> None:
    origin = {"Origin": "https://chat.example"}
    asks = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    served = serve(alphabet)
    assert served.get("/v1/models", headers=origin).status_code == 403
    assert httpx.options(f"{served.url}/v1/completions", headers=asks).status_code == 403
    served = serve(alphabet, cors=True, allowed_origins=("https://chat.example",), api_keys=("secret",))
    allowed = httpx.options(f"{served.url}/v1/completions", headers=asks)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
    found = served.get("/v1/models", headers={**origin, "Authorization": "Bearer secret"})
    assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, "https://chat.example")
    assert found.headers["access-control-expose-headers"] == "x-request-id, x-unknown-fields"
    other = served.get("/v1/models", headers={"Origin": "https://evil.example", "Authorization": "Bearer secret"})
    assert (other.status_code, "access-control-allow-origin" in other.headers) == (403, False)


def test_errors_on_ollamas_paths_have_ollamas_form(alphabet: Path, serve: Serve) -> None:
    served = serve(alphabet)
    for response in (served.post("/api/chat", {"model": "other", "messages": []}), served.get("/api/nothing")):
        assert response.status_code == 404
        assert isinstance(response.json()["error"], str)
    assert [model["name"] for model in served.get("/api/tags").json()["models"]] == ["alphabet:latest"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_tls(alphabet: Path, serve: Serve, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    alternative = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(
        [*command, *alternative, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
    )
    served = serve(alphabet, tls={"ssl_certfile": certificate, "ssl_keyfile": key})
    assert served.url.startswith("https://")
    context = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(base_url=served.url, verify=context, timeout=PATIENCE_S) as client:
        body = {"model": "alphabet", "prompt": "a", "max_tokens": 2}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "bc"
