"""What chats and completions share: choices in an envelope, chunks of a stream, and the usage at its end."""

import time
from collections.abc import Sequence
from typing import Any, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.sequence.stats import Stats
from pi_runtime.server.api.answer import DONE, GatheredAnswer, SseWriter, sse
from pi_runtime.server.api.prompt import Prompt
from pi_runtime.server.api.sampling import StreamingFields
from pi_runtime.server.api.served import Served, new_id
from pi_runtime.server.api.usage import Timings, Usage, timings, usage


class Envelope(TypedDict):
    """What a response and a chunk of a stream have in common."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Whole(Envelope):
    """A response: it has the usage."""

    usage: Usage


class Chunk(Envelope):
    """A chunk of a stream; the last one has the usage and no choice, where that is asked for."""

    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings]


class ChoicesWriter(SseWriter):
    """Writes answers as choices. `kind` and `chunk_kind` are what `object` says of a response and of a chunk."""

    prefix: str
    """The beginning of the ids of responses."""
    kind: str
    chunk_kind: str

    def __init__(self, body: StreamingFields, prompt: Prompt, served: Served) -> None:
        self._prompt, self.served = prompt, served
        self.with_timings, self._with_usage = body.timings_per_token, body.include_usage
        self.wants_logprobs = prompt.settings.get("logprobs") is not None
        self._id, self._created = new_id(self.prefix), int(time.time())

    def chunk(self, choice: Any, stats: Stats | None) -> bytes:
        """The event of a choice, with the figures up to now where there are some."""
        found = self._envelope(self.chunk_kind, [choice])
        if self._with_usage:
            found["usage"] = None
        if stats is not None:
            found["timings"] = timings([stats], [stats])
        return sse(found)

    def final_events(self, answers: Sequence[GatheredAnswer]) -> bytes:
        """The usage, where it is wanted, and the mark of the end."""
        if not self._with_usage:
            return DONE
        return sse(self._envelope(self.chunk_kind, []) | {"usage": self._usage(answers)}) + DONE

    def with_usage(self, choices: Sequence[Any], answers: Sequence[GatheredAnswer]) -> dict[str, Any]:
        """The response that has these choices, and the usage of its answers."""
        return self._envelope(self.kind, choices) | {"usage": self._usage(answers)}

    def _envelope(self, kind: str, choices: Sequence[Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.served.name,
            "system_fingerprint": self.served.fingerprint,
            "choices": choices,
        }

    def _usage(self, answers: Sequence[GatheredAnswer]) -> Usage:
        ends = [answer.end for answer in answers if answer.end is not None]
        stats = [answer.stats for answer in answers if answer.stats is not None]
        firsts = [answer.stats for answer in answers[:: self._prompt.count] if answer.stats is not None]
        prompt_tokens = sum(map(len, self._prompt.texts))
        return usage(prompt_tokens, stats, firsts, sum(end.reasoning_tokens for end in ends))
