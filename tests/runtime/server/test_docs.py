"""What the docs say of the server: its endpoints, metrics, limits and files; and the examples run."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import typer.main
from support.installed import install, new_environment
from support.paths import GOLDEN, ROOT
from support.serving import Served, serving
from support.synthetic import random_artifact, small_decoder

from pi_runtime.artifact.schema import Text
from pi_runtime.commands.serve import app
from pi_runtime.server.admission import OF_ONE, OTHER_FILES
from pi_runtime.server.api.body import MANY
from pi_runtime.server.edge import CLOSE_S
from pi_runtime.server.metrics import DISK, ENGINE, Metrics
from pi_runtime.server.routes import ROUTES
from pi_runtime.server.settings import Limits, ServerSettings

PAGE = "\n".join((ROOT / "docs" / "how-to" / name).read_text("utf-8") for name in ("server.md", "operate.md"))
EXAMPLES = ROOT / "docs" / "examples"
TEMPLATE = """{% if tools %}{{ tools | tojson }} <tool_call>{"name":, "arguments":}</tool_call>{% endif %}\
{% for m in messages %}{{ m.role }}: {{ m.content }}\
{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}assistant:"""


def section(title: str) -> str:
    """The text below a heading, up to the next one of the same level."""
    return re.split(r"\n## ", PAGE.split(f"\n## {title}\n")[1])[0]


def test_every_endpoint_is_in_the_table() -> None:
    routes = {(route.method.lower(), route.shown_path) for route in ROUTES}
    rows = re.findall(r"^\| (GET|POST|DELETE) \| (.*?) \|", section("Endpoints"), re.MULTILINE)
    listed = {(method.lower(), path) for method, paths in rows for path in re.findall(r"`(.*?)`", paths)}
    assert listed == routes


def test_every_metric_is_in_the_table() -> None:
    text = Metrics().text(None, slots=1, open_requests=0)
    found = {name for name, *_ in (*ENGINE, *DISK)} | set(re.findall(r"# TYPE pi_(\w+)", text))
    first_columns = re.findall(r"^\| (.*?) \|", section("Metrics"), re.MULTILINE)
    listed = {name for column in first_columns for name in re.findall(r"`(\w+)`", column)}
    assert listed == found


def test_every_metric_of_the_board_exists() -> None:
    board = json.loads((EXAMPLES / "grafana.json").read_text("utf-8"))
    text = Metrics().text(None, slots=1, open_requests=0)
    series = {f"pi_{name}" for name, *_ in (*ENGINE, *DISK)} | set(re.findall(r"^(pi_\w+)", text, re.MULTILINE))
    series |= set(re.findall(r"# TYPE (pi_\w+) counter", text))  # those with labels come with the first request
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    named = set(re.findall(r"pi_\w+", " ".join(shown)))
    assert len(named) > 15
    assert named <= series
    places = {(x, y) for panel in board["panels"] for x, y in squares(panel["gridPos"])}
    assert len(places) == sum(panel["gridPos"]["w"] * panel["gridPos"]["h"] for panel in board["panels"])
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def squares(place: dict[str, int]) -> list[tuple[int, int]]:
    columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
    return [(x, y) for x in columns for y in rows if x < 24]


def test_the_manifests_of_kubernetes_fit_together() -> None:
    yaml = pytest.importorskip("yaml")
    parts = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text("utf-8")))
    found = {part["kind"]: part for part in parts}
    assert found.keys() == {"Deployment", "Service", "PodDisruptionBudget", "PersistentVolumeClaim"}
    template = found["Deployment"]["spec"]["template"]
    labels, pod = template["metadata"]["labels"], template["spec"]
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert found[kind]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    service = found["Service"]
    assert service["spec"]["selector"].items() <= labels.items()
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    claims = [
        volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume
    ]
    assert claims == [found["PersistentVolumeClaim"]["metadata"]["name"]]
    command = container["command"]
    value = {flag: command[n + 1] for n, flag in enumerate(command) if flag.startswith("--")}
    assert set(value) <= flags()
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for path in (command[1], value["--api-key-file"], container["env"][0]["value"]):
        assert any(path.startswith(mount) for mount in mounts)
    assert container["env"][0]["name"] == "PI_CACHE_DIR"
    (port,) = container["ports"]
    assert port["containerPort"] == int(value["--port"])
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert value["--allowed-host"] == service["metadata"]["name"]
    assert pod["terminationGracePeriodSeconds"] > int(value["--drain-seconds"]) + CLOSE_S
    paths = {route.path for route in ROUTES if not route.needs_key}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in paths
        assert container[probe]["httpGet"]["port"] == port["name"]


def test_limits_are_those_of_the_settings() -> None:
    limits, settings, text = Limits(), ServerSettings(), section("Under load")
    rows = dict(re.findall(r"^\| (.*?) \| (.*?) \|$", text, re.MULTILINE))
    assert rows["body of a request"] == f"{limits.body_bytes >> 20} MiB"
    assert rows["request line and headers"] == f"{limits.header_bytes >> 10} KiB"
    assert rows["headers, and then the body, must come within"] == f"{limits.receive_s:g} s each"
    assert rows["bodies that have not come whole"].startswith(f"{limits.incoming_bytes >> 20} MiB in all")
    parts = rows["parts in which a body comes: chunks, or what the network makes of it"]
    assert parts.partition(";")[0] == f"{limits.parts:,}"
    assert rows["time to read a request, its template and its grammar included"] == f"{limits.prepare_s:g} s"
    assert rows["depth of JSON"] == str(limits.nesting)
    assert rows["opening brackets in a body"] == f"{limits.brackets:,}"
    assert rows["commas in a body"] == f"{limits.commas:,}"
    assert rows["messages, tools, texts or fields of one list or object"] == f"{MANY.most:,}"
    assert rows["answers of one request (`n` × prompts)"] == str(limits.answers)
    assert rows["stop strings"] == str(limits.stop_strings)
    assert rows["`top_logprobs`"] == str(limits.top_logprobs)
    assert rows["text that waits for a slow reader"].startswith(f"{limits.pending_bytes >> 10} KiB")
    assert rows["a reader who takes nothing"] == f"is dropped after {limits.stall_s:g} s"
    assert rows["connections"].startswith(f"{settings.connections:,}, or four times slots and queue")
    assert ServerSettings(slots=500, queue=500).most_connections == 4000
    assert rows["connections"].endswith(f"`ulimit -n` allows, less {OTHER_FILES}")
    assert OF_ONE == 0.75
    assert f"every {settings.keep_alive_s:g} seconds" in text
    assert f"({settings.drain_s:g})" in text
    assert f"{settings.slots} by default, and `--queue` more may wait, {settings.queue} by default" in text
    assert settings.stale_s == 60


def flags() -> set[str]:
    command = typer.main.get_command(app)
    return {flag for parameter in command.params for flag in parameter.opts if flag.startswith("--")} | {"--help"}


NAMES = ["how-to/server.md", "how-to/operate.md", "examples/Containerfile", "examples/pi-serve.service"]


@pytest.mark.parametrize("name", NAMES)
def test_flags_that_are_named_exist(name: str) -> None:
    text = (ROOT / "docs" / name).read_text("utf-8")
    lines = [line for line in text.splitlines() if re.search(r'pi-serve"?,? ', line)]
    commands = [line for line in lines if "docker" not in line and "install" not in line]
    named = {flag for line in commands for flag in re.findall(r"--[a-z][a-z-]+", line)}
    assert named
    assert named <= flags()
    if name.startswith("how-to"):
        assert set(re.findall(r"`(--[a-z][a-z-]+)", text)) <= flags()


def test_variables_that_are_named_exist() -> None:
    command = typer.main.get_command(app)
    variables = {parameter.envvar for parameter in command.params}
    assert set(re.findall(r"PI_[A-Z_]+", section("All flags"))) <= variables


def example(name: str) -> ModuleType:
    found = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that says anything at all, with a template for tools; it asks for a key."""
    path = tmp_path_factory.mktemp("docs") / "talker.pi"
    decoder, text = small_decoder(context_length=4096), Text(prefix_ids=(), end_ids=())
    files = {"chat_template.jinja": TEMPLATE.encode()}
    with serving(random_artifact(path, decoder, scale=3.0, text=text, files=files), api_keys=("k",)) as served:
        yield served


