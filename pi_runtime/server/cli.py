"""`pi-serve`: one artifact behind HTTP, in the forms of OpenAI and Ollama."""

import ipaddress
import os
import re
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pi_runtime import console
from pi_runtime.errors import InputError, TemplateError, UsageError, read_error
from pi_runtime.exit_codes import missing_extra

if TYPE_CHECKING:
    from pi_runtime.engine.engine import Engine
    from pi_runtime.server.settings import ServerSettings

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


def main() -> None:
    raise SystemExit(console.run(app))


@app.command()
def serve(
    artifact: Annotated[Path, typer.Argument(help="An artifact made by pi-compile.", show_default=False)],
    host: Annotated[str, typer.Option(envvar="PI_HOST", help="Address; any but loopback needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="PI_PORT", help="0 takes a free one.", min=0, max=65535)] = 8080,
    api_key_file: Annotated[
        Path | None,
        typer.Option(envvar="PI_API_KEY_FILE", help="Keys, one a line; # begins a comment.", show_default=False),
    ] = None,
    name: Annotated[str | None, typer.Option(help="What the model is called; else the file's name.")] = None,
    slots: Annotated[int, typer.Option(help="Answers that run at once.", min=1)] = 8,
    queue: Annotated[int, typer.Option(help="Answers that may wait beyond these.", min=0)] = 64,
    kv_budget: Annotated[
        str | None, typer.Option(envvar="PI_KV_BUDGET", help="Memory for keys and values, like 2GiB.")
    ] = None,
    piece: Annotated[
        int | None, typer.Option(help="Most tokens of new prompts that a step reads; else by the times of steps.")
    ] = None,
    ctx_size: Annotated[int | None, typer.Option(envvar="PI_CTX_SIZE", help="Positions to hold.")] = None,
    mode: Annotated[str, typer.Option(envvar="PI_MODE", help="auto, dense, gate or predicted.")] = "auto",
    device: Annotated[str, typer.Option(envvar="PI_DEVICE", help="auto, cpu, stand-in or cuda:N.")] = "auto",
    vram_budget: Annotated[
        str | None, typer.Option(envvar="PI_VRAM_BUDGET", help="GPU memory to use, like 8GiB: picks the placement.")
    ] = None,
    ram_budget: Annotated[
        str | None, typer.Option(envvar="PI_RAM_BUDGET", help="Memory to use, like 3GiB; the rest stays on disk.")
    ] = None,
    cache_format: Annotated[
        str, typer.Option(envvar="PI_CACHE_FORMAT", help="How keys and values are held: auto, f16 or q8.")
    ] = "auto",
    threads: Annotated[int | None, typer.Option(envvar="PI_THREADS", help="CPU threads.")] = None,
    numa: Annotated[
        str | None, typer.Option(envvar="PI_NUMA", help="NUMA node to run on, with memory of its own: its number.")
    ] = None,
    speculate: Annotated[
        str, typer.Option(envvar="PI_SPECULATE", help="Tokens to guess and check together: auto, off or a number.")
    ] = "auto",
    sessions: Annotated[int, typer.Option(help="Sessions that are held at once.", min=0)] = 64,
    session_idle_seconds: Annotated[
        float, typer.Option(help="Time after which a session that nobody uses is dropped.", min=0)
    ] = 600.0,
    unknown_fields: Annotated[
        Literal["refuse", "warn", "ignore"],
        typer.Option(help="What to do with fields of requests that are not known; warn names them in the answer."),
    ] = "warn",
    share_prefixes: Annotated[
        bool, typer.Option("--share-prefixes", help="Clients with different keys share stored beginnings of prompts.")
    ] = False,
    drain_seconds: Annotated[float, typer.Option(help="Time to finish answers after a signal.", min=0)] = 30.0,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A name that requests may call the server by; may be given again.")
    ] = None,
    allowed_origin: Annotated[
        list[str] | None, typer.Option(help="A page's origin, like https://chat.example; may be given again.")
    ] = None,
    cors: Annotated[bool, typer.Option("--cors", help="Let pages of these origins read answers.")] = False,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="Log a line for each request.")] = False,
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate, for TLS.", show_default=False)] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its private key.", show_default=False)] = None,
    debug: Annotated[bool, console.DEBUG] = False,
    version: Annotated[bool, console.VERSION] = False,
) -> None:
    """Serve a packed model over HTTP, to clients of OpenAI's and Ollama's interfaces and to browsers."""
    if numa is not None:
        from pi_runtime.execution.numa import pin, usable_nodes

        pin(numa, usable_nodes())  # before any library starts threads
    try:
        from pi_runtime.server.app import build_app
        from pi_runtime.server.listening import Server, config
        from pi_runtime.server.settings import LOOPBACK, ServerSettings
    except ModuleNotFoundError as error:
        raise (missing_extra(error.name or "") or error) from None
    if cors and not allowed_origin:
        raise UsageError("--cors without an origin", remedy="--allowed-origin https://chat.example, or *")
    for host_name in allowed_host or ():
        if not _can_be_a_host(host_name):
            raise UsageError(
                f"--allowed-host {host_name!r}: no request can have it",
                expected="a name or an address without scheme, port and path; or *",
                remedy="--allowed-host chat.example",
            )
    for origin in allowed_origin or ():
        if _ORIGIN.fullmatch(origin) is None:
            raise UsageError(
                f"--allowed-origin {origin!r}: no page can have it",
                expected="a scheme, a name in small letters and a port if it is not the usual one, no path; null; or *",
                remedy="--allowed-origin https://chat.example",
            )
    keys = _keys(api_key_file)
    if not keys and not _is_loopback(host):
        raise UsageError(
            f"--host {host} lets other machines in, and there is no key",
            remedy="--api-key-file FILE, or --host 127.0.0.1",
        )
    settings = ServerSettings(
        host=host,
        port=port,
        model_name=name or artifact.stem,
        api_keys=keys,
        allowed_hosts=(*LOOPBACK, *(allowed_host or ())),
        allowed_origins=tuple(allowed_origin or ()),
        cors=cors,
        slots=slots,
        queue=queue,
        sessions=sessions,
        session_idle_s=session_idle_seconds,
        unknown_fields=unknown_fields,
        share_prefixes=share_prefixes,
        drain_s=drain_seconds,
        log_requests=log_requests,
    )
    model_options = {
        "context": ctx_size,
        "mode": mode,
        "device": device,
        "vram_budget": vram_budget,
        "ram_budget": ram_budget,
        "kv_budget": kv_budget,
        "cache_format": cache_format,
        "threads": threads,
    }
    engine_options = {"slots": slots, "speculate": speculate, "piece": piece}
    opening = _opening(artifact, model_options, engine_options)
    built = build_app(settings, opening, console.say)
    service = built.state.service
    tls = {"ssl_certfile": ssl_certfile, "ssl_keyfile": ssl_keyfile}
    server = Server(config(built, settings, **_checked(tls)), service, lambda url: console.say(f"listening on {url}"))
    _listen(server, settings)
    if service.is_held_up:
        os._exit(0 if service.failure is None else 1)
    if service.failure is not None:
        raise service.failure


