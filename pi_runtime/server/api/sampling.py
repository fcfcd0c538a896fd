"""The fields by which a request says how its answers are chosen, for chats and completions alike."""

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field

from pi_runtime.sequence.sampling import Sampling
from pi_runtime.sequence.settings import AnswerSettings
from pi_runtime.server.api.body import MANY, OTHER_SERVERS, Body, Known, Metadata, invalid, unsupported
from pi_runtime.server.api.prompt import Prompt
from pi_runtime.server.api.served import Served

Penalty = Annotated[float, Field(ge=-2, le=2)]
# Nearer to 0, or much larger, logits would leave the range of their arithmetic.
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]
Probability = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
SALT_CHARS = 256
"""Characters of a salt: each stored beginning keeps its own."""
Most = Annotated[int, Field(ge=1)] | Literal[-1]
MostOrNone = Annotated[int, Field(ge=-1)]
"""Most tokens of an answer; 0 reads the prompt ahead."""
T = TypeVar("T", bound=float)


class StreamOptions(Body):
    """What a stream carries beside its text."""

    known: ClassVar[Known] = unsupported("this server pads no chunks", "include_obfuscation", allowed=(False,))
    include_usage: bool | None = Field(default=None, description="A last chunk without choices has the usage.")


class SamplingFields(Body):
    """Settings of answers. What is left out, or null, is as the server's flags say, or the checkpoint's generation
    defaults, or has no effect; where nobody says how to draw, temperature is 0.8, top_p 0.95 and min_p 0.05."""

    known: ClassVar[Known] = OTHER_SERVERS
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(default=None, description="0 is greedy.")
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = Field(default=None, description="0 and −1 keep all tokens.")
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repeat_penalty: RepetitionPenalty | None = Field(default=None, description="The same as `repetition_penalty`.")
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], MANY] | None = Field(
        default=None,
        description="Token ids, each with what is added to its logit.",
        json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}},
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = Field(
        default=None,
        description="With the same seed the same text comes again; a fresh one is taken without it, and for −1.",
    )
    stop: str | Annotated[list[str], MANY] | None = Field(
        default=None,
        description="Texts that end the answer and are not part of it; special tokens too. An empty one ends nothing.",
    )
    min_tokens: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Up to so many tokens neither the model nor a stop string ends the text."
    )
    ignore_eos: bool | None = Field(default=None, description="The model's tokens that end a text never come.")
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = Field(
        default=None, description="With a penalty only −1: penalties look at the whole text."
    )
    user: str | None = Field(default=None, description="Accepted; nothing depends on it.")

    def stop_strings(self, most: int) -> Sequence[str]:
        """The stop strings as a list. Raises ApiError for more than `most`."""
        stops = [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if stop]
        if len(stops) > most:
            name = type(self).model_fields["stop"].alias or "stop"
            raise invalid(name, f"at most {most} stop strings; found {len(stops)}")
        return stops

    def sampling(self, served: Served) -> Sampling:
        """How tokens are chosen: the defaults of model and server, changed by what the request has."""
        found = self.model_dump(include={setting.name for setting in fields(Sampling)}, exclude_none=True)
        repetition = {"repetition_penalty": self.repetition_penalty, "repeat_penalty": self.repeat_penalty}
        bias = self.biases(served)
        if self.ignore_eos:
            bias = {**(bias or {}), **dict.fromkeys(served.model.manifest.text.end_ids, -math.inf)}
        found |= {"repetition_penalty": only_one(**repetition), "logit_bias": bias}
        if self.top_k is not None:
            found["top_k"] = max(self.top_k, 0)
        if self.seed is not None:
            # OpenAI's seeds have a sign; every one has draws of its own, but −1 asks for a fresh one.
            found["seed"] = None if self.seed == -1 else self.seed % 2**64
        self._check_window()
        return Sampling.from_generation_config(served.generation, **{**served.settings.sampling, **found})

    def biases(self, served: Served) -> dict[int, float] | None:
        """Biases by token ids. Raises ApiError for keys that are none of the model's."""
        return logit_bias(self.logit_bias, served)

    def _check_window(self) -> None:
        """Raise ApiError for penalties that are to look at a part of the text."""
        penalties = (self.repetition_penalty, self.repeat_penalty, self.presence_penalty, self.frequency_penalty)
        if self.repeat_last_n not in (None, -1) and any(penalty not in (None, 0, 1) for penalty in penalties):
            raise invalid("repeat_last_n", "not supported: penalties look at the whole text, so only -1 is allowed")

    def answer_settings(
        self,
        served: Served,
        *,
        max_tokens: int | None,
        logprobs: int | None = None,
        prompt: Prompt | None = None,
    ) -> AnswerSettings:
        """All settings of an answer, with those that its prompt has."""
        if max_tokens is not None and (self.min_tokens or 0) > max_tokens:
            raise invalid("min_tokens", f"at most the {max_tokens} tokens that the answer may have")
        found = AnswerSettings() if prompt is None else prompt.settings
        return found | AnswerSettings(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            sampling=self.sampling(served),
            stop=self.stop_strings(served.settings.limits.stop_strings),
            logprobs=logprobs,
        )


