"""How a server is set up."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one request."""

    body_bytes: int = 4 << 20
    incoming_bytes: int = 256 << 20
    """Bytes of all bodies together that have not come whole."""
    header_bytes: int = 32 << 10
    """Request line and headers together."""
    receive_s: float = 15.0
    """Time in which headers, and then a body, must have come."""
    prepare_s: float = 30.0
    """Time in which a request must have been read, checked and tokenised."""
    nesting: int = 64
    """Deepest nesting of the JSON of a body."""
    brackets: int = 50_000
    """Opening brackets in a body, those in its strings included: small objects take longest to read."""
    parts: int = 1 << 13
    """Parts in which a body may come: chunks, or what the network makes of it."""
    commas: int = 1 << 20
    """Commas in a body, those in its strings included: about as many values has its JSON."""
    answers: int = 16
    """Most answers of one request, those of all its prompts together."""
    stop_strings: int = 16
    top_logprobs: int = 20
    pending_bytes: int = 64 << 10
    """Text that may wait for a reader who is slow."""
    stall_s: float = 60.0
    """Time in which a reader must take something."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where a server listens, who may use it, and how much it takes on."""

    host: str = "127.0.0.1"
    port: int = 8080
    """0 takes a free one."""
    model_name: str = "model"
    """What `/v1/models` calls the model: the name of the artifact's file."""
    aliases: tuple[str, ...] = ()
    """Further names by which requests may ask for it."""
    api_keys: tuple[str, ...] = ()
    """Any of these opens every route; without one no key is asked for."""
    allowed_hosts: tuple[str, ...] = LOOPBACK
    """Names that a Host header may have, without the port; `*` allows all."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of pages that may call, beside the server's own page; `localhost`: all of this machine, `*`: all."""
    cors: bool = False
    """Whether pages of these origins may read answers."""
    slots: int = 8
    """Answers that run at once."""
    queue: int = 64
    """Answers that may wait beyond these."""
    connections: int = 1000
    """Connections at once, of all clients together."""
    drain_s: float = 30.0
    """Time for which requests may go on after the first signal to stop."""
    stale_s: float = 60.0
    """Time without any progress of the engine's step after which `/health` says that it is stuck."""
    keep_alive_s: float = 10.0
    """Time without events after which a comment is sent."""
    log_requests: bool = False
    """Whether a line is logged for each request. Nothing of its content ever is."""
    log_format: Literal["text", "json"] = "text"
    """The form of lines of the log; in JSON each is an object."""
    unknown_fields: Literal["refuse", "warn", "ignore"] = "warn"
    """What is done with fields of requests that the server does not know; `warn` names them in answer and log."""
    share_prefixes: bool = False
    """Whether requests with different keys share what is kept of prompts."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Settings by which tokens are drawn where a request does not say, whatever the model's makers say."""
    max_tokens: int | None = None
    """Most tokens of an answer where a request does not say; None leaves that to the form of API."""
    embeddings: Literal["mean", "last"] | None = None
    """How texts become vectors (see `Model.embed`); None where they do not."""
    limits: Limits = field(default_factory=Limits)

    @property
    def origins(self) -> str:
        """A pattern of the origins of pages that may call."""
        known = {"*": ".*", "localhost": r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"}
        return "|".join(known.get(origin, re.escape(origin)) for origin in self.allowed_origins)

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model."""
        return self.model_name, *self.aliases

    @property
    def most_connections(self) -> int:
        """Connections at once: enough for all that run and wait, several times over."""
        return max(self.connections, 4 * (self.slots + self.queue))

    @property
    def answers_each(self) -> int:
        """Answers of one key that run or wait: three quarters of all, or all slots, where there are several keys."""
        most = self.slots + self.queue
        return most if len(self.api_keys) < 2 else max(self.slots, 3 * most // 4)
