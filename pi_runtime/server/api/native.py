"""llama-server's own forms: `/completion`, and `/infill`, by which editors have code filled in."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.engine.events import End, Event, PromptProgress, TextDelta
from pi_runtime.sequence.sampling import TokenLogprobs
from pi_runtime.server.api.answer import GatheredAnswer, sse
from pi_runtime.server.api.body import MANY, AtMost, Body, Known, accepted, invalid, unsupported
from pi_runtime.server.api.completions import (
    CompletionRequest,
    CompletionWriter,
    completion_request,
    fill_in,
    fill_in_tokens,
)
from pi_runtime.server.api.openai_forms import Timings, chat_logprob, read_prompt, timings
from pi_runtime.server.api.prompt import Prompt
from pi_runtime.server.api.served import Served

STOP_TYPES: dict[str, Literal["eos", "word", "limit"]] = {"end": "eos", "stop": "word"}
"""llama-server's word for why an answer ended; `limit` for others."""
SAMPLING = ("seed", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
Bias = float | Literal[False]
Pair = Annotated[list[int | float | str | Literal[False]], Field(min_length=2), AtMost(2)]
SNIPPET = "\n\n--- snippet ---\n\n"
"""Stands before another file where the vocabulary has no token for that."""
REPOSITORY, FILE = ("<|repo_name|>", "<|fim_repo|>", "<reponame>"), ("<|file_sep|>", "<file_sep>")
ENDS = (*REPOSITORY, *FILE, "<|fim_pad|>", "<fim_pad>", "<|endoftext|>")
"""Tokens that end what is filled in."""


class Extra(Body):
    """Another file, or a part of one, that may help."""

    filename: str = "tmp"
    text: str


class InfillRequest(CompletionRequest):
    """Code with a gap, which is to be filled in."""

    known: ClassVar[Known] = accepted(
        *("samplers", "t_max_prompt_ms", "t_max_predict_ms", "n_indent", "response_fields", "n_cache_reuse")
    )
    input_prefix: str = Field(default="", description="What stands before the gap.")
    input_suffix: str = Field(default="", description="What stands behind it.")
    input_extra: Annotated[list[Extra], MANY] | None = Field(
        default=None, description="Other files; what finds no room is left out, the first ones first."
    )
    prompt: str = Field(default="", description="What the gap begins with.")


class NativeRequest(CompletionRequest):
    """A text to be continued, by llama-server's names of fields."""

    known: ClassVar[Known] = {
        **unsupported("probabilities are those before filters", "post_sampling_probs", allowed=(False,)),
    }
    n_probs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="Log-probabilities of all tokens, and of so many likeliest ones."
    )
    logit_bias: Annotated[dict[str, Bias], MANY] | Annotated[list[Pair], MANY] | None = Field(  # type: ignore[assignment]
        default=None, description="Token ids, or texts for all of their tokens, each with a bias; `false`: never."
    )

    def biases(self, served: Served) -> dict[int, float] | None:
        """Biases by token ids. Raises ApiError for ids that are none of the model's."""
        found: dict[int, float] = {}
        given: Any = self.logit_bias or ()
        pairs = [(_id_of(key), bias) for key, bias in given.items()] if isinstance(given, dict) else given
        for key, bias in pairs:
            if isinstance(bias, str) or bias is True or not -100 <= bias <= 100:
                raise invalid("logit_bias", f"each bias is a number in −100…100, or false; found {str(bias)[:20]}")
            if isinstance(key, float | bool):
                raise invalid("logit_bias", f"biases are of token ids or texts; found {key}")
            ids = [key] if isinstance(key, int) else served.encode(key, "logit_bias", prefix=False)
            served.check_tokens(ids, "logit_bias")
            found |= dict.fromkeys(ids, -math.inf if bias is False else bias)
        return found or None


def _id_of(key: str) -> int | str:
    """What a key of a JSON object names: a token's id where it is one, else a text."""
    return int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else key


class NativeProbability(TypedDict):
    """The log-probability of a token; `top_logprobs` are those of the likeliest in its place."""

    id: int
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: NotRequired[list["NativeProbability"]]