class LengthFields(Body):
    """How long an answer may be, as llama.cpp spells it."""

    n_predict: MostOrNone | None = Field(default=None, description="The same as `max_tokens`; −1: until the end.")


def only_one(**given: T | None) -> T | None:
    """The value of a setting that has several names; None where none is given. Raises ApiError where they differ."""
    values = {name: value for name, value in given.items() if value is not None}
    names = list(values)
    if len(set(values.values())) > 1:
        raise invalid(names[0], f"{names[1]} says something else; give one of them")
    return values[names[0]] if names else None


class CacheFields(Body):
    """Who may share what is kept of a prompt."""

    cache_salt: Annotated[str, Field(min_length=1, max_length=SALT_CHARS)] | None = Field(
        default=None, description="Only requests with the same key and the same salt share what is kept of prompts."
    )


class StreamingFields(SamplingFields, CacheFields):
    """How many answers there are, and whether they are streamed."""

    n: Count | None = Field(default=None, description="How many answers to each prompt; the server has a limit.")
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(default=None, description="Of use with `stream: true`.")
    timings_per_token: bool | None = Field(
        default=None, description="Every chunk of a stream has `timings`, the figures up to now."
    )
    return_tokens: bool | None = Field(default=None, description="Choices have `tokens`, the ids of their text.")
    return_progress: bool | None = Field(
        default=None, description="Chunks of a stream say in `prompt_progress` how much of the prompt has been read."
    )

    def count(self, served: Served, prompts: int = 1) -> int:
        """How many answers each prompt has. Raises ApiError where there are too many in all."""
        count, most = self.n or 1, served.settings.limits.answers
        if count > most:
            raise invalid("n", f"at most {most}; found {count}")
        if prompts * count > most:
            raise invalid("prompt", f"at most {most} answers a request; found {prompts} prompts × {count}")
        return count

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def logit_bias(bias: dict[str, float] | None, served: Served) -> dict[int, float] | None:
    """Biases by token ids. Raises ApiError for keys that are none of the model's."""
    vocabulary = served.model.manifest.decoder.vocab_size
    for key in bias or {}:
        # isdecimal alone allows digits of other scripts, and int() any number of them.
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocabulary):
            raise invalid(f"logit_bias.{key[:20]}", f"keys are token ids from 0 to {vocabulary - 1}")
    return {int(key): float(value) for key, value in bias.items()} if bias else None


class IgnoredFields(Body):
    """Fields that change nothing here, accepted with the values that ask for nothing this server has not."""

    known: ClassVar[Known] = {
        **unsupported("there is one tier", "service_tier", allowed=("auto", "default")),
        **unsupported("prompts are cached by themselves", "prompt_cache_options", allowed=({}, {"mode": "implicit"})),
        **unsupported("there is no model for it", "moderation"),
    }
    metadata: Metadata | None = Field(default=None, description="Accepted; nothing is stored.")
    store: bool | None = Field(default=None, description="Accepted; answers are not stored.")
    safety_identifier: str | None = Field(default=None, description="Accepted; nothing depends on it.")
    prompt_cache_key: str | None = Field(
        default=None, description="Accepted; the longest stored beginning of a prompt is found without it."
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        default=None, description="Accepted; prompts are kept in memory, as long as there is room."
    )