def test_the_openai_client(talker: Served, capsys: pytest.CaptureFixture[str]) -> None:
    example("openai_client").main(talker.url, "k")
    out = capsys.readouterr().out
    assert re.search(r"60 tokens, \d+% of rows read", out)
    assert "continent=" in out


def test_tool_use(talker: Served, capsys: pytest.CaptureFixture[str]) -> None:
    example("tool_use").main(talker.url, "k")
    assert re.search(r"^(add|multiply)\(-?\d+, -?\d+\) = -?\d+$", capsys.readouterr().out, re.MULTILINE)


def test_the_commands_of_the_page_work(talker: Served) -> None:
    """The `curl` line and the client's first lines, with this server's address, model and key."""
    body = json.loads(re.search(r"-d '(.*?)'", PAGE)[1])  # type: ignore[index]
    response = talker.post("/v1/completions", body | {"model": talker.name}, headers={"Authorization": "Bearer k"})
    assert response.json()["usage"]["completion_tokens"] == 40
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]  # type: ignore[index]
    code = (
        code.replace("http://127.0.0.1:8080", talker.url).replace('"none"', '"k"').replace("}])", "}], max_tokens=9)")
    )
    assert "max_tokens=9" in code
    exec(compile(code, "server.md", "exec"), {})  # noqa: S102


