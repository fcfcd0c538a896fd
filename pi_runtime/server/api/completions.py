"""`/v1/completions`: texts continued, and with `echo` and `logprobs` the log-probabilities of the texts themselves."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.engine.events import End, Event, PromptLogprobs, PromptProgress, TextDelta
from pi_runtime.sequence.settings import AnswerSettings
from pi_runtime.server.api.answer import FINISH_REASONS, GatheredAnswer
from pi_runtime.server.api.body import MANY, TOKENS, Body, Known, ModelName, invalid, unsupported
from pi_runtime.server.api.conversation import GrammarFields, TextPart
from pi_runtime.server.api.openai_forms import (
    ChoicesWriter,
    Chunk,
    CompletionLogprobs,
    CompletionLogprobsWriter,
    Whole,
    joined,
)
from pi_runtime.server.api.prompt import Goal, Prompt, asked_grammar
from pi_runtime.server.api.sampling import LengthFields, MostOrNone, StreamingFields, only_one
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import ApiError
from pi_runtime.text.quotation import RenderedPrompt
from pi_runtime.text.tokenizer import TextStream, Tokenizer

DEFAULT_TOKENS = 16
"""Most tokens of an answer where the request does not say: OpenAI's default."""
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1), TOKENS]
# The kinds have one bound, so that a list beyond it is too long whatever its items are.
Mixed = Annotated[list[Annotated[int, Field(ge=0)] | str], Field(min_length=1), TOKENS]


FILL_IN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
"""Names of the tokens before a beginning, before an end, and before what belongs between these."""


def fill_in(served: Served, before: str, after: str, param: str) -> list[int]:
    """The prompt for what belongs between two texts. Raises ApiError for a model that was not trained for that."""
    added = served.model.tokenizer.added_token
    for names in FILL_IN:
        marks = [token for token in map(added, names) if token is not None]
        if len(marks) == len(names):
            texts = [fill_in_tokens(served, text, param) for text in (before, after)]
            return [*served.encode("", param), marks[0], *texts[0], marks[1], *texts[1], marks[2]]
    said = "the model was not trained to fill in: its vocabulary has no tokens for that"
    raise ApiError(501, said, param=param, code="unsupported_value")


def fill_in_tokens(served: Served, text: str, param: str) -> list[int]:
    """The tokens of a text, in which markers are text."""
    return served.encode(RenderedPrompt(text, range(1, len(text) + 1)), param, prefix=False)


class TextObject(Body):
    """A text as an object, as llama-server takes it."""

    known: ClassVar[Known] = unsupported("this server reads text", "multimodal_data", allowed=([],))
    prompt_string: str | None = None
    content: Annotated[list[TextPart], Field(min_length=1), MANY] | None = None

    @property
    def text(self) -> str:
        """The text. Raises ApiError where there is none, or there are two."""
        if (self.prompt_string is None) == (self.content is None):
            raise invalid(None, "a text that is an object has either prompt_string or content")
        return self.prompt_string or "".join(part.text for part in self.content or ())


Several = Annotated[list[str | Mixed | TextObject], Field(min_length=1), TOKENS]


class CompletionRequest(GrammarFields, LengthFields, StreamingFields):
    """A text, token ids, both in one list, or a list of such prompts, to be continued."""

    known: ClassVar[Known] = {
        **unsupported("give token ids, which are taken as they are", "add_special_tokens", allowed=(True,)),
    }
    model: ModelName = None
    prompt: str | Ids | Mixed | TextObject | Several | None = Field(
        description="Token ids are taken as they are; a text that begins a prompt is framed as the model was trained."
    )
    suffix: str | None = Field(default=None, description="What follows the text that is wanted.")
    max_tokens: MostOrNone | None = Field(
        default=None,
        description="0 reads the prompt ahead, and with `echo` answers with it alone; −1: until the end; "
        f"{DEFAULT_TOKENS} if left out.",
    )
    echo: bool | None = Field(default=None, description="The answer begins with the prompt.")
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = Field(
        default=None, description="Log-probabilities of all tokens shown, and of so many likeliest ones."
    )
    best_of: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Answers are not compared, so only the value of `n` is allowed."
    )

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of an answer, as it was asked for; it may be 0. Raises ApiError where two differ."""
        return only_one(max_tokens=self.max_tokens, n_predict=self.n_predict)


class CompletionChoice(TypedDict):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    tokens: NotRequired[list[int]]


class Completion(Whole):
    """All answers of a request."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionChunk(Chunk):
    """A piece of a stream; the last one has the usage and no choice, where that is asked for."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


def completion_request(body: CompletionRequest, served: Served) -> Prompt:
    """Make the engine's prompt of a request for completions. Raises ApiError for what is wrong."""
    served.check_name(body.model)
    given = body.prompt if isinstance(body.prompt, list) else [0]
    count = body.count(served, 1 if any(isinstance(part, int) for part in given) else len(given))
    prompts = prompts_of(body.prompt)
    if body.suffix:
        if not isinstance(body.prompt, str):
            raise invalid("suffix", "allowed only with a prompt that is one text")
        prompts = {"prompt": [*fill_in(served, body.prompt, body.suffix, "suffix")]}
    if body.best_of not in {None, count}:
        raise invalid("best_of", f"not supported: answers are not compared; only {count}, the value of n")
    most = served.most_tokens(body.most_tokens, DEFAULT_TOKENS)
    goal: Goal = "answers" if most != 0 else "texts" if body.echo else "reading"
    if goal == "reading" and len(prompts) > 1:
        raise invalid("prompt", f"one prompt is read ahead at a time; found {len(prompts)}")
    grammar: AnswerSettings = {"grammar": asked_grammar(body, served)}
    ids = [served.tokens(prompt, place, beside=int(goal != "texts")) for place, prompt in prompts.items()]
    return Prompt(
        texts=ids,
        count=count,
        settings=body.answer_settings(
            served, max_tokens=most or None, logprobs=body.logprobs, prompt=Prompt(texts=(), settings=grammar)
        ),
        streams=bool(body.stream),
        shows_progress=bool(body.stream and body.return_progress),
        goal=goal,
        logprobs=body.logprobs if body.echo else None,
        cache_salt=body.cache_salt,
    )


