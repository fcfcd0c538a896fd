"""What callers read of a request: an answer with all that belongs to it, or the log-probabilities of a prompt."""

import weakref
from collections.abc import Callable, Iterator
from queue import Empty
from typing import Generic, TypeVar

from pi_runtime.sequence.answer import AnswerSequence
from pi_runtime.sequence.embedding import EmbeddingSequence
from pi_runtime.sequence.sampling import TokenLogprobs
from pi_runtime.sequence.sequence import Output, ReadSequence, ScoreSequence, TokenSequence
from pi_runtime.sequence.stats import Stats


class AnswerIterator(Iterator[str]):
    """An iterator over the parts of a generated text, with what is known of the answer up to now."""

    def __init__(self, sequence: AnswerSequence, neurons: int) -> None:
        self._sequence, self._neurons = sequence, neurons

    @property
    def finish_reason(self) -> str | None:
        """Why the text ended; None while it runs, or where an error ended it."""
        return self._sequence.finish_reason

    @property
    def prompt(self) -> list[int]:
        """The tokens that are continued."""
        return self._sequence.prompt

    @property
    def token_ids(self) -> list[int]:
        """The tokens generated up to now."""
        return self._sequence.token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities of the tokens generated up to now, if they were asked for."""
        return self._sequence.logprobs

    @property
    def ending(self) -> TokenLogprobs | None:
        """The log-probability of the token that ended the text and is no part of it, if they were asked for."""
        return self._sequence.ending

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None where something else did, or nothing yet."""
        return self._sequence.stop_string

    @property
    def seed(self) -> int | None:
        """The seed of its draws: with it the same text comes again. None where it is greedy."""
        return self._sequence.seed

    @property
    def stats(self) -> Stats:
        """The figures up to now. Seconds are those of the steps it was part of, the others' work included."""
        return self._sequence.stats(self._neurons)


class Stream(AnswerIterator):
    """An iterator over the parts of a generated text, as a `Generation` is. The engine goes on, read or not.

    `finish_reason` is None while it runs, then `end`, `stop`, `length` or `context` as for a generation, or
    `cancelled`. A stream that nobody refers to any more is cancelled. Iterating raises the error that ended this
    request, or the engine.
    """

    def __init__(self, sequence: AnswerSequence, neurons: int) -> None:
        super().__init__(sequence, neurons)
        weakref.finalize(self, sequence.cancel).atexit = False

    def __next__(self) -> str:
        output = self._sequence.outputs.get()
        if not output.ended:
            return output.text
        self._sequence.outputs.put(output)  # for whoever asks again
        if output.error is None:
            raise StopIteration
        raise output.error

    def listen(self, notify: Callable[[], object]) -> None:
        """Have a function called when something has come, by the engine's thread, which must not wait; and once now.

        It must not refer to the stream, which would then never be dropped.
        """
        self._sequence.notify = notify
        notify()

    @property
    def read_tokens(self) -> int | None:
        """Tokens of the prompt that have been read or were stored; None while it waits for its turn."""
        read = min(self._sequence.num_computed, len(self.prompt))
        return read if read or self.is_running else None

    def expect_back(self) -> None:
        """Say that the answer calls a tool: its text goes on once the tool has worked, and memory waits for that."""
        self._sequence.outcome.in_call = True

    def read(self) -> Output:
        """What has come since the last call, without waiting. For those who `listen`, in place of iterating."""
        texts, num_tokens = [], 0
        try:
            while not (output := self._sequence.outputs.get_nowait()).ended:
                texts.append(output.text)
                num_tokens = output.num_tokens
        except Empty:
            return Output("".join(texts), num_tokens)
        self._sequence.outputs.put(output)  # for whoever asks again
        return output._replace(text="".join(texts))

    @property
    def is_running(self) -> bool:
        """Whether it has a slot, and neither waits for one nor has ended."""
        return self._sequence.is_running

    @property
    def chars(self) -> int:
        """Characters of text up to now, read or not."""
        return self._sequence.num_chars

    def cancel(self) -> None:
        """End it before the engine's next step; its memory is free then. Does nothing once it has ended."""
        self._sequence.cancel()


S = TypeVar("S", bound=TokenSequence)


class Awaited(Generic[S]):
    """A sequence without a text of its own, for whose end its caller waits."""

    def __init__(self, sequence: S) -> None:
        self._sequence = sequence

    def listen(self, notify: Callable[[], object]) -> None:
        """Have a function called by the engine's thread when `result` no longer waits; and once now."""
        self._sequence.notify = notify
        notify()

    @property
    def done(self) -> bool:
        """Whether `result` no longer waits."""
        return not self._sequence.outputs.empty()

    def cancel(self) -> None:
        """End it before the engine's next step. Does nothing once it has ended."""
        self._sequence.cancel()

    def _wait(self) -> None:
        """Wait for the end. Raises what ended it, or the engine."""
        end = self._sequence.outputs.get()
        self._sequence.outputs.put(end)  # for whoever asks again
        if end.error is not None:
            raise end.error


class Wanted(Awaited[S]):
    """A sequence whose result is wanted. One that nobody refers to any more is cancelled."""

    def __init__(self, sequence: S) -> None:
        super().__init__(sequence)
        weakref.finalize(self, sequence.cancel).atexit = False


class Scores(Wanted[ScoreSequence]):
    """Log-probabilities of a prompt that are being computed."""

    def result(self) -> list[TokenLogprobs]:
        """Wait for the log-probabilities; of a cancelled request those found. Raises what ended it, or the engine."""
        self._wait()
        return self._sequence.logprobs


class Vector(Wanted[EmbeddingSequence]):
    """The vector of a text that is being computed."""

    def result(self) -> list[float]:
        """Wait for the vector. Raises what ended it, or the engine."""
        self._wait()
        return self._sequence.vector


class Reading(Awaited[ReadSequence]):
    """A prompt that is being read ahead. It goes on where nobody refers to it any more."""

    def result(self) -> Stats:
        """Wait for its end, or until a newer one replaces it; returns the figures. Raises what ended it, or the engine.

        What has been read by then stays, until its memory is needed.
        """
        self._wait()
        return self._sequence.stats
