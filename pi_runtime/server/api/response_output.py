"""The output of a response as it grows: items, the events of its stream, and the tokens that it took."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.engine.events import CallArguments, CallBegan, CallBroken, Delta, ReasoningDelta, TextDelta
from pi_runtime.sequence.stats import Stats
from pi_runtime.server.api.logprobs import TokenLogprob
from pi_runtime.server.api.served import new_id
from pi_runtime.server.api.usage import Timings, timings

Status = Literal["in_progress", "completed", "incomplete"]


class OutputPart(TypedDict):
    """A piece of an item: text, with or without log-probabilities, or thoughts."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[TokenLogprob]]


class OutputItem(TypedDict):
    """A message, thoughts, or a call of a function."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Status
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[OutputPart]]
    summary: NotRequired[list[Any]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]


class InputTokensDetails(TypedDict):
    """Tokens of the input: those that did not run again, and those that ran and are kept while there is room."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """Tokens of the output that are thoughts."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    timings: NotRequired[Timings]


class ResponseOutput:
    """Makes items and events of what comes of an answer. One item is open at a time, the last."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._texts: list[str] = []
        """The text of the open item, in the parts that have come."""
        self._logprobs: list[TokenLogprob] = []
        self._count = 0

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The next event of the stream."""
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1, **fields}

    def take(self, delta: Delta, logprobs: Sequence[TokenLogprob] = ()) -> list[dict[str, Any]]:
        """Take more of the answer, with the log-probabilities of its tokens where these are wanted."""
        match delta:
            case TextDelta(text):
                events = self._opened("message", role="assistant", content=[])
                self._logprobs += logprobs
                return [*events, self._delta("response.output_text.delta", text, logprobs=[*logprobs])]
            case ReasoningDelta(text):
                events = self._opened("reasoning", summary=[], content=[])
                return [*events, self._delta("response.reasoning_text.delta", text)]
            case CallBegan(_, call_id, name):
                return [*self.close(), *self._open("function_call", call_id=call_id, name=name, arguments="")]
            case CallArguments(_, text):
                return [self._delta("response.function_call_arguments.delta", text)]
            case CallBroken():
                return self.close("incomplete")

    def close(self, status: Status = "completed") -> list[dict[str, Any]]:
        """End the open item, if there is one."""
        if not self.items or self.items[-1]["status"] != "in_progress":
            return []
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            done = [self._at("response.function_call_arguments.done", arguments=text)]
        else:
            part = self._part(text)
            item["content"] = [part]
            logprobs = {"logprobs": self._logprobs} if item["type"] == "message" else {}
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            done = [
                self._at(f"response.{kind}.done", content_index=0, text=text, **logprobs),
                self._at("response.content_part.done", content_index=0, part=part),
            ]
        self._texts, self._logprobs = [], []
        return [*done, self._item_event("response.output_item.done")]

    def finish(self, status: Status) -> list[dict[str, Any]]:
        """End the output; one without items becomes an empty message."""
        opened = [] if self.items else self._opened("message", role="assistant", content=[])
        return [*opened, *self.close(status)]

    def _opened(self, kind: Literal["message", "reasoning"], **fields: Any) -> list[dict[str, Any]]:
        """Open an item of a kind, with its one part, unless one is open."""
        if self.items and self.items[-1]["type"] == kind and self.items[-1]["status"] == "in_progress":
            return []
        events = [*self.close(), *self._open(kind, **fields)]
        return [*events, self._at("response.content_part.added", content_index=0, part=self._part(""))]

    def _open(self, kind: Literal["message", "reasoning", "function_call"], **fields: Any) -> list[dict[str, Any]]:
        prefix = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}[kind]
        item: Any = {"id": new_id(prefix), "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        return [self._item_event("response.output_item.added")]

    def _part(self, text: str) -> OutputPart:
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*self._logprobs]}

    def _delta(self, kind: str, text: str, **fields: Any) -> dict[str, Any]:
        self._texts.append(text)
        place = {} if self.items[-1]["type"] == "function_call" else {"content_index": 0}
        return self._at(kind, delta=text, **place, **fields)

    def _at(self, kind: str, **fields: Any) -> dict[str, Any]:
        """A stream's event about the open item: the item's id and place, and what the event has besides."""
        return self.event(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **fields)

    def _item_event(self, kind: str) -> dict[str, Any]:
        item: Mapping[str, Any] = dict(self.items[-1])
        return self.event(kind, output_index=len(self.items) - 1, item=item)


def response_usage(stats: Stats, reasoning_tokens: int) -> ResponseUsage:
    """The tokens and times of an answer as a response has them."""
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": stats.cached_tokens,
            "cache_write_tokens": stats.prompt_tokens - stats.cached_tokens,
        },
        "output_tokens": stats.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "timings": timings([stats], [stats]),
    }