KEY_CHARS = 16
"""Least length of a key. Nothing slows down those who guess, and a shorter one is seldom a random one."""
NEW_KEY = "openssl rand -hex 32 makes a good one"
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\sA-Z/?#@*]+")
"""What browsers send as an origin, or `*`."""


def _can_be_a_host(name: str) -> bool:
    """Whether the Host of a request can have this name, which is compared without its port."""
    with suppress(ValueError):
        return name == "*" or ipaddress.ip_address(name) is not None
    return re.fullmatch(r"[^\s/?#@:*\[\]]+", name) is not None


def _keys(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise read_error(f"--api-key-file {path}", error, "name a text file with a key on each line") from None
    keys = {key: n for n, key in enumerate(lines, 1) if key and not key.startswith("#")}
    if not keys:
        raise UsageError(f"{path}: there is no key in it", expected="a key on each line", remedy=NEW_KEY)
    for key, n in keys.items():
        if len(key.split()) > 1:
            raise UsageError(f"{path}, line {n}: a key has no spaces", remedy="put a comment on a line of its own")
        if len(key) < KEY_CHARS:
            raise UsageError(
                f"{path}, line {n}: the key can be guessed",
                expected=f"{KEY_CHARS} characters or more",
                found=len(key),
                remedy=NEW_KEY,
            )
    return tuple(keys)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _checked(tls: dict[str, Path | None]) -> dict[str, Path | None]:
    """The files for TLS, both or neither."""
    given = [path for path in tls.values() if path is not None]
    if len(given) == 1:
        raise UsageError("--ssl-certfile and --ssl-keyfile go together")
    for path in given:
        if not path.is_file():
            raise InputError(f"{path}: no such file", remedy="name a PEM file")
    if given:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(given[0], given[-1], password="")
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise InputError(
                f"--ssl-certfile {given[0]}, --ssl-keyfile {given[1]}: not a certificate with its key",
                found=error,
                remedy="two PEM files; the key without a password",
            ) from None
    return tls


def _opening(artifact: Path, model_options: dict[str, Any], engine_options: dict[str, Any]) -> "Callable[[], Engine]":
    """What opens the engine. A file that is no artifact, and options that are wrong in themselves, are refused now."""
    from pi_runtime.artifact.reader import Artifact
    from pi_runtime.execution.plan_choice import parse_size
    from pi_runtime.guesses import parse_setting

    Artifact.open(artifact).close()
    for flag in ("vram_budget", "ram_budget", "kv_budget"):
        if model_options[flag] is not None:
            model_options[flag] = parse_size(model_options[flag], flag)
    engine_options["kv_budget"] = model_options["kv_budget"]
    engine_options["speculate"] = parse_setting(engine_options["speculate"])

    def opened() -> "Engine":
        from pi_runtime.engine.engine import Engine
        from pi_runtime.model import load
        from pi_runtime.warm_up import warm_up

        model = load(artifact, **model_options)
        try:
            if model.notice is not None:
                console.say(model.notice)
            warm_up(model)
            with suppress(TemplateError):  # a model without template serves completions
                model.chat_template.start()
            engine = Engine(model, **engine_options)
        except BaseException:
            model.close()
            raise
        console.say(f"ready: {artifact.name}, a context of {model.context}, {engine_options['slots']} slots")
        return engine

    return opened


def _listen(server: Any, settings: "ServerSettings") -> None:
    """Serve until the end."""
    try:
        server.run()
    except SystemExit:
        # uvicorn's way to say that it cannot listen; it has logged the reason, which is not shown.
        raise UsageError(
            f"cannot listen on {settings.host}, port {settings.port}",
            remedy="another --port (0 takes a free one), or another --host",
        ) from None
