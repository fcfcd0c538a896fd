"""Constrained answers: which tokens may follow, by a grammar that the library llguidance compiles.

A grammar speaks of bytes. llguidance knows those of each token from tokenizer.json, and says after each token which
ones keep the text within the grammar. The model's ids for the end of text may follow where the text is complete.
"""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any, Generic, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt
import tokenizers

from pi_runtime.errors import ArtifactError, PiError, Setting, UsageError
from pi_runtime.errors.exit_codes import missing_extra
from pi_runtime.text.schemas import Schema, closed

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LatestValues(Generic[K, V]):
    """Keeps values by keys. Threads may use it at once; two that miss the same value both make it.

    >>> kept = LatestValues[str, int](bytes_most=10)
    >>> [kept.get(key, 6, lambda: n) for n, key in enumerate("aaba")]
    [0, 0, 2, 3]
    """

    def __init__(self, bytes_most: int) -> None:
        self._most, self._nbytes = bytes_most, 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K, nbytes: int, make: Callable[[], V]) -> V:
        """The value of a key, made if it is not kept. `nbytes`: what it takes. The latest is kept in any case."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        value = make()
        with self._lock:
            if key not in self._values:
                self._values[key] = value, nbytes
                self._nbytes += nbytes
            while self._nbytes > self._most and len(self._values) > 1:
                self._nbytes -= self._values.popitem(last=False)[1][1]
        return value

    def drop(self, key: K) -> int:
        """Forget the value of a key; returns what it took, 0 if it is not kept."""
        with self._lock:
            _, nbytes = self._values.pop(key, (None, 0))
            self._nbytes -= nbytes
            return nbytes


Mask = npt.NDArray[np.bool_]
Ids = Sequence[int] | npt.NDArray[np.integer[Any]]

COMPILED_BYTES = 64 << 20
"""What the compiled grammars may take that a model keeps for later answers."""
COMPILED_OF_SOURCE = 256
"""Bytes of a compiled grammar for one of its source, or less: schemas of 100 and more fields were measured."""
LEAST_COMPILED = 64 << 10
"""What a compiled grammar takes at least."""
BEGUN_ANEW = 3
"""How many times an answer's grammar is compiled anew, where it became too complex after other tokens."""
FIRST_S, EACH_S = 1.0, 0.002
"""Processor time that following a grammar may take in all, and for each token besides. The engine's thread waits for
it; usual grammars take a hundredth of that."""
STAND_IN_END = "<|end of grammar|>"
"""Ends the text for llguidance, which needs such a token, where the model has none."""

FIXED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space of JSON as `json.dumps` and chat templates write it."""
BOUNDED = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}"}
"""White space of JSON where it may be: as in llama.cpp's grammars. A weak model that may put in any puts in a lot."""


def with_white_space(schema: Schema, *, fixed: bool) -> Schema:
    """A schema of the same JSON, with bounded white space, or that of `json.dumps`; `x-guidance` is of llguidance."""
    if schema is False:
        return False
    own = {} if schema is True else schema
    return {**own, "x-guidance": FIXED if fixed else own.get("x-guidance", BOUNDED)}