def test_a_prompt_is_read_ahead(talker: Served) -> None:
    """By the `curl` line that says so, and it is there for what is typed next."""
    found = next(found for found in re.findall(r"-d '(.*?)'", PAGE) if '"max_tokens": 0' in found)
    body, headers = json.loads(found) | {"model": talker.name}, {"Authorization": "Bearer k"}
    assert talker.post("/v1/chat/completions", body, headers=headers).json()["usage"]["completion_tokens"] == 0
    body["messages"][0]["content"] += "ers."
    answer = talker.post("/v1/chat/completions", body | {"max_tokens": 2}, headers=headers).json()
    usage = answer["usage"]
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < 30


def container_lines(keyword: str) -> list[str]:
    text = (EXAMPLES / "Containerfile").read_text("utf-8").replace("\\\n", " ")
    return [line.removeprefix(f"{keyword} ") for line in text.splitlines() if line.startswith(f"{keyword} ")]


@pytest.mark.slow
def test_the_container_s_commands(tmp_path: Path) -> None:
    """Those that need no container. The package is built and installed as there, beside this environment's packages;
    the server is started, looked after and stopped as there."""
    cache = os.environ.get("PI_CACHE_DIR", str(tmp_path / "cache"))
    environment = new_environment(tmp_path / "image") | {"PI_CACHE_DIR": cache}
    (command,) = [line for line in container_lines("RUN") if "pip install" in line]
    # Its packages are here already.
    install([part.replace("/src", str(ROOT)) for part in shlex.split(command)], environment)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    (tmp_path / "keys.txt").write_text("0123456789abcdef\n")
    paths = {"/model.pi": str(GOLDEN), "/keys.txt": str(tmp_path / "keys.txt"), "8080": port}
    (start,) = container_lines("CMD")
    serve = [paths.get(part, part) for part in json.loads(start)]
    with subprocess.Popen(serve, env=environment, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            # It need not be ready: in a new folder, kernels are compiled anew.
            assert process.stderr is not None
            assert "listening" in process.stderr.readline()
            assert "<title>" in httpx.get(f"http://127.0.0.1:{port}/", headers={"accept": "text/html"}).text
            assert httpx.get(f"http://127.0.0.1:{port}/props").status_code == 401
            health = httpx.get(f"http://127.0.0.1:{port}/health")
            assert health.json()["status"] in ("loading", "ok")
        finally:
            process.send_signal(getattr(signal, container_lines("STOPSIGNAL")[0]))
        assert process.wait(60) == 0


def test_the_container_s_health_check(talker: Served) -> None:
    (health,) = container_lines("HEALTHCHECK")
    check = shlex.split(health.partition("CMD ")[2])
    assert check[0] == "python"
    command = [sys.executable, *(part.replace("8080", str(talker.port)) for part in check[1:])]
    subprocess.run(command, check=True)


def test_the_unit_s_folders_are_those_it_makes() -> None:
    unit = (EXAMPLES / "pi-serve.service").read_text("utf-8")
    values = dict(line.split("=", 1) for line in unit.splitlines() if re.match(r"\w+=", line))
    assert values["Environment"] == f"PI_CACHE_DIR=/var/cache/{values['CacheDirectory']}"
    assert f"%d/{values['LoadCredential'].partition(':')[0]}" in values["ExecStart"]
    drain = re.search(r"--drain-seconds (\d+)", values["ExecStart"])
    assert drain
    assert int(values["TimeoutStopSec"]) > int(drain[1])
