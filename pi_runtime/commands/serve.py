"""`pi-serve`: one artifact behind HTTP, in the forms of OpenAI, Anthropic and Ollama."""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pi_runtime import console
from pi_runtime.commands import access
from pi_runtime.commands.options import ENGINE_FLAGS, MODEL_FLAGS, TITLES, ModelCommand, SourceOptions, read_file
from pi_runtime.engine.options import EngineOptions, ModelOptions
from pi_runtime.errors import PiError, TemplateError, UsageError
from pi_runtime.errors.exit_codes import code_and_message, flag, missing_extra

if TYPE_CHECKING:
    from pi_runtime.engine.engine import Engine
    from pi_runtime.server.edge import ApiKeys
    from pi_runtime.server.service import Service
    from pi_runtime.server.settings import ServerSettings

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


def main() -> None:
    raise SystemExit(console.run(app))


_KEYS: dict[str, Any] = {"rich_help_panel": "Keys, and who may ask"}
_LIMITS: dict[str, Any] = {"rich_help_panel": "Limits"}
_LOG: dict[str, Any] = {"rich_help_panel": "Log"}


@dataclass(frozen=True, kw_only=True)
class ListenOptions(SourceOptions):
    """Where a server listens, who may use it, and what it takes on."""

    host: Annotated[str, typer.Option(help="Address, or A,B; any but loopback needs a key.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8080
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="Keys, one a line; # begins a comment. SIGHUP reads it anew.",
            show_default=False,
            **_KEYS,
        ),
    ] = None
    name: Annotated[str | None, typer.Option(help="What the model is called; else the file's name.")] = None
    alias: Annotated[list[str] | None, typer.Option(help="A further name of the model; may be given again.")] = None
    queue: Annotated[int, typer.Option(help="Requests that may wait when all slots are taken.", min=0, **_LIMITS)] = 64
    numa: Annotated[str | None, typer.Option(help="NUMA node to run on, with memory of its own: its number.")] = None
    unknown_fields: Annotated[
        Literal["refuse", "warn", "ignore"],
        typer.Option(
            help="What to do with fields of requests that are not known; warn names them in the answer.", **_LIMITS
        ),
    ] = "warn"
    share_prefixes: Annotated[
        bool,
        typer.Option("--share-prefixes", help="Clients with different keys share stored prefixes of prompts.", **_KEYS),
    ] = False
    drain_seconds: Annotated[
        float, typer.Option(help="Seconds to finish answers after a signal.", min=0, **_LIMITS)
    ] = 30.0
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A name that requests may call the server by; may be given again.", **_KEYS)
    ] = None
    allowed_origin: Annotated[
        list[str] | None, typer.Option(help="A page's origin, like https://chat.example; may be given again.", **_KEYS)
    ] = None
    cors: Annotated[bool, typer.Option("--cors", help="Let pages of allowed origins read answers.", **_KEYS)] = False
    log_requests: Annotated[bool, typer.Option("--log-requests", help="Log a line for each request.", **_LOG)] = False
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Lines of the log; json: an object each.", **_LOG)
    ] = "text"
    embeddings: Annotated[
        Literal["mean", "last"] | None,
        typer.Option(envvar="PI_EMBEDDINGS", help="Give vectors of texts: the mean over their tokens, or the last."),
    ] = None
    verify_meanwhile: Annotated[
        bool,
        typer.Option(
            "--verify-meanwhile", rich_help_panel="", help="Check every byte while it serves; damage ends the server."
        ),
    ] = False
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate, for TLS.", show_default=False, **_KEYS)] = None
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its private key.", show_default=False, **_KEYS)] = None


@dataclass(frozen=True, kw_only=True)
class DefaultOptions:
    """How answers are made where a request does not say."""

    temperature: Annotated[float | None, typer.Option(help="Temperature of sampling; 0 is greedy.", min=0, max=2)] = (
        None
    )
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.", min=0)] = None
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens of this total probability.", min=0, max=1)
    ] = None
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.", min=1)] = None

    @property
    def sampling(self) -> dict[str, float]:
        """The settings of drawing that were given."""
        given = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {name: value for name, value in given.items() if value is not None}


_EPILOG = """
Examples:
  pi-serve model.gguf --ctx-size 32768
  pi-serve model.pi --host 0.0.0.0 --api-key-file keys.txt
  pi-serve model.pi --kv-disk prefixes --kv-disk-budget 50GiB

More: docs/how-to/server.md and docs/how-to/operate.md
"""