@dataclass(frozen=True)
class Grammar:
    """What an answer must be: JSON by a schema, text of a regular expression, or of a Lark grammar.

    >>> Grammar.regex("[0-9]{4}-[0-9]{2}")
    Grammar(kind='regex', source='[0-9]{4}-[0-9]{2}')
    """

    kind: Literal["json-schema", "regex", "lark"]
    source: str

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            raise UsageError(setting=self.setting, expected="text", found=repr(self.source)[:80])

    @property
    def setting(self) -> Setting:
        """The setting that gives a grammar of this kind."""
        return Setting(self.kind.replace("-", "_"))

    @classmethod
    def json_schema(cls, schema: Schema | str, *, fixed_separators: bool | None = None) -> Self:
        """JSON that a schema describes. The schema may be JSON text itself; raises UsageError where that is no JSON.

        Objects with properties have no others, unless the schema says so (`additionalProperties`). White space is a
        blank, or one or two line ends and up to 20 blanks or tabs, wherever it may be. `fixed_separators`: it is as
        `json.dumps` writes it, `, ` and `: ` and no other.
        """
        if fixed_separators not in (None, False, True):
            found = repr(fixed_separators)[:80]
            raise UsageError(setting=Setting("fixed_separators"), expected="true or false", found=found)
        try:
            value = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(value, Mapping | bool):
                raise UsageError(setting=Setting("json_schema"), expected="a JSON object", found=repr(value)[:80])
            return cls("json-schema", json.dumps(with_white_space(closed(value), fixed=bool(fixed_separators))))
        except (ValueError, TypeError, RecursionError) as error:
            raise UsageError("not JSON", setting=Setting("json_schema"), found=str(error)[:200]) from None

    @classmethod
    def of(
        cls,
        *,
        json_schema: Any = None,
        regex: str | None = None,
        lark: str | None = None,
        fixed_separators: bool | None = None,
    ) -> Self | None:
        """The one grammar that settings name; None where they name none. Raises UsageError for several."""
        if [json_schema, regex, lark].count(None) < 2:
            names = Setting("json_schema"), ", ", Setting("regex"), " and ", Setting("lark")
            raise UsageError(("give one of ", names))
        if json_schema is not None:
            return cls.json_schema(json_schema, fixed_separators=fixed_separators)
        if regex is not None:
            return cls.regex(regex)
        return None if lark is None else cls.lark(lark)

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Text that a regular expression matches from beginning to end: Rust's syntax, without look-around."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Self:
        """Text that follows from the rule `start` of a Lark grammar, as llguidance writes these."""
        return cls("lark", grammar)

    @classmethod
    def gbnf(cls, grammar: str) -> Self:
        """Text that follows from the rule `root` of a grammar in llama.cpp's form. Raises UsageError for no such."""
        try:
            from llguidance.gbnf_to_lark import gbnf_to_lark  # noqa: PLC0415  optional

            return cls.lark(gbnf_to_lark(grammar))
        except ModuleNotFoundError as error:
            raise (missing_extra(error.name or "") or error) from None
        except Exception as error:
            raise UsageError("no GBNF", setting=Setting("grammar"), found=str(error)[:200]) from None


class GrammarCompiler:
    """Compiles grammars for one model's tokens. Building it takes up to a second for a large vocabulary.

    Raises MissingExtraError where llguidance is not installed, ArtifactError for a tokenizer that it does not know.
    """

    def __init__(self, library: tokenizers.Tokenizer, end_ids: Iterable[int], vocab_size: int) -> None:
        try:
            import llguidance  # noqa: PLC0415  optional
        except ModuleNotFoundError as error:
            raise (missing_extra(error.name or "") or error) from None
        self._llguidance = llguidance
        self._end_ids, self._vocab_size = np.array(list(end_ids), np.int64), vocab_size
        ends = self._end_ids.tolist()
        if not ends:
            library = tokenizers.Tokenizer.from_str(library.to_str())
            library.add_special_tokens([STAND_IN_END])
            ends = [library.token_to_id(STAND_IN_END)]
        size = max(vocab_size, library.get_vocab_size())
        try:
            self._tokens = llguidance.LLTokenizer(library.to_str(), n_vocab=size, eos_token=ends)
        except ValueError as error:
            raise ArtifactError(
                "tokenizer.json: a grammar needs the bytes of each token, and this kind does not tell them",
                expected="byte-level or byte-fallback tokens",
                found=str(error)[:200],
                remedy="ask without a grammar",
            ) from None
        self._stand_in = None if self._end_ids.size else ends[0]
        self._compiled = LatestValues[Grammar, Any](COMPILED_BYTES)

    def start(self, grammar: Grammar, prompt_tokens: int = 0, *, nbytes: int = 0) -> "GrammarState":
        """The state after a prompt of so many tokens. Raises UsageError for a grammar that is none, and for one that is
        too complex for its first token. `nbytes`: what it takes, as `check_grammar` found."""
        compiled = self._kept(grammar, nbytes)
        if not _begins(compiled):  # it did once: what became too complex in one answer is the same for all its copies
            compiled = self._kept(grammar, self._compiled.drop(grammar))
        if not _begins(compiled):
            raise UsageError("too complex", setting=grammar.setting, expected="one whose first token can be found")
        matchers = chain((compiled.deep_copy(),), (self._compile(grammar) for _ in range(BEGUN_ANEW)))
        return GrammarState(matchers, self._end_ids, self._stand_in, self._vocab_size, prompt_tokens)

    def _kept(self, grammar: Grammar, nbytes: int) -> Any:
        usual = LEAST_COMPILED + COMPILED_OF_SOURCE * len(grammar.source)
        return self._compiled.get(grammar, max(nbytes, usual), lambda: self._compile(grammar))

    def _compile(self, grammar: Grammar) -> Any:
        matcher = self._llguidance.LLMatcher
        read = {
            "json-schema": matcher.grammar_from_json_schema,
            "regex": matcher.grammar_from_regex,
            "lark": matcher.grammar_from_lark,
        }[grammar.kind]
        found = matcher(self._tokens, read(grammar.source), log_level=0)
        if found.is_error():
            raise UsageError("cannot be used", setting=grammar.setting, found=found.get_error().strip()[:500])
        return found