class CompletionWriter(ChoicesWriter):
    """Writes completions and their chunks. Choice k of n to prompt p has the index p · n + k."""

    answer_type, chunk_type = Completion, CompletionChunk
    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, body: CompletionRequest, prompt: Prompt, served: Served) -> None:
        super().__init__(body, prompt, served)
        self._echo = [""] * len(prompt.texts)
        if body.echo:
            show = Tokenizer.decode if prompt.goal == "texts" else TextStream.begun
            given = zip(prompts_of(body.prompt).values(), prompt.texts, strict=True)
            self._echo = [text if isinstance(text, str) else show(served.model.tokenizer, ids) for text, ids in given]
        self._prompt_logprobs: dict[int, CompletionLogprobs] = {}
        """Log-probabilities of prompts, by their places; all answers to one prompt show the same."""
        self._logprobs: dict[int, CompletionLogprobsWriter] = {}
        """The writer of log-probabilities of each answer that has begun."""

    def write(self, answer: GatheredAnswer, event: Event) -> bytes:
        """The chunk of an event. The log-probabilities of a prompt come with the beginning of its answers."""
        if isinstance(event, PromptLogprobs):
            self._keep(answer.prompt, event)
            return b""
        stats = event.stats if isinstance(event, End | PromptProgress) or self.with_timings else None
        return self.chunk(self._choice(answer, [event]), stats, event)

    def response(self, answers: Sequence[GatheredAnswer]) -> dict[str, Any]:
        """The completion as one object."""
        for answer in answers:
            for event in answer.events[:1]:
                if isinstance(event, PromptLogprobs):
                    self._keep(answer.prompt, event)
        return self.with_usage([self._choice(answer, answer.events) for answer in answers], answers)

    def _keep(self, prompt: int, event: PromptLogprobs) -> None:
        """Keep the log-probabilities of a prompt as completions have them, once for all its answers."""
        if prompt not in self._prompt_logprobs:
            writer, ids = CompletionLogprobsWriter(self.served.model.tokenizer), self._prompt.texts[prompt]
            self._prompt_logprobs[prompt] = joined([writer.first(ids[0]), writer.write(event.found)])

    def _choice(self, answer: GatheredAnswer, events: Sequence[Event]) -> CompletionChoice:
        """The choice with the text of its latest events; the prompt goes before the first, where it is wanted."""
        echo, parts, end = self._echo[answer.prompt], [], answer.end
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        if answer.index not in self._logprobs:
            text = echo + text
            ids = self._prompt.texts[answer.prompt]
            self._logprobs[answer.index] = CompletionLogprobsWriter(self.served.model.tokenizer, len(echo), after=ids)
            parts = [self._prompt_logprobs[answer.prompt]] if answer.prompt in self._prompt_logprobs else []
        found = [logprob for event in events for logprob in event.logprobs]
        found += [] if end is None or end.ending is None else [end.ending]
        choice: CompletionChoice = {
            "index": answer.index,
            "text": text,
            "logprobs": joined([*parts, self._logprobs[answer.index].write(found)]) if self.wants_logprobs else None,
            "finish_reason": None if end is None else FINISH_REASONS[end.finish_reason],
        }
        if self.with_tokens:
            choice["tokens"] = [token for event in events for token in event.tokens]
        return choice


def prompts_of(prompt: Any, field: str = "prompt") -> dict[str, str | list[int | str]]:
    """The prompts of a request, by their fields; none at all is the beginning of a text.

    A list that has any token id is one prompt."""
    if not isinstance(prompt, list) or any(isinstance(part, int) for part in prompt):
        return {field: _text(prompt)}
    return {f"{field}[{n}]": _text(part) for n, part in enumerate(prompt)}


def _text(prompt: Any) -> Any:
    return prompt.text if isinstance(prompt, TextObject) else prompt or ""
