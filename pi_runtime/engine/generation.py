"""Generation: prompt in, text out, by the engine's core in the caller's thread, with a cache of the caller's."""

from collections.abc import Iterable, Iterator

from pi_runtime.engine.core import Core
from pi_runtime.engine.scheduler import PIECE, PromptPace, Scheduler
from pi_runtime.engine.stream import AnswerIterator
from pi_runtime.errors import DoesNotFitError
from pi_runtime.execution.executor import Executor
from pi_runtime.execution.kv_cache import KVCache, common_length
from pi_runtime.execution.pages import PagesExhausted
from pi_runtime.sequence.answer import AnswerSequence
from pi_runtime.sequence.drafts import Speculation
from pi_runtime.sequence.sequence import Output, TokenSequence


class Generation(AnswerIterator):
    """An iterator over the parts of a generated text. Joined, they are the whole text; no part splits a character.

    `finish_reason` is None while it runs, then `end` (the model ended its text), `stop` (a stop string),
    `length` (`max_tokens`) or `context` (no position left).
    """

    def __init__(self, executor: Executor, cache: KVCache, sequence: AnswerSequence, speculation: Speculation) -> None:
        super().__init__(sequence, executor.neurons)
        self._outputs = run_alone(executor, cache, sequence, speculation)

    def __next__(self) -> str:
        return next(self._outputs).text


def run_alone(
    executor: Executor, cache: KVCache, sequence: TokenSequence, speculation: Speculation
) -> Iterator[Output]:
    """Run one sequence until it is complete, a step whenever more is asked for. Raises what ends it."""
    pace = PromptPace(0, None, executor.block_tokens)
    core = Core(executor, OneCache(cache), Scheduler(1, PIECE), pace, speculation)
    core.submit(sequence)
    while True:
        while not sequence.outputs.empty():
            output = sequence.outputs.get()
            if output.error is not None:
                raise output.error
            if output.ended:
                return
            yield output
        core.step()


class OneCache:
    """A cache of the caller's, for one sequence after another. What it holds stays in it."""

    may_open = True

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def open(self, sequence: TokenSequence, _: Iterable[KVCache]) -> KVCache | None:
        """The cache, with as much as it holds of the sequence's tokens, or as was kept of them."""
        cache, kept, self._sequence = self._cache, self._cache.kept, sequence
        cache.keep_common_prefix(sequence.tokens)
        cache.truncate(sequence.num_reusable)
        most = sequence.tokens[: min(sequence.num_reusable, len(sequence.tokens) - 1)]
        if kept is not None and cache.length < kept.length == common_length(kept.tokens, most):
            cache.close()
            cache.adopt(kept.runs, kept.tokens, kept.selected)
            cache.kept = kept
        return cache

    def share(self, cache: KVCache) -> None:
        """Keep the last place of a prompt from which a later one, which may have another end, can go on."""
        if cache.length in self._sequence.stops:
            cache.kept = None
            cache.kept = cache.fork()

    def grow(self, cache: KVCache, count: int) -> bool:
        """Make room for so many further tokens; raises what the cache's pool raises where it cannot."""
        try:
            cache.reserve(count)
        except (PagesExhausted, DoesNotFitError):
            if cache.kept is None:
                raise
            cache.kept = None
            cache.reserve(count)
        return True

    grow_freely = grow

    def nothing(self, *_: object) -> None:
        """Nobody else begins with what the cache holds."""

    catch_up = keep = release = count_step = nothing
