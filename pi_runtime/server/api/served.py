"""The model that a server serves, as its answers speak of it."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, NoReturn

from pi_runtime.engine.model import Model
from pi_runtime.errors import PromptError, TemplateError
from pi_runtime.server.api.body import invalid
from pi_runtime.server.errors import ApiError, refused
from pi_runtime.server.settings import ServerSettings
from pi_runtime.text.template_abilities import UNKNOWN, Abilities

UNSAID: Mapping[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.05}
"""How tokens are drawn where neither request nor model says: llama-server's temperature, top-p and min-p."""


@dataclass(frozen=True)
class Served:
    """One model. A request that names another is refused: nobody is to take this model's answers for another's."""

    model: Model
    settings: ServerSettings
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """The name that requests give."""
        return self.settings.model_name

    @property
    def created_at(self) -> str:
        """When it was loaded, as ISO 8601 has it."""
        return datetime.fromtimestamp(self.created, UTC).isoformat().replace("+00:00", "Z")

    @cached_property
    def fingerprint(self) -> str:
        """Says what texts depend on beside the request: the artifact and the mode."""
        return f"fp_{self.model.digest[:12]}_{self.model.mode}"

    @cached_property
    def template(self) -> str:
        """The source of the model's chat template; empty where it has none."""
        try:
            return self.model.chat_template.source
        except TemplateError:
            return ""

    @property
    def abilities(self) -> Abilities:
        """What the model's chat template can show."""
        return self.model.chat_template.abilities if self.template else UNKNOWN

    @cached_property
    def generation(self) -> Mapping[str, Any]:
        """How tokens are drawn where a request does not say: as the model's makers say, or else as `UNSAID`."""
        found = {name: value for name, value in self.model.manifest.generation.items() if value is not None}
        return found if "do_sample" in found else {**UNSAID, **found}

    def most_tokens(self, given: int | None, default: int | None = None) -> int | None:
        """Most tokens of an answer; None until its end, which a number below 0 asks for. `default`: the form's own."""
        most = self.settings.max_tokens or default if given is None else given
        return None if most is None or most < 0 else most

    def check_name(self, name: str | None) -> None:
        """Raise ApiError 404 where a request asks for another model; one that names none asks for this one."""
        if name not in (None, self.name, *self.settings.aliases):
            raise ApiError(
                404,
                f"the model {name!r} does not exist: this server has one model, {self.name!r}",
                type="invalid_request_error",
                param="model",
                code="model_not_found",
            )

    def encode(self, text: str, param: str, *, prefix: bool = True, beside: int = 1) -> list[int]:
        """The tokens of a text. Raises ApiError for one that is too long to be tokenized, and for no Unicode.

        It may have the bytes of the longest tokens that fit the context: tokenizing takes a hundred times its memory.
        """
        nbytes, longest = len(text.encode("utf-8", "surrogatepass")), self.model.tokenizer.longest
        if nbytes > longest * max(0, self.model.context - beside):
            self._refuse("at least ", -(-nbytes // longest), param, beside)
        try:
            return self.model.tokenizer.encode(text, prefix=prefix)
        except PromptError as error:
            raise invalid(param, refused(error).message) from None

    def count(self, text: str, param: str) -> int:
        """How many tokens a text has. More than fit the context are counted too, as far as it can be tokenized."""
        return len(self.encode(text, param, beside=0))

    def tokens(self, prompt: str | Sequence[int | str], param: str, *, beside: int = 1) -> list[int]:
        """The token ids of a prompt that is text, ids, or both in turns, of which a first text begins as prompts do.

        Raises ApiError for one that is empty, wrong or too long.
        """
        parts, ids = [prompt] if isinstance(prompt, str) else prompt, list[int]()
        self.check_length(len(parts), param, beside=beside)
        for n, part in enumerate(parts):
            if isinstance(part, str):
                ids += self.encode(part, param, prefix=n == 0, beside=beside)
                self.check_length(len(ids), param, beside=beside)
            else:
                ids.append(part)
        if not ids:
            raise invalid(param, "the prompt is empty, and the model has no begin-of-text token to start from")
        self.check_length(len(ids), param, beside=beside)
        self.check_tokens(ids, param)
        return ids

    def check_length(self, tokens: int, param: str, *, beside: int = 1) -> None:
        """Raise ApiError where tokens do not fit the context beside others: the first of an answer, as a rule."""
        if tokens > max(0, self.model.context - beside):
            self._refuse("", tokens, param, beside)

    def _refuse(self, least: str, tokens: int, param: str, beside: int) -> NoReturn:
        """Raise the ApiError of a prompt that is too long, in the words by which clients of other servers know it."""
        most = max(0, self.model.context - beside)
        said = f"the prompt is too long: {least}{tokens} tokens, which exceeds the available context size; "
        error = invalid(param, f"{said}at most {most} fit the context", code="context_length_exceeded")
        error.figures = {"n_prompt_tokens": tokens, "n_ctx": self.model.context}
        raise error

    def check_tokens(self, ids: Sequence[int], param: str) -> None:
        """Raise ApiError where one of the ids is none of the model's."""
        vocabulary = self.model.manifest.decoder.vocab_size
        for n, token in enumerate(ids):
            if not 0 <= token < vocabulary:
                raise invalid(f"{param}[{n}]", f"token ids are below {vocabulary}; found {token}")


def new_id(prefix: str) -> str:
    """A fresh identifier."""
    return f"{prefix}{secrets.token_hex(12)}"