def _begins(compiled: Any) -> bool:
    """Whether the library finds out which tokens a text may begin with."""
    matcher = compiled.deep_copy()
    matcher.compute_bitmask()
    return not matcher.is_error()


class GrammarState:
    """How far an answer has come in its grammar. It is given the tokens so far, prompt included, which only grow."""

    def __init__(
        self,
        matchers: Iterator[Any],
        end_ids: npt.NDArray[np.int64],
        stand_in: int | None,
        vocab_size: int,
        prompt_tokens: int,
    ) -> None:
        """`matchers` have seen nothing. A further one is taken where the library gives up the one before."""
        self._matchers, self._matcher, self._vocab_size = matchers, next(matchers), vocab_size
        self._spent_s = 0.0
        """Processor time that the library has taken."""
        self._end_ids, self._stand_in = end_ids, stand_in
        self._ends = frozenset([*end_ids.tolist(), stand_in])
        self._prompt_tokens = self._length = prompt_tokens

    def allowed(self, seen_ids: Ids) -> Mask:
        """Whether each token of the vocabulary may follow. Raises PiError where the grammar has become too complex."""
        packed, ends = self._from_library(seen_ids, lambda matcher: (matcher.compute_bitmask(), matcher.is_accepting()))
        bits = np.frombuffer(packed, np.uint8)
        mask: Mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)
        if self._stand_in is not None and self._stand_in < self._vocab_size:
            mask[self._stand_in] = False
        # An id may end the text and be text itself.
        mask[self._end_ids] = ends
        return mask

    def is_complete(self, seen_ids: Ids) -> bool:
        """Whether nothing may follow but the end."""
        return bool(self._from_library(seen_ids, lambda matcher: matcher.is_stopped()))

    def forced(self, seen_ids: Ids) -> list[int]:
        """The tokens that the tokenizer makes of the text that alone may follow; none where several texts may.

        The model may spell the same text in other tokens.
        """
        found = self._from_library(seen_ids, lambda matcher: matcher.compute_ff_tokens())
        return list(takewhile(lambda token: token not in self._ends, found))

    def _from_library(self, seen_ids: Ids, ask: Callable[[Any], Any]) -> Any:
        """Ask the library after these tokens.

        It gives a grammar up for good where it has become too complex, and all copies of its compilation with it. That
        may have happened after drafted tokens, or in another's answer: what these tokens allow is asked anew.
        """
        began = time.thread_time()
        self._follow(seen_ids)
        found = ask(self._matcher)
        if self._matcher.is_error() and (fresh := next(self._matchers, None)) is not None:
            self._matcher, self._length = fresh, self._prompt_tokens
            self._follow(seen_ids)
            found = ask(self._matcher)
        self._spent_s += time.thread_time() - began
        if self._matcher.is_error():
            # The library's message has the answer's last tokens in it, and the inside of its parser.
            raise PiError("the grammar cannot be followed", found="it has become too complex here")
        answered = len(seen_ids) - self._prompt_tokens
        if self._spent_s > FIRST_S + EACH_S * answered:
            took = f"{self._spent_s:.1f} s of processor time for {answered} tokens"
            raise PiError("the grammar takes too long to follow", found=took)
        return found

    def _follow(self, seen_ids: Ids) -> None:
        if len(seen_ids) < self._length:  # tokens that were drafted are taken back
            self._matcher.rollback(self._length - len(seen_ids))
            self._length = len(seen_ids)
        for token in seen_ids[self._length :]:
            self._matcher.consume_token(int(token))
        self._length = len(seen_ids)