@app.command(cls=ModelCommand, epilog=_EPILOG, context_settings=console.HELP)
@console.takes(
    *(ListenOptions, DefaultOptions, ModelOptions, EngineOptions),
    flags={**MODEL_FLAGS, **ENGINE_FLAGS},
    titles={
        **TITLES,
        ListenOptions: "Where it listens, and the model's names",
        DefaultOptions: "Answers where a request does not say (default: as the model's makers say, or as llama-server)",
    },
    variables=True,
)
def serve(
    listen: ListenOptions,
    defaults: DefaultOptions,
    model_options: ModelOptions,
    engine_options: EngineOptions,
    debug: Annotated[bool, console.DEBUG] = False,
    version: Annotated[bool, console.VERSION] = False,
) -> None:
    """Serve a model over HTTP, to clients of OpenAI's, Anthropic's and Ollama's interfaces and to browsers."""
    if listen.numa is not None:
        from pi_runtime.execution.numa import pin, usable_nodes

        pin(listen.numa, usable_nodes())  # before any library starts threads
    try:
        from pi_runtime.server.app import build_app
        from pi_runtime.server.edge import Server, config
    except ModuleNotFoundError as error:
        raise (missing_extra(error.name or "") or error) from None
    from pi_runtime.commands.model_cache import checked_artifact

    settings = _settings(listen, defaults, engine_options.slots)
    listen = replace(listen, artifact=checked_artifact(listen))
    tls = access.checked_tls(listen.ssl_certfile, listen.ssl_keyfile)
    say = console.say_now if listen.log_format == "text" else _say_json
    opening = _opening(listen, model_options, engine_options, say)
    built = build_app(settings, opening, console.say_now)
    service = built.state.service
    if listen.verify_meanwhile:
        threading.Thread(target=verify_meanwhile, args=(listen.artifact, service), daemon=True).start()
    reload = None if listen.api_key_file is None else partial(_reload, listen.api_key_file, built.state.keys, service)
    server = Server(config(built, settings, **tls), service, lambda url: say(f"listening on {url}"), reload)
    _listen(server, settings)
    if service.is_held_up:
        code, message = (0, "") if service.failure is None else code_and_message(service.failure)
        if message:
            console.say_now(message)
        os._exit(code)
    if service.failure is not None:
        raise service.failure


def _settings(listen: ListenOptions, defaults: DefaultOptions, slots: int) -> "ServerSettings":
    """The server's settings. Raises UsageError and InputError for what cannot be meant."""
    from pi_runtime.commands.model_cache import name_of
    from pi_runtime.server.settings import LOOPBACK, ServerSettings

    access.check_hosts(listen.allowed_host or ())
    access.check_origins(listen.allowed_origin or (), cors=listen.cors)
    keys = access.keys_in(listen.api_key_file)
    access.check_reach(listen.host, keys)
    return ServerSettings(
        host=listen.host,
        port=listen.port,
        model_name=listen.name or name_of(listen.artifact),
        aliases=tuple(listen.alias or ()),
        api_keys=keys,
        allowed_hosts=(*LOOPBACK, *(listen.allowed_host or ())),
        allowed_origins=tuple(listen.allowed_origin or ()),
        cors=listen.cors,
        slots=slots,
        queue=listen.queue,
        unknown_fields=listen.unknown_fields,
        share_prefixes=listen.share_prefixes,
        drain_s=listen.drain_seconds,
        log_requests=listen.log_requests,
        log_format=listen.log_format,
        sampling=defaults.sampling,
        max_tokens=defaults.max_tokens,
        embeddings=listen.embeddings,
    )


def _say_json(said: str) -> None:
    from pi_runtime.server.metrics import event_fields

    console.say_now(json.dumps(event_fields(said)))


def _opening(
    listen: ListenOptions, model_options: ModelOptions, engine_options: EngineOptions, say: Callable[[str], None]
) -> "Callable[[], Engine]":
    """What opens the engine. A file that is no artifact is refused now, and a template that cannot be read."""
    from pi_runtime.artifact.reader import Artifact

    artifact, template = listen.artifact, read_file("chat_template", listen.chat_template, "a chat template")
    Artifact.open(artifact).close()

    def opened() -> "Engine":
        from pi_runtime.commands.warm_up import warm_up
        from pi_runtime.engine.engine import Engine
        from pi_runtime.engine.loading import open_model

        model = open_model(artifact, model_options)
        try:
            if model.notice is not None:
                say(model.notice)
            warm_up(model)
            if template is not None:
                model.use_template(template)
            with suppress(TemplateError):  # a model without template serves completions
                _ = model.output  # the template is probed now, not by the first request
            engine = Engine(model, kv_budget=model_options.kv_budget, say=say, **asdict(engine_options))
        except BaseException:
            model.close()
            raise
        say(f"ready: {artifact.name}, a context of {model.context}, {engine_options.slots} slots")
        return engine

    return opened


def verify_meanwhile(artifact: Path, service: "Service") -> None:
    """Check every byte in about a quarter of a core's time; a damaged artifact ends the server."""
    from pi_runtime.artifact.verification import verify

    last = time.monotonic()

    def slowly(_done: int, _total: int) -> None:
        nonlocal last
        time.sleep(3 * (time.monotonic() - last))
        last = time.monotonic()

    try:
        verify(artifact, slowly)
    except PiError as error:
        service.fail(error)
    else:
        service.on_event("every byte of the artifact is as it was written")


def _reload(path: Path, keys: "ApiKeys", service: "Service") -> None:
    """Take the keys that are in the file now; where there is something wrong with it, they stay as they are."""
    try:
        keys.replace(access.keys_in(path))
    except PiError as error:
        service.on_event(f"the keys stay as they were: {error.message(flag).splitlines()[0]}")
    else:
        service.on_event(f"keys were read anew; there are {len(keys)}")


def _listen(server: Any, settings: "ServerSettings") -> None:
    """Run the server until it is stopped. Raises UsageError where it cannot listen."""
    try:
        server.run()
    except SystemExit:
        # uvicorn's way to say that it cannot listen; it has logged the reason, which is not shown.
        raise UsageError(
            f"cannot listen on {settings.host}, port {settings.port}",
            remedy="another --port (0 takes a free one), or another --host",
        ) from None