class NativeAnswer(TypedDict):
    """An answer, or more of it; figures come with its end."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int
    model: NotRequired[str]
    stop_type: NotRequired[Literal["eos", "word", "limit"]]
    stopping_word: NotRequired[str]
    truncated: NotRequired[bool]
    has_new_line: NotRequired[bool]
    tokens_predicted: NotRequired[int]
    tokens_evaluated: NotRequired[int]
    tokens_cached: NotRequired[int]
    timings: NotRequired[Timings]
    prompt_progress: NotRequired[dict[str, float]]
    completion_probabilities: NotRequired[list[NativeProbability]]
    generation_settings: NotRequired[dict[str, Any]]


def native_request(body: NativeRequest, served: Served) -> Prompt:
    """Make the engine's prompt of a request for llama-server's completion. Raises ApiError for what is wrong."""
    prompt = completion_request(_unbounded(body, served), served)
    if body.n_probs:
        prompt.settings["logprobs"] = body.n_probs
    return prompt


def infill_request(body: InfillRequest, served: Served) -> Prompt:
    """Make the engine's prompt of code with a gap. Raises ApiError for what is wrong, and for a model that cannot."""
    ids = fill_in(served, body.input_prefix + body.prompt, body.input_suffix, "input_suffix")
    most = served.most_tokens(body.most_tokens)  # without a bound a quarter of the context is left for the answer
    room = served.model.context - len(ids) - (served.model.context // 4 if most is None else most) - 1
    extra = _extra_tokens(body.input_extra or [], served)[-room:] if room > 0 else []
    prompt = completion_request(_unbounded(body, served, prompt=[*extra, *ids]), served)
    ends = [name for name in ENDS if served.model.tokenizer.added_token(name) is not None]
    prompt.settings["stop"] = [*prompt.settings.get("stop", ()), *ends]
    return prompt


def _unbounded(body: Any, served: Served, **changed: Any) -> Any:
    """The request with these fields, and without a bound where neither it nor the server gives one."""
    bound = {} if body.most_tokens is not None or served.settings.max_tokens else {"n_predict": -1}
    return body.model_copy(update={**bound, **changed})


def _extra_tokens(extra: Sequence[Extra], served: Served) -> list[int]:
    """The tokens of other files, as models of a repository's files were trained to read them."""
    added = served.model.tokenizer.added_token
    repository, file = ([x for x in map(added, names) if x is not None][:1] for names in (REPOSITORY, FILE))
    encode = partial(fill_in_tokens, served, param="input_extra")
    found = [*repository, *encode("project\n")] if extra and repository else []
    for part in extra:
        found += [*(file or encode(SNIPPET)), *encode(f"{part.filename}\n{part.text}" if file else part.text)]
    return [*found, *file, *encode("file\n")] if found and file else found


class NativeWriter(CompletionWriter):
    """Writes llama-server's completions, and their streams."""

    answer_type = chunk_type = NativeAnswer  # type: ignore[assignment]

    def write(self, answer: GatheredAnswer, event: Event) -> bytes:
        """The event of more text, or of the end."""
        found = self._native(answer, [event])
        if isinstance(event, PromptProgress) and event.stats is not None:
            found["prompt_progress"] = read_prompt(event.read, event.stats)
        return sse(found)

    def final_events(self, answers: Sequence[GatheredAnswer]) -> bytes:  # noqa: ARG002  the figures have been written
        """Nothing follows the end of the last answer."""
        return b""

    def response(self, answers: Sequence[GatheredAnswer]) -> Any:
        """The one answer as an object, several as a list."""
        found = [self._native(answer, answer.events) for answer in answers]
        return found[0] if len(found) == 1 else found

    def _native(self, answer: GatheredAnswer, events: Sequence[Event]) -> NativeAnswer:
        end = events[-1]
        content = "".join(event.text for event in events if isinstance(event, TextDelta))
        tokens = [token for event in events for token in event.tokens] if self.with_tokens or not answer.end else []
        found: NativeAnswer = {
            "index": answer.index, "content": content, "tokens": tokens, "stop": False, "id_slot": answer.index
        }  # fmt: skip
        if self.wants_logprobs and (logprobs := [one for event in events for one in event.logprobs]):
            found["completion_probabilities"] = [self._probability(one) for one in logprobs]
        if isinstance(end, End) and end.stats is not None:
            found |= {
                "stop": True,
                "generation_settings": self._settings(),
                "model": self.served.name,
                "stop_type": STOP_TYPES.get(end.finish_reason, "limit"),
                "stopping_word": end.stop_string or "",
                "truncated": end.finish_reason == "context",
                "has_new_line": "\n" in answer.text,
                "tokens_predicted": end.stats.generated_tokens,
                "tokens_evaluated": end.stats.prompt_tokens,
                "tokens_cached": end.stats.cached_tokens,
                "timings": timings([end.stats], [end.stats]),
            }
        return found

    def _probability(self, found: TokenLogprobs) -> NativeProbability:
        own, *top = [
            {"id": token, **chat_logprob(self.served.model.tokenizer, TokenLogprobs(token, logprob, ()))}
            for token, logprob in ((found.token, found.logprob), *found.top)
        ]
        return {**own, "top_logprobs": top}  # type: ignore[typeddict-item]

    def _settings(self) -> dict[str, Any]:
        """The settings of the answers, in the words of llama-server."""
        settings = self._prompt.settings
        sampling = settings["sampling"]
        assert sampling is not None
        found = {name: getattr(sampling, name) for name in SAMPLING}
        bias = [{"token": t, "bias": None if math.isinf(b) else b} for t, b in sampling.logit_bias.items()]
        return {
            **found,
            "repeat_penalty": sampling.repetition_penalty,
            "logit_bias": bias,
            "n_predict": 0 if self._prompt.goal != "answers" else settings.get("max_tokens") or -1,
            "stop": list(settings.get("stop", ())),
            "n_probs": settings.get("logprobs") or 0,
        }
